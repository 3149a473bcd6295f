"""The three operations alone: against float64 loops, against each other, and at odd sizes."""

import dataclasses
import math

import pytest
import torch
from helpers.kernel_inputs import (
    FLOAT32,
    backbone_logits,
    hidden_scores,
    injection_weights,
    naive_walk,
    score_inputs,
    tables_of,
    weights,
)

from dspine_hub.kernels_dspine import (
    BackboneLogits,
    InjectionWeights,
    SlotProjection,
    adjacent_injection,
    adjacent_injection_reference,
    candidate_walk,
    inject_message,
    predicted_feature,
    slot_projection,
    top_candidates,
    transfer_tables,
    transition_scores,
    triton_support,
    use_triton,
)

# B, S, K, V, H, R, M
SIZES = [
    pytest.param(1, 1, 1, 3, 1, 1, 1, id="all-ones"),
    pytest.param(2, 4, 8, 97, 32, 16, 8, id="even"),
    pytest.param(3, 7, 5, 131, 17, 13, 3, id="odd"),
    pytest.param(1, 15, 16, 211, 64, 64, 32, id="block-16"),
    pytest.param(2, 3, 29, 29, 24, 7, 31, id="K=V,M>H"),
]


def inject(hidden, anchor, w):
    return adjacent_injection(hidden, anchor, 0, tables_of(w)).hidden


def message_scores(state, candidates, anchor, **w):
    """Scores as a round computes them: from tables and from what the last injection returned."""
    tables = tables_of(w)
    hidden = torch.cat((torch.ones_like(state[:, :1]), state), dim=1)
    projection = adjacent_injection(hidden, anchor, 0, tables).projection
    return transition_scores(state, candidates, anchor, tables, projection.slots())


def logit_scores(state, candidates, anchor, **w):
    """Scores as for a head whose rows are split or quantised: from the logits that came out of it."""
    tables = tables_of(w)
    injected = adjacent_injection(torch.cat((torch.ones_like(state[:, :1]), state), dim=1), anchor, 0, tables)
    backbone = backbone_logits(injected, candidates, w["norm_weight"], w["norm_eps"], w["head_weight"])
    tables = dataclasses.replace(tables, head_weight=torch.full_like(tables.head_weight, math.nan))
    return transition_scores(state, candidates, anchor, tables, injected.projection.slots(), backbone)


def lone_scores(state, candidates, anchor, **w):
    """Scores without an injection before them and without the table of head messages."""
    return transition_scores(state, candidates, anchor, tables_of(w, head_messages=False))


def naive_feature(h, readout):
    x = readout.double() @ h.double()
    return math.sqrt(len(x)) * x / max(float(x.norm()), 1e-12)


def naive_write(h, receiver, predecessor, w):
    gate = torch.sigmoid(
        w["receiver_gate"].double() @ receiver + w["predecessor_gate"].double() @ predecessor + w["bias"].double()
    )
    update = w["write"].double() @ (gate * (w["message"].double() @ predecessor))
    return h + h.norm() / math.sqrt(len(h)) * update


def naive_scores(inputs):
    """Loop over request, slot, predecessor and candidate, in float64."""
    state, candidates, codes = inputs["state"].double(), inputs["candidates"], inputs["codes"].double()
    B, S, K = candidates.shape
    out = torch.zeros(B, S, K, K, dtype=torch.float64)
    for b in range(B):
        for s in range(S):
            receiver = naive_feature(state[b, s], inputs["readout"])
            for c in range(K):
                token = inputs["anchor"][b] if s == 0 else candidates[b, s - 1, c]
                predecessor = math.sqrt(codes.shape[1]) * codes[token]
                r = naive_write(state[b, s], receiver, predecessor, inputs)
                r = r / torch.sqrt((r * r).mean() + inputs["norm_eps"]) * inputs["norm_weight"].double()
                for d in range(K):
                    out[b, s, c, d] = r @ inputs["head_weight"][candidates[b, s, d]].double()
    return out


def assert_scores_close(found, expected, what):
    scale = float(expected.abs().max()) or 1.0
    error = float((found.double() - expected.double()).abs().max())
    assert error <= FLOAT32 * scale, f"{what}: error {error:.2e} at scale {scale:.2e}"


