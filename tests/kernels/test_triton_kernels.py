"""The Triton kernels against the definitions, in float64: in Triton's interpreter on a CPU, compiled on a GPU.

`TRITON_INTERPRET=1 pytest tests/kernels/test_triton_kernels.py` runs them without a GPU; `make test` does.
"""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from helpers.kernel_inputs import (
    backbone_logits,
    hidden_scores,
    injection_weights,
    naive_walk,
    score_inputs,
    tables_of,
    weights,
)

from dspine_hub.evaluation.ops.correctness import in_double
from dspine_hub.evaluation.ops.round import (
    Drafter,
    Shape,
    random_drafter,
    random_round,
    run_reference,
    run_round,
)
from dspine_hub.kernels_dspine import (
    adjacent_injection,
    adjacent_injection_reference,
    candidate_walk,
    candidate_walk_reference,
    injection_gate_kernels,
    injection_kernels,
    slot_projection,
    top_candidates,
    transition_kernels,
    transition_length_kernels,
    transition_scores,
    triton_support,
    use_triton,
)
from dspine_hub.kernels_dspine.transition_kernels import ScoreTile
from dspine_hub.kernels_dspine.transition_length_kernels import LengthTile
from dspine_hub.kernels_dspine.triton_support import ProductTile

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.skipif(
    triton_support.triton is None or not (GPU or INTERPRETED), reason="needs a GPU, or TRITON_INTERPRET=1"
)

# B, S, K, V, H, R, M: no size below is a multiple of a tile, save those of the last
SIZES = [
    pytest.param(1, 1, 1, 3, 5, 3, 2, id="tiny"),
    pytest.param(3, 1, 8, 97, 65, 33, 17, id="S1"),
    pytest.param(1, 7, 16, 211, 130, 70, 40, id="S7"),
    pytest.param(3, 15, 8, 131, 97, 66, 34, id="S15"),
    pytest.param(2, 3, 5, 29, 24, 7, 31, id="M>H"),
    # 72 rows: half precision leaves plain products to the library
    pytest.param(9, 7, 8, 131, 97, 66, 34, id="rows72"),
    pytest.param(1, 15, 16, 151_936, 64, 32, 16, id="V151936"),
]

# the norm of the error over the norm of the result, as the issue of these kernels sets it
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
# the interpreter multiplies the bits of bfloat16 as if they were integers
HALF = torch.bfloat16 if GPU else torch.float16
DTYPES = [pytest.param(torch.float32, id="float32"), pytest.param(HALF, id="half")]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fill what kernels write to with NaN, and ids with an id no vocabulary has: an element left out shows."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def fill(tensor):
        return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *args, **kw: fill(new_empty(self, *args, **kw)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kw: fill(empty_like(*args, **kw)))


def cast(values, dtype):
    """Round every floating tensor to `dtype` and move it to the device under test."""
    return {
        name: value.to(DEVICE, dtype if value.is_floating_point() else None) if torch.is_tensor(value) else value
        for name, value in values.items()
    }


def wide(values):
    return {
        name: value.cpu().double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in ((n, v.cpu() if torch.is_tensor(v) else v) for n, v in values.items())
    }


def assert_near(found, expected, dtype):
    error = float((found.cpu().double() - expected).norm() / expected.norm().clamp_min(1e-30))
    assert error <= BOUNDS[dtype], f"relative error {error:.2e}, bound {BOUNDS[dtype]:.0e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "S", "K", "V", "H", "R", "M"), SIZES)
def test_injection(B, S, K, V, H, R, M, dtype):
    """Catches a row of another request read at a block's edge, a tail column left out, a part of a split sum lost."""
    w = cast(weights(R, H, M, V), dtype)
    hidden = (2 * torch.randn(B, S + 1, H, generator=torch.Generator().manual_seed(1))).to(DEVICE, dtype)
    anchor = V - 1 - torch.arange(B, device=DEVICE) * (V - 1) // max(B - 1, 1)
    found = adjacent_injection(hidden, anchor, 0, tables_of(w))
    exact = wide(w)
    codes = exact["codes"][anchor.cpu()]
    written = adjacent_injection_reference(hidden.cpu().double(), codes, injection_weights(exact))
    assert_near(found.hidden, written, dtype)
    assert torch.equal(found.hidden[:, 0], hidden[:, 0])
    for mine, alone in zip(
        found.projection.slots(), slot_projection(hidden[:, 1:].cpu().double(), tables_of(exact)), strict=True
    ):
        assert_near(mine, alone, dtype)
    again = adjacent_injection(hidden, anchor, 0, tables_of(w))
    assert torch.equal(again.hidden, found.hidden)


