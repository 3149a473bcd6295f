"""The pair on a GPU, through the kernels: the same text, from a folder outside the package, with graphs or not."""

import pytest
import torch
from helpers.paths import MINI

from dspine_hub.evaluation.ops.correctness import check_blocks, check_round
from dspine_hub.evaluation.ops.round import Shape, random_drafter, random_round, run_round
from dspine_hub.evaluation.ops.timing import COPIES
from dspine_hub.evaluation.pair import Pair
from dspine_hub.evaluation.prompts import read_prompts
from dspine_hub.kernels_dspine import top_candidates, use_triton
from dspine_hub.publish.build import build_bundle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KERNELS = {"_readout_kernel", "_gate_kernel", "_write_kernel", "_length_kernel", "_scores_kernel", "_walk_kernel"}
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The mini drafter as a hub folder, far from this package."""
    return build_bundle(MINI / "drafter", tmp_path_factory.mktemp("hub") / "bundle")


@pytest.fixture(scope="module")
def pairs(bundle):
    return {device: Pair(MINI / "target", bundle, "float32", device) for device in ("cpu", "cuda")}


@pytest.fixture(scope="module")
def prompts():
    return read_prompts(MINI / "heldout.jsonl")[::10]


def decode(pair, prompt):
    output, _ = pair.speculative(pair.encode(prompt), NEW_TOKENS, 0.0)
    return output.sequences[0].tolist(), output.statistics


def test_the_demo_gives_the_same_text_as_on_the_cpu(pairs, prompts):
    """Catches a kernel that is wrong where the interpreter is right; and one that only drafts badly."""
    rounds = {"cpu": 0, "cuda": 0}
    for prompt in prompts:
        texts = {}
        for device, pair in pairs.items():
            texts[device], statistics = decode(pair, prompt)
            rounds[device] += statistics.rounds
        assert texts["cuda"] == texts["cpu"]
    # a near tie may fall the other way on another device
    assert abs(rounds["cuda"] - rounds["cpu"]) <= 0.02 * rounds["cpu"]


def test_a_bundle_from_a_folder_runs_the_kernels(pairs, prompts, monkeypatch):
    """Catches published code that falls back to the reference without a word."""
    import triton

    pair, launched, run = pairs["cuda"], set(), triton.JITFunction.run

    def recorded(kernel, *args, **kwargs):
        launched.add((kernel.fn.__module__.split(".")[0], kernel.fn.__name__))
        return run(kernel, *args, **kwargs)

    monkeypatch.setattr(triton.JITFunction, "run", recorded)
    # the first prompt's text ends before anything is drafted
    _, statistics = decode(pair, prompts[1])
    assert statistics.rounds > 0
    assert launched >= {("transformers_modules", name) for name in KERNELS}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_captured_drafting_equals_eager_drafting(bundle, prompts, temperature):
    """Catches a graph that reads a stale input, and one whose buffers move."""
    pair = Pair(MINI / "target", bundle, "float32", "cuda")

    def run():
        texts = []
        for prompt in prompts[:6]:
            torch.manual_seed(0)
            texts.append(pair.speculative(pair.encode(prompt), NEW_TOKENS, temperature)[0].sequences.tolist())
        return texts

    eager = run()
    pair.drafter.compile_draft(max_length=512)
    assert run() == eager


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_a_round_is_right_at_the_sizes_of_an_8b_target(batch):
    """Catches tiles that hold at small sizes only, and chosen paths bent by half precision."""
    shape = Shape(V=151_936)
    drafter = random_drafter(shape, torch.bfloat16, "cuda", seed=0)
    found = check_round(drafter, random_round(shape, batch, torch.bfloat16, "cuda", seed=batch))
    assert found["max_rel_err"] <= 1e-2


@pytest.mark.parametrize("batch", [4, 16])
def test_bfloat16_chooses_the_tokens_of_float64(batch):
    """Catches sums of the sizes of an 8B drafter that lose what small ones keep: three blocks in 10,000 may differ."""
    shape = Shape(L=1, V=4000)
    found = check_blocks(random_drafter(shape, torch.bfloat16, "cuda", seed=0), shape, batch)
    assert found["paths_equal"] >= 0.999


@pytest.mark.parametrize("batch", [1, 4])
def test_a_captured_round_equals_an_eager_one(batch):
    """Catches a value read back to the host, an output that moves, a launch that starts before its operands exist."""
    shape = Shape(V=20_000)
    drafters = [random_drafter(shape, torch.bfloat16, "cuda", seed=seed) for seed in range(COPIES)]
    inputs = random_round(shape, batch, torch.bfloat16, "cuda", seed=0)
    expected = [run_round(drafter, inputs) for drafter in drafters]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [run_round(drafter, inputs) for drafter in drafters]
    for _ in range(20):
        graph.replay()
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine[0], theirs[0], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(mine[1:], theirs[1:], strict=True))


@pytest.mark.parametrize("batch", [2, 5])
def test_the_operations_compile_without_a_break(batch):
    """Catches a wrapper Dynamo cannot trace through to the kernels."""
    shape = Shape(H=256, R=128, M=64, L=2, V=2000)
    drafter = random_drafter(shape, torch.bfloat16, "cuda", seed=0)
    inputs = random_round(shape, batch, torch.bfloat16, "cuda", seed=0)
    assert use_triton(inputs.states[0])
    logits = torch.randn(batch, 15, 2000, device="cuda").bfloat16()

    def work(one):
        return *run_round(drafter, one)[1:3], *top_candidates(logits, 16)

    (mine, *chosen), (theirs, *expected) = torch.compile(work, fullgraph=True)(inputs), work(inputs)
    # compiled graphs leave other products to these kernels than eager rounds do. Summed in another order, a message
    # may round the other way, which scales a row as a whole; by 2e-4 at most in eight emulated pairs
    own, other = mine.norm(dim=-1, keepdim=True), theirs.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(own, other, rtol=1e-3, atol=0)
    for found, right in zip((mine / own, *chosen), (theirs / other, *expected), strict=True):
        torch.testing.assert_close(found, right)