@pytest.mark.parametrize(("B", "S", "K", "V", "H", "R", "M"), SIZES)
@pytest.mark.parametrize(
    "form",
    [hidden_scores, message_scores, lone_scores, logit_scores],
    ids=lambda f: f.__name__,
)
def test_scores_equal_direct_refinement(form, B, S, K, V, H, R, M):
    """Catches a transposed predecessor axis, a slot shifted by one, a missing sqrt(R) or norm weight."""
    inputs = score_inputs(B, S, K, V, H, R, M)
    found = form(**inputs)
    assert found.shape == (B, S, K, K)
    assert found.dtype == torch.float32
    assert_scores_close(found, naive_scores(inputs), form.__name__)


@pytest.mark.parametrize(("B", "S", "K", "V", "H", "R", "M"), SIZES)
def test_message_space_equals_hidden_space(B, S, K, V, H, R, M):
    """Catches an error in the expansion of the norm, which no agreement on the arg-max would show."""
    inputs = score_inputs(B, S, K, V, H, R, M, seed=5)
    assert_scores_close(message_scores(**inputs), hidden_scores(**inputs), "message space")


@pytest.mark.parametrize("form", [hidden_scores, message_scores, lone_scores, logit_scores])
def test_zero_states_score_zero(form):
    """Catches a division by the norm of the state: a zero row has no direction and its scores are 0, not NaN."""
    inputs = score_inputs(2, 3, 4, 29, 17, 5, 3)
    inputs["state"][:, 1] = 0
    found = form(**inputs)
    assert torch.equal(found[:, 1], torch.zeros(2, 4, 4))
    assert_scores_close(found, naive_scores(inputs), form.__name__)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_message_space_holds_for_small_and_large_states(scale):
    """Catches a cancellation or a misplaced eps that only shows far from states of order 1."""
    inputs = score_inputs(2, 3, 4, 29, 17, 5, 3)
    inputs["state"] *= scale
    assert_scores_close(message_scores(**inputs), naive_scores(inputs), f"scale {scale}")


def test_rows_of_the_first_slot_are_all_the_anchors():
    """Catches a first slot conditioned on its own candidates instead of the anchor."""
    scores = message_scores(**score_inputs(2, 3, 5, 29, 17, 5, 3))
    assert torch.equal(scores[:, 0], scores[:, 0, :1].expand(-1, 5, -1))
    assert not torch.equal(scores[:, 1], scores[:, 1, :1].expand(-1, 5, -1))


def test_scores_without_writes_ignore_the_predecessor():
    """Catches a score that does not reduce to the backbone's logit when nothing is written."""
    inputs = score_inputs(2, 3, 5, 29, 17, 5, 3)
    inputs["write"].zero_()
    h = inputs["state"]
    normed = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * inputs["norm_weight"]
    logits = (normed @ inputs["head_weight"].T).gather(-1, inputs["candidates"])
    assert_scores_close(message_scores(**inputs), logits[:, :, None].expand(-1, -1, 5, -1), "no write")


@pytest.mark.parametrize("position", [0, 1, 2], ids=["request", "slot", "candidate"])
def test_scores_are_independent_between_rows(position):
    """Catches a broadcast that mixes requests or slots: a score depends on its own slot and the one before it."""
    inputs = score_inputs(2, 4, 5, 29, 17, 5, 3)
    before = message_scores(**inputs)
    if position == 0:
        inputs["state"][1] += 1
        assert torch.equal(message_scores(**inputs)[0], before[0])
    elif position == 1:
        inputs["state"][:, 2] += 1
        after = message_scores(**inputs)
        keep = [0, 1, 3]
        assert torch.equal(after[:, keep], before[:, keep])
    else:
        old = int(inputs["candidates"][0, 1, 2])
        inputs["candidates"][0, 1, 2] = (old + 1) % 29
        after = message_scores(**inputs)
        # slot 1 loses a column, slot 2 a row; nothing else moves beyond rounding of another gemm
        torch.testing.assert_close(after[0, 0], before[0, 0])
        torch.testing.assert_close(after[0, 1][:, [0, 1, 3, 4]], before[0, 1][:, [0, 1, 3, 4]])
        torch.testing.assert_close(after[0, 2][[0, 1, 3, 4]], before[0, 2][[0, 1, 3, 4]])
        assert not torch.allclose(after[0, 2][2], before[0, 2][2])