@pytest.mark.parametrize("layer", [0, 1])
def test_only_the_last_layer_keeps_a_projection(layer):
    """Catches a middle layer that reads the last layer's weights, and one that reads `W^T h` as features."""
    first, last = weights(33, 65, 17, 97, seed=1), weights(33, 65, 17, 97, seed=2)
    shared = {name: last[name] for name in ("message", "receiver_gate", "predecessor_gate", "bias", "codes")}
    layers = [cast({**first, **shared}, torch.float32), cast(last, torch.float32)]
    tables = tables_of(layers[1], before=[injection_weights(layers[0])])
    hidden, anchor = torch.randn(2, 4, 65, device=DEVICE), torch.tensor([5, 96], device=DEVICE)
    found = adjacent_injection(hidden, anchor, layer, tables)
    exact = wide(layers[layer])
    expected = adjacent_injection_reference(
        hidden.cpu().double(), exact["codes"][anchor.cpu()], injection_weights(exact)
    )
    assert_near(found.hidden, expected, torch.float32)
    assert (found.projection is None) == (layer == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head", ["table", "gathered", "logits"])
@pytest.mark.parametrize(("B", "S", "K", "V", "H", "R", "M"), SIZES)
def test_scores(B, S, K, V, H, R, M, head, dtype):
    """Catches a slot that scores another slot's candidates, an anchor of another request, a lost tail."""
    inputs = cast(score_inputs(B, S, K, V, H, R, M), dtype)
    inputs["candidates"][-1, -1, 0] = V - 1
    if V > 1000:
        inputs["candidates"] += V - 1 - inputs["candidates"].amax(dim=-1, keepdim=True)
    w = {name: value for name, value in inputs.items() if name not in ("state", "candidates", "anchor")}
    tables, backbone = tables_of(w, head_messages=head != "gathered"), None
    state, candidates, anchor = inputs["state"], inputs["candidates"], inputs["anchor"]
    hidden = torch.cat((state[:, :1], state), dim=1)
    injected = adjacent_injection(hidden, anchor, 0, tables)
    if head == "logits":
        backbone = backbone_logits(injected, candidates, w["norm_weight"], w["norm_eps"], w["head_weight"])
    expected = hidden_scores(**wide(inputs))
    # a view without its anchor row, as a drafter hands it over
    projection = injected.projection.slots()
    assert_near(transition_scores(hidden[:, 1:], candidates, anchor, tables, projection, backbone), expected, dtype)
    found = transition_scores(state, candidates, anchor, tables, backbone=backbone)
    assert found.shape == (B, S, K, K)
    assert_near(found, expected, dtype)


@pytest.mark.parametrize("head", ["table", "gathered"])
@pytest.mark.parametrize("batch", [2, 5], ids=["rows32", "rows80"])
def test_near_ties_are_told_apart_in_half_precision(batch, head):
    """Catches an operand of the scores rounded to half precision: tokens then differ in one block of a hundred."""
    shape = Shape(H=256, R=256, M=256, L=1, V=500)
    drafter, inputs = random_drafter(shape, HALF, DEVICE, seed=0), random_round(shape, batch, HALF, DEVICE, seed=1)
    exact = Drafter(*map(in_double, drafter[:4]), tables=None)
    expected = run_reference(exact, in_double(inputs))[1]
    if head == "gathered":
        drafter = drafter._replace(tables=dataclasses.replace(drafter.tables, head_messages=None))
    found = run_round(drafter, inputs)[1].double()
    first, second = expected.topk(2, dim=-1).indices.split(1, dim=-1)
    gap, own = (x.gather(-1, first) - x.gather(-1, second) for x in (expected, found))
    near = gap < 0.1
    assert int(near.sum()) > 50
    # a row's length is common to its candidates and may be rounded; between near ties that tells little
    assert float((own - gap)[near].pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()) < 6e-5


def set_tile(monkeypatch, module, name, tile):
    """Cut what a table of tiles is for in another way, in float32."""
    monkeypatch.setattr(module, name, getattr(module, name)._replace(float32=tile))


@pytest.mark.parametrize("rows", [(1, 32, 32, 1), (1, 16, 32, 3), (2, 32, 64, 2), (4, 16, 16, 1)], ids=str)
def test_every_cut_of_the_scores_gives_the_same(monkeypatch, rows):
    """Catches a cut that holds only for the sizes it was tuned on: several slots a program, parts of a split sum."""
    slots, columns, depth, split = rows
    set_tile(monkeypatch, transition_length_kernels, "LENGTH_TILES", LengthTile(slots, columns, depth, stages=2))
    set_tile(monkeypatch, transition_kernels, "SCORE_TILES", ScoreTile(columns, depth, split=split, stages=2))
    inputs = cast(score_inputs(3, 5, 8, 97, 70, 33, 40), torch.float32)
    w = {name: value for name, value in inputs.items() if name not in ("state", "candidates", "anchor")}
    found = transition_scores(inputs["state"], inputs["candidates"], inputs["anchor"], tables_of(w))
    assert_near(found, hidden_scores(**wide(inputs)), torch.float32)


@pytest.mark.parametrize("cut", [(16, 16, 32, 1), (32, 16, 16, 3), (16, 64, 64, 1), (16, 16, 16, 4)], ids=str)
def test_every_cut_of_the_injection_gives_the_same(monkeypatch, cut):
    """Catches a split that leaves a part of the hidden axis out, and a counter left behind by an earlier launch."""
    tile = ProductTile(*cut[:3], split=cut[3], stages=2)
    set_tile(monkeypatch, injection_kernels, "READOUT_TILES", tile)
    set_tile(monkeypatch, injection_gate_kernels, "GATE_TILES", tile)
    set_tile(monkeypatch, injection_kernels, "WRITE_TILES", tile)
    w = cast(weights(33, 130, 40, 97), torch.float32)
    tables, exact = tables_of(w), wide(w)
    for seed in range(2):
        hidden = torch.randn(3, 8, 130, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        anchor = torch.tensor([1, 2, 3], device=DEVICE)
        expected = adjacent_injection_reference(hidden.cpu().double(), exact["codes"][1:4], injection_weights(exact))
        assert_near(adjacent_injection(hidden, anchor, 0, tables).hidden, expected, torch.float32)
    assert not bool(tables.arrivals.any())


def test_zero_states():
    """Catches a division by the length of a state: a zero row is not written to and its scores are 0, not NaN."""
    inputs = cast(score_inputs(2, 3, 4, 29, 17, 5, 3), torch.float32)
    inputs["state"][:, 1] = 0
    w = {name: value for name, value in inputs.items() if name not in ("state", "candidates", "anchor")}
    tables, hidden = tables_of(w), torch.cat((inputs["state"][:, :1], inputs["state"]), dim=1)
    injected = adjacent_injection(hidden, inputs["anchor"], 0, tables)
    assert torch.equal(injected.hidden[:, 2], torch.zeros(2, 17, device=DEVICE))
    assert bool(injected.hidden.isfinite().all())
    projection = injected.projection.slots()
    scores = transition_scores(hidden[:, 1:], inputs["candidates"], inputs["anchor"], tables, projection)
    assert torch.equal(scores[:, 1], torch.zeros(2, 4, 4, device=DEVICE))
    assert_near(scores, hidden_scores(**wide(inputs)), torch.float32)


@pytest.mark.parametrize(("S", "K"), [(1, 1), (7, 8), (15, 16), (4, 3)], ids=str)
def test_walk(S, K):
    """Catches a greedy row disturbed by sampled neighbours, a padded candidate drawn, a q of the wrong row."""
    g = torch.Generator().manual_seed(S * K)
    B = 5
    scores = 2 * torch.randn(B, S, K, K, generator=g)
    candidates = torch.stack([torch.randperm(97, generator=g)[:K] for _ in range(B * S)]).view(B, S, K)
    temperature = torch.tensor([0.0, 0.7, 1.0, 2.5, 0.0])
    uniforms = torch.rand(B, S, generator=g)
    uniforms[1], uniforms[2] = 0, 1 - 2**-24
    found = candidate_walk(*(x.to(DEVICE) for x in (scores, candidates, temperature, uniforms)))
    tokens, q = (x.cpu() for x in found)
    for b in range(B):
        expected, rows = naive_walk(scores[b], candidates[b], float(temperature[b]), uniforms[b])
        assert tokens[b].tolist() == expected
        torch.testing.assert_close(q[b].double(), rows, rtol=1e-5, atol=1e-6)
    reference = candidate_walk_reference(scores, candidates, temperature, uniforms)
    assert torch.equal(tokens, reference[0])


def test_walk_never_draws_the_impossible():
    """Catches an index one past the end, and a candidate of probability exactly 0."""
    scores = torch.full((2, 2, 4, 4), -torch.inf, device=DEVICE)
    scores[..., 1] = 0.3
    scores[..., 2] = 0.1
    uniforms = torch.tensor([[0.0, 0.0], [1 - 2**-24, 1 - 2**-24]], device=DEVICE)
    candidates = torch.arange(8, device=DEVICE).view(1, 2, 4).expand(2, -1, -1)
    tokens, _ = candidate_walk(scores, candidates, torch.ones(2, device=DEVICE), uniforms)
    assert tokens.tolist() == [[1, 5], [2, 6]]


def logits_of(kind, rows, V):
    g = torch.Generator().manual_seed(7)
    if kind == "ties":
        return torch.randint(-2, 2, (rows, V), generator=g).float()
    if kind == "impossible":
        return torch.full((rows, V), float("-inf")).index_fill_(1, torch.tensor([0, V - 1]), -3.0)
    return torch.randn(rows, V, generator=g) - (100 if kind == "negative" else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["spread", "negative", "ties", "impossible"])
@pytest.mark.parametrize(
    ("rows", "V", "K"), [(3, 3, 1), (2, 97, 5), (5, 128, 16), (4, 300, 16), (2, 5000, 64), (2, 151_936, 16)]
)
def test_top_candidates(rows, V, K, kind, dtype):
    """Catches a group that is skipped, a tail read beyond the row, equal logits taken in an order of chance."""
    # a view, as the rows of a wider matrix are
    logits = logits_of(kind, rows, V + 3).to(DEVICE, dtype)[:, :V]
    values, ids = top_candidates(logits, K)
    expected = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :K]
    assert torch.equal(ids, expected)
    assert torch.equal(values, logits.gather(-1, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_top_candidates_keeps_the_axes_before(dtype):
    """Catches a result flattened over requests and slots, and a number of 64 bits read as one of 32."""
    logits = torch.randn(2, 3, 300, device=DEVICE, dtype=dtype)
    assert torch.equal(top_candidates(logits, 4)[1], logits.topk(4, dim=-1).indices)


def test_these_tests_ran_the_kernels():
    """Catches a suite that compares the reference with itself."""
    assert use_triton(torch.zeros(1, device=DEVICE))


@pytest.mark.skipif(GPU, reason="a GPU needs no interpreter")
def test_without_triton_the_wrappers_run_the_reference():
    """Catches a kernel file that cannot be imported where Triton is not installed."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\nfrom dspine_hub.kernels_dspine import candidate_walk, use_triton\n"
        "assert not use_triton(torch.zeros(1))\n"
        "s = torch.randn(1, 2, 3, 3); c = torch.arange(6).view(1, 2, 3)\n"
        "print(candidate_walk(s, c, torch.zeros(1), torch.zeros(1, 2))[0].shape)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "torch.Size([1, 2])", result.stderr