def inject_by_definition(hidden, anchor, w):
    return adjacent_injection_reference(hidden, w["codes"][anchor], injection_weights(w))


@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 5, 17), (3, 16, 32)], ids=str)
@pytest.mark.parametrize("form", [inject, inject_by_definition], ids=lambda f: f.__name__)
def test_injection_equals_the_naive_loop(form, shape):
    """Catches a predecessor off by one, a gate that reads the written state, a write to the anchor."""
    B, N, H = shape
    R, M = min(H, 11), 3
    w = weights(R, H, M, 29)
    hidden = 2 * torch.randn(B, N, H, generator=torch.Generator().manual_seed(1))
    anchor = torch.arange(B)
    anchor_code = w["codes"][anchor]
    found = form(hidden, anchor, w)
    for b in range(B):
        features = [naive_feature(hidden[b, j], w["readout"]) for j in range(N)]
        for j in range(N):
            expected = hidden[b, j].double()
            if j > 0:
                predecessor = math.sqrt(R) * anchor_code[b].double() if j == 1 else features[j - 1]
                expected = naive_write(expected, features[j], predecessor, w)
            # float32 sums of at most 32 terms: a few ulps of values below 30
            torch.testing.assert_close(found[b, j].double(), expected, rtol=1e-4, atol=1e-4)


def test_replaced_blocks_follow_their_true_tokens():
    """Catches a wrong block replaced, a code that is not as long as a feature, true tokens shifted by a slot."""
    w = weights(5, 17, 3, 29)
    hidden, anchor, true = torch.randn(2, 4, 17), torch.arange(2), torch.tensor([[4, 9, 2], [3, 1, 7]])
    codes = w["codes"][anchor], w["codes"][true]
    found = adjacent_injection_reference(
        hidden, codes[0], injection_weights(w), true_codes=codes[1], replaced=torch.tensor([True, False])
    )
    assert torch.equal(found[1], inject_by_definition(hidden, anchor, w)[1])
    assert torch.equal(found[0, 0], hidden[0, 0])
    for j in range(1, 4):
        feature = naive_feature(hidden[0, j], w["readout"])
        expected = naive_write(hidden[0, j].double(), feature, math.sqrt(5) * codes[1][0, j - 1].double(), w)
        # float32 sums of at most 17 terms
        torch.testing.assert_close(found[0, j].double(), expected, rtol=1e-4, atol=1e-4)


def test_the_anchor_row_is_never_written():
    """Catches a write to row 0, whose state is the committed token's own."""
    w = weights(5, 17, 3, 29)
    hidden = torch.randn(3, 4, 17)
    found = inject(hidden, torch.arange(3), w)
    assert torch.equal(found[:, 0], hidden[:, 0])
    assert bool((found[:, 1:] != hidden[:, 1:]).any(-1).all())


def test_slots_are_written_in_parallel():
    """Catches an in-place write: slot 3 must read slot 2 as it was before slot 2 itself was written."""
    w = weights(5, 17, 3, 29)
    hidden = torch.randn(1, 6, 17)
    base = inject(hidden, torch.tensor([0]), w)
    other_anchor = inject(hidden, torch.tensor([1]), w)
    changed = [j for j in range(6) if not torch.equal(base[0, j], other_anchor[0, j])]
    assert changed == [1]
    moved = hidden.clone()
    moved[0, 3] += 1
    after = inject(moved, torch.tensor([0]), w)
    changed = [j for j in range(6) if not torch.equal(base[0, j], after[0, j])]
    assert changed == [3, 4]


def test_zero_writes_leave_every_bit():
    """Catches an injection that rounds the state on the way through."""
    w = weights(5, 17, 3, 29)
    w["write"].zero_()
    hidden = torch.randn(2, 4, 17)
    assert torch.equal(inject(hidden, torch.arange(2), w), hidden)
    assert torch.equal(inject_by_definition(hidden, torch.arange(2), w), hidden)


def test_features_have_length_sqrt_rank():
    """Catches a feature normalised in half precision or not scaled: codes and features must be comparable."""
    w = weights(13, 17, 3, 29)
    hidden = torch.randn(2, 5, 17)
    length = predicted_feature(hidden, w["readout"]).norm(dim=-1)
    torch.testing.assert_close(length, torch.full((2, 5), math.sqrt(13)))
    tiny = predicted_feature((hidden * 1e-3).to(torch.bfloat16), w["readout"].to(torch.bfloat16))
    assert tiny.dtype == torch.bfloat16
    # every element is rounded to 8 bits: the length is off by at most 2**-8
    torch.testing.assert_close(tiny.float().norm(dim=-1), torch.full((2, 5), math.sqrt(13)), rtol=2**-8, atol=0)
    assert torch.equal(predicted_feature(torch.zeros(1, 17), w["readout"]), torch.zeros(1, 13))


@pytest.mark.parametrize("what", ["adjacent_injection", "inject_message", "transition_scores"])
def test_gradients_are_finite_at_zero_states(what):
    """Catches sqrt or a norm differentiated at 0 (inf * 0 = NaN), which kills a training run at a padded row."""
    inputs = score_inputs(1, 3, 4, 29, 17, 5, 3)
    hidden = torch.zeros(1, 3, 17, requires_grad=True)
    leaves = {name: inputs[name].requires_grad_() for name in (*InjectionWeights._fields, "norm_weight")}
    if what == "adjacent_injection":
        out = adjacent_injection_reference(hidden, inputs["codes"][:1], injection_weights(leaves))
    elif what == "inject_message":
        feature = predicted_feature(hidden, leaves["readout"])
        predecessor = math.sqrt(5) * inputs["codes"][:3].float()[None]
        out = inject_message(hidden, feature, predecessor, injection_weights(leaves))
    else:
        out = hidden_scores(**{**inputs, "state": hidden})
    # a random direction: a sum could cancel
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    bad = [n for n, t in {"hidden": hidden, **leaves}.items() if t.grad is not None and not t.grad.isfinite().all()]
    assert bad == []


@pytest.mark.parametrize(("S", "K"), [(1, 1), (4, 8), (15, 16), (7, 3)], ids=str)
def test_walk_equals_the_naive_walk_with_mixed_temperatures(S, K):
    """Catches a greedy row disturbed by sampled neighbours, a q of the wrong row, a temperature applied twice."""
    g = torch.Generator().manual_seed(S * K)
    B = 4
    scores = 2 * torch.randn(B, S, K, K, generator=g)
    candidates = torch.stack([torch.randperm(97, generator=g)[:K] for _ in range(B * S)]).view(B, S, K)
    temperature = torch.tensor([0.0, 0.7, 1.0, 2.5])
    uniforms = torch.rand(B, S, generator=g)
    tokens, q = candidate_walk(scores, candidates, temperature, uniforms)
    assert tokens.dtype == torch.int64
    for b in range(B):
        expected, rows = naive_walk(scores[b], candidates[b], float(temperature[b]), uniforms[b])
        assert tokens[b].tolist() == expected
        # a softmax of at most 16 numbers in float32
        torch.testing.assert_close(q[b].double(), rows, rtol=1e-5, atol=1e-6)


def test_greedy_rows_ignore_the_uniforms_and_give_one_hot_q():
    """Catches a greedy draft that verification would judge by a soft q."""
    scores, candidates = torch.randn(1, 3, 4, 4), torch.arange(12).view(1, 3, 4)
    zero = torch.zeros(1)
    low = candidate_walk(scores, candidates, zero, torch.zeros(1, 3))
    high = candidate_walk(scores, candidates, zero, torch.full((1, 3), 0.999))
    assert torch.equal(low[0], high[0])
    assert torch.equal(low[1].sum(-1), torch.ones(1, 3))
    assert torch.equal(low[1].max(-1).values, torch.ones(1, 3))
    assert torch.equal(candidates.gather(2, low[1].argmax(-1)[..., None])[..., 0], low[0])


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24], ids=["0", "just below 1"])
def test_extreme_uniforms_never_draw_an_impossible_candidate(uniform):
    """Catches an index one past the end, and a candidate of probability exactly 0, whose p/q would divide by 0."""
    scores = torch.full((1, 2, 4, 4), -torch.inf)
    scores[..., 1] = 0.3
    scores[..., 2] = 0.1
    tokens, q = candidate_walk(scores, torch.arange(8).view(1, 2, 4), torch.ones(1), torch.full((1, 2), uniform))
    index = tokens - torch.tensor([[0, 4]])
    assert bool((q.gather(2, index[..., None]) > 0).all())
    assert index.tolist() == ([[1, 1]] if uniform == 0 else [[2, 2]])


def test_walk_draws_from_q():
    """Catches a biased draw: a lossless loop trusts that drafts come from the q it is given."""
    g = torch.Generator().manual_seed(0)
    n = 40_000
    scores = torch.randn(1, 1, 5, 5, generator=g).expand(n, -1, -1, -1)
    candidates = torch.arange(5).expand(n, 1, 5)
    tokens, q = candidate_walk(scores, candidates, torch.full((n,), 0.8), torch.rand(n, 1, generator=g))
    share = torch.bincount(tokens[:, 0], minlength=5) / n
    # five binomial standard deviations of at most sqrt(0.25 / n)
    assert float((share - q[0, 0]).abs().max()) < 5 * math.sqrt(0.25 / n)


GOOD_HIDDEN = torch.zeros(2, 4, 17)


def from_logits(w, logits, message, length, table=True):
    inputs, tables = w["scores"], tables_of(w, head_messages=bool(table))
    backbone = BackboneLogits(logits, message, length)
    return transition_scores(inputs["state"], inputs["candidates"], inputs["anchor"], tables, backbone=backbone)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        pytest.param(lambda w: inject(torch.zeros(4, 17), torch.zeros(4).long(), w), "`hidden`", id="rank"),
        pytest.param(lambda w: inject(torch.zeros(2, 1, 17), torch.arange(2), w), "`hidden`.*N >= 2", id="N=1"),
        pytest.param(
            lambda w: inject(GOOD_HIDDEN, torch.arange(3), w), r"`anchor`.*\[2\], got \[3\]", id="injection-anchor"
        ),
        pytest.param(
            lambda w: transfer_tables([injection_weights(w)], w["codes"][:, :4], None, 0.0, w["head_weight"]),
            r"`codes`.*R = 5, got \[29, 4\]",
            id="codes",
        ),
        pytest.param(
            lambda w: transfer_tables([injection_weights(w)], w["codes"], None, 0.0, w["head_weight"][:28]),
            r"`head_weight`.*\[29, 17\], got \[28, 17\]",
            id="head",
        ),
        pytest.param(
            lambda w: transition_scores(
                w["scores"]["state"],
                w["scores"]["candidates"],
                w["scores"]["anchor"],
                tables_of(w),
                SlotProjection(torch.zeros(2, 3, 3), torch.zeros(2, 3, 4)),
            ),
            r"`write_projection`.*\[2, 3, 3\], got \[2, 3, 4\]",
            id="projection",
        ),
        pytest.param(
            lambda w: from_logits(w, torch.zeros(2, 3, 5), torch.zeros(2, 3, 3), torch.zeros(2, 3)),
            r"`logits`.*\[2, 3, 4\], got \[2, 3, 5\]",
            id="logits",
        ),
        pytest.param(
            lambda w: from_logits(w, torch.zeros(2, 3, 4), torch.zeros(2, 4, 3), torch.zeros(2, 3)),
            r"`message`.*\[2, 3, 3\], got \[2, 4, 3\]",
            id="message",
        ),
        pytest.param(
            lambda w: from_logits(w, torch.zeros(2, 3, 4), torch.zeros(2, 3, 3), torch.zeros(2, 3), None),
            "`tables`.*`head_messages`",
            id="no-table",
        ),
        pytest.param(
            lambda w: candidate_walk(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3), torch.zeros(1), torch.zeros(1, 2)),
            r"`scores`.*\[1, 2, 3, 3\], got \[1, 2, 3, 4\]",
            id="scores",
        ),
        pytest.param(
            lambda w: candidate_walk(torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3), torch.zeros(2), torch.zeros(1, 2)),
            "`temperature`.*`uniforms`",
            id="temperature",
        ),
        pytest.param(lambda w: top_candidates(torch.zeros(2, 5), 6), r"`count`.*\[1, 5\], got 6", id="count"),
        pytest.param(
            lambda w: lone_scores(**{**w["scores"], "candidates": torch.zeros(2, 2, 4, dtype=torch.long)}),
            r"`candidates`.*\[2, 3\]",
            id="candidates",
        ),
        pytest.param(
            lambda w: lone_scores(**{**w["scores"], "anchor": torch.zeros(1, dtype=torch.long)}),
            r"`anchor` must have shape \[B\] = \[2\]",
            id="anchor",
        ),
    ],
)
def test_wrong_shapes_are_refused_by_name(call, match):
    """Catches a broadcast that silently accepts a wrong operand."""
    w = weights(5, 17, 3, 29)
    w["scores"] = score_inputs(2, 3, 4, 29, 17, 5, 3)
    with pytest.raises(ValueError, match=match):
        call(w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_tables_are_the_products_they_replace(dtype):
    """Catches a table with message and gate swapped, without sqrt(R), or rounded as bfloat16 is."""
    w = {k: v.to(dtype) if torch.is_tensor(v) else v for k, v in weights(13, 17, 3, 20_001).items()}
    tables = tables_of(w)
    wide = {k: v.double() if torch.is_tensor(v) else v for k, v in w.items()}
    p = math.sqrt(13) * wide["codes"]
    # bfloat16 weights: half a step of fixed point, of the largest number of a row; else sums of 17 float32 products
    step = 0.51 / 32767 if dtype == torch.bfloat16 else 1e-6

    def assert_rows(table, expected):
        found = table.rows(torch.arange(20_001)).double()
        assert bool(((found - expected).abs() <= step * expected.abs().amax(dim=1, keepdim=True) + 1e-6).all())

    assert_rows(tables.predecessors, torch.cat((p @ wide["message"].T, p @ wide["predecessor_gate"].T), dim=1))
    factor = tables.write_factor.double()
    torch.testing.assert_close(
        factor.T @ factor, wide["write"].T @ wide["write"], rtol=2**-8, atol=2**-6 if dtype == torch.bfloat16 else 1e-5
    )
    assert_rows(tables.head_messages, (wide["head_weight"] * wide["norm_weight"]) @ wide["write"])
    assert torch.equal(tables.projection, torch.cat((w["readout"], w["write"].T)))
    assert tables_of(w, head_messages=False).head_messages is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_table_holds_any_range_and_nothing_infinite(dtype):
    """Catches a row of zeros divided by its scale, numbers beyond 65504, and infinite ones every score would copy."""
    w = {k: v.to(dtype) if torch.is_tensor(v) else v for k, v in weights(5, 17, 3, 29).items()}
    plain, ids = tables_of(w).head_messages.rows(torch.arange(29)), torch.arange(29)
    w["norm_weight"] = w["norm_weight"] * 2**20
    w["head_weight"][7] = 0
    found = tables_of(w).head_messages.rows(ids)
    assert not bool(found[7].any())
    torch.testing.assert_close(found[8:], plain[8:] * 2**20)
    w["head_weight"][7, 3] = math.inf
    with pytest.raises(ValueError, match=r"`head_messages` must hold finite numbers, got 1 rows that do not"):
        tables_of(w)
    assert tables_of(w, head_messages=False).head_messages is None


def test_the_projection_is_that_of_the_states_before_the_write():
    """Catches a projection read after the write or shifted by a slot: scores would be those of other states."""
    w = weights(5, 17, 3, 29)
    tables, hidden = tables_of(w), torch.randn(2, 4, 17)
    found = adjacent_injection(hidden, torch.arange(2), 0, tables).projection
    for mine, alone in zip(found.slots(), slot_projection(hidden[:, 1:], tables), strict=True):
        torch.testing.assert_close(mine, alone)


@pytest.mark.parametrize(
    ("installed", "interpret", "expected"),
    [(False, "1", False), (True, None, False), (True, "0", False), (True, "1", True)],
    ids=["absent", "no-driver", "switched-off", "interpreter"],
)
def test_triton_runs_on_the_cpu_only_by_interpreter(monkeypatch, installed, interpret, expected):
    """Catches "installed" taken for "can run": a launch without a driver fails."""
    monkeypatch.setattr(triton_support, "triton", object() if installed else None)
    if interpret is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert use_triton(torch.zeros(1)) is expected
