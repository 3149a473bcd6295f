"""Training: blocks, objective, schedules, data, config and the loop, against plain loops and hand-made numbers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import build_drafter, build_target
from oracle import Oracle
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspine_hub.checkpoints.pairing import describe_target
from dspine_hub.errors import DSpineHubError
from dspine_hub.generation_dspine import summarize
from dspine_hub.modeling_dspine import DSpineForSpeculation
from dspine_hub.training.blocks import build_blocks, sample_anchors
from dspine_hub.training.config import DataConfig, ObjectiveConfig, SourceConfig, TrainConfig, load_config
from dspine_hub.training.data import Sequences, step_indices
from dspine_hub.training.loop import Trainer
from dspine_hub.training.objective import (
    CausalLMObjective,
    DSpineObjective,
    alignment_scale,
    replacement_probability,
)

MINI = Path(__file__).resolve().parents[1] / "examples" / "mini"
TERMS = ("loss", "backbone_ce", "backbone_l1", "refinement", "alignment", "coverage", "accuracy")

# float32 against float64 through three layers and a softmax: some hundred roundings of values below 10
FLOAT32 = {"rtol": 2e-4, "atol": 2e-4}
# the same float32 numbers added in another order
REORDERED = {"rtol": 1e-4, "atol": 1e-6}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def pair():
    """Return a target of its own (the objective freezes it) and a drafter with loud writes."""
    target = build_target()
    return target, build_drafter(target).train()


def batch_with_holes(seed: int = 3, rows: int = 2, length: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids and a loss mask with an unsupervised head, single holes and a padded tail."""
    ids = torch.randint(0, 96, (rows, length), generator=seeded(seed))
    mask = torch.ones(rows, length, dtype=torch.bool)
    mask[0, :3] = False
    mask[0, 8] = False
    mask[1, [2, 6]] = False
    mask[1, -1] = False
    return ids, mask


# -- blocks ---------------------------------------------------------------------------------------------------------


def naive_mask(anchors: list[int], length: int, size: int) -> torch.Tensor:
    rows = len(anchors) * size
    mask = torch.zeros(rows, length + rows, dtype=torch.bool)
    for row in range(rows):
        block, step = divmod(row, size)
        for column in range(length + rows):
            if column < length:
                mask[row, column] = column < anchors[block]
            else:
                other, other_step = divmod(column - length, size)
                mask[row, column] = other == block and other_step <= step
    return mask


@pytest.mark.parametrize("size", [2, 5])
def test_mask_shows_context_before_the_anchor_and_the_own_block_causally(size):
    """A `<=` for `<` would show the anchor's own features, which do not exist at inference; a leak between blocks or a
    bidirectional block would train on the answer."""
    ids, loss_mask = batch_with_holes()
    anchors = torch.tensor([[0, 11, 4], [7, 7, 1]])
    blocks = build_blocks(ids, loss_mask, anchors, torch.ones_like(anchors, dtype=torch.bool), size)
    assert blocks.mask.shape == (2, 1, 3 * size, 13 + 3 * size)
    for row in range(2):
        assert torch.equal(blocks.mask[row, 0], naive_mask(anchors[row].tolist(), 13, size))


def test_labels_positions_and_supervision_of_handmade_blocks():
    """Catches labels shifted by one, a slot that counts again after a hole, supervision past the sequence end, and
    unreal anchors that count."""
    ids = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17]])
    loss_mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1]]).bool()
    anchors = torch.tensor([[1, 2, 5, 6, 1]])
    real = torch.tensor([[True, True, True, True, False]])
    blocks = build_blocks(ids, loss_mask, anchors, real, 4)
    assert blocks.labels[0, :3].tolist() == [[11, 12, 13, 14], [12, 13, 14, 15], [15, 16, 17, 17]]
    assert blocks.labels[0, 3, :2].tolist() == [16, 17]
    assert blocks.supervised[0].tolist() == [
        [True, True, False],
        # token 15 is supervised, but not after the hole at 14
        [True, False, False],
        [True, True, False],
        [True, False, False],
        [False, False, False],
    ]
    positions = [[1, 2, 3, 4], [2, 3, 4, 5], [5, 6, 7, 8], [6, 7, 8, 9], [1, 2, 3, 4]]
    assert blocks.position_ids[0].tolist() == [*range(8), *sum(positions, [])]
    assert torch.equal(blocks.anchors, anchors)


def test_anchors_are_distinct_and_precede_a_supervised_token():
    """Catches anchors judged by their own mask instead of the next token's, repeated anchors, and a last position."""
    loss_mask = torch.rand(6, 40, generator=seeded(1)) < 0.5
    anchors, real = sample_anchors(loss_mask, 9, seeded())
    assert anchors.shape == real.shape == (6, 9) and bool(real.all())
    for row, mask in zip(anchors.tolist(), loss_mask, strict=True):
        assert len(set(row)) == 9
        assert all(mask[position + 1] for position in row)


def test_anchors_depend_on_the_generator_alone():
    """A draw from the global stream would make a resumed run see other blocks."""
    loss_mask = torch.ones(2, 40, dtype=torch.bool)
    first, _ = sample_anchors(loss_mask, 9, seeded(5))
    torch.rand(3)
    again, _ = sample_anchors(loss_mask, 9, seeded(5))
    other, _ = sample_anchors(loss_mask, 9, seeded(6))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_every_possible_anchor_is_drawn():
    """Catches a draw that never reaches the first or the last possible anchor."""
    anchors, real = sample_anchors(torch.ones(1, 12, dtype=torch.bool), 11, seeded())
    assert sorted(anchors[0].tolist()) == list(range(11)) and bool(real.all())


def test_missing_anchors_are_unreal_and_unsupervised():
    """A short sequence fills up with anchors that must not count, even before a supervised token."""
    loss_mask = torch.zeros(2, 9, dtype=torch.bool)
    loss_mask[0, [2, 3, 7]] = True
    anchors, real = sample_anchors(loss_mask, 50, seeded())
    assert anchors.shape == (2, 8)  # no more than there are positions with a next token
    assert real.sum(dim=1).tolist() == [3, 0]
    assert sorted(anchors[0][real[0]].tolist()) == [1, 2, 6]
    blocks = build_blocks(torch.zeros(2, 9, dtype=torch.long), loss_mask, anchors, real, 3)
    assert not blocks.supervised[~real].any()
    assert bool(blocks.supervised[real][:, 0].all())


def test_packed_blocks_equal_each_block_alone(pair, taps):
    """One training pass must see what `draft` sees: catches wrong positions, context shown past the anchor, a code of
    another block's anchor, and attention between blocks."""
    target, drafter = pair
    drafter.eval()
    ids, loss_mask = batch_with_holes()
    anchors, real = sample_anchors(loss_mask, 6, seeded(2))
    size, embedding = drafter.config.block_size, drafter.bound().embedding
    blocks = build_blocks(ids, loss_mask, anchors, real, size)
    context = torch.cat([taps(row, drafter, target) for row in ids.tolist()])
    tokens = torch.full_like(blocks.labels, drafter.config.mask_token_id)
    tokens[..., 0] = blocks.labels[..., 0]
    codes = F.embedding(blocks.labels[..., 0].flatten(), drafter.transfer_codes)
    with torch.no_grad():
        packed = drafter.run_blocks(
            embedding(tokens.flatten(1)), context, blocks.position_ids, blocks.mask, codes, output_features=True
        )
        for row in range(2):
            for block, anchor in enumerate(anchors[row].tolist()):
                alone = drafter(
                    embedding(tokens[row, block][None]),
                    context[row : row + 1, :anchor],
                    anchor_ids=ids[row, anchor][None],
                )
                rows = slice(block * size, (block + 1) * size)
                for name in ("last_hidden_state", "pre_injection_state"):
                    # the same sums over other masked widths
                    torch.testing.assert_close(packed[name][row, rows], alone[name][0], rtol=1e-4, atol=1e-4)


# -- schedules ------------------------------------------------------------------------------------------------------


def test_alignment_scale_rises_linearly_and_stays():
    """Catches a schedule that counts in shares of the run, starts above 0 or overshoots."""
    config = ObjectiveConfig()
    steps = {0: 0.0, 1: 0.5 / 146, 73: 0.25, 146: 0.5, 147: 0.5, 100_000: 0.5}
    for step, value in steps.items():
        assert alignment_scale(step, config) == pytest.approx(value, abs=1e-12)
    assert alignment_scale(0, ObjectiveConfig(alignment_warmup_steps=0, alignment_weight=0.3)) == 0.3


def test_replacement_probability_is_held_then_falls_to_zero():
    """Catches a fall that starts at step 0, ends at the end of the run, or turns negative."""
    config = ObjectiveConfig()
    steps = {0: 0.5, 100: 0.5, 125: 0.375, 150: 0.25, 175: 0.125, 200: 0.0, 201: 0.0, 600: 0.0}
    for step, value in steps.items():
        assert replacement_probability(step, 600, config) == pytest.approx(value, abs=1e-12)
    other = ObjectiveConfig(replacement_probability=1.0, replacement_hold_ratio=0.0, replacement_end_ratio=1.0)
    assert replacement_probability(3, 10, other) == pytest.approx(0.7)


# -- objective ------------------------------------------------------------------------------------------------------


class TaughtOracle(Oracle):
    """An oracle whose first `layers` layers read the codes of the true predecessors."""

    taught, layers = None, 0

    def inject(self, layer, states, anchor):
        if self.taught is None or layer >= self.layers:
            return super().inject(layer, states, anchor)
        features = [self.feature(layer, h) for h in states]
        pairs = zip(self.taught, states[1:], features[1:], strict=True)
        return [states[0], *(self.write(layer, h, f, self.code(token)) for token, h, f in pairs)]


def naive_terms(target, drafter, taps, ids, loss_mask, anchors, real, config, beta, replace=None) -> dict:
    """Recompute every term slot by slot in float64; `replace` (`[B * A]`) marks taught blocks."""
    bound, shape = drafter.bound(), drafter.config
    oracle = TaughtOracle(drafter, bound.embedding.weight, bound.head.weight)
    sums, norm, slots, counts = dict.fromkeys(TERMS[1:5], 0.0), 0.0, 0, [0, 0]
    kept_l1 = []
    a = config.ce_weight
    for row in range(len(ids)):
        text = ids[row].tolist()
        context = taps(text, drafter, target)[0]
        with torch.no_grad():
            p_target = torch.softmax(target(ids[row : row + 1]).logits[0].double(), dim=-1)
        for block, anchor in enumerate(anchors[row].tolist()):
            if not real[row, block]:
                continue
            true = [*text[anchor:], *[0] * shape.block_size][: shape.block_size]
            teaching = replace is not None and bool(replace[row * anchors.shape[1] + block])
            oracle.taught, oracle.layers = (true[:-1], config.replacement_layers) if teaching else (None, 0)
            found = oracle.block(text[anchor], context[:anchor])
            for j in range(1, shape.block_size):
                # the first unsupervised token ends the block
                if anchor + j >= len(text) or not loss_mask[row, anchor + j]:
                    break
                label, weight = text[anchor + j], math.exp(-(j - 1) / config.slot_decay)
                logits = oracle.head @ found["final"][j]
                p, q = torch.softmax(logits, dim=-1), p_target[anchor + j - 1]
                candidates = sorted(range(len(logits)), key=lambda d: -logits[d])[: shape.num_candidates]
                state = oracle.refine(found["states"][j], text[anchor + j - 1])
                scores = torch.softmax(torch.stack([state @ oracle.head[d] for d in candidates]), dim=-1)
                mass = sum(q[d] for d in candidates)
                refined = 0.0
                if label in candidates:
                    refined += a * -math.log(scores[candidates.index(label)])
                kept_l1.append(bool(mass > config.candidate_mass_threshold))
                if kept_l1[-1]:
                    gaps = [abs(s - q[d] / mass) for s, d in zip(scores, candidates, strict=True)]
                    refined += (1 - a) * float(sum(gaps))
                code = oracle.w["transfer_codes"][label]
                features = [layer[j] for layer in found["features"]]
                cosines = [float(f @ code / (f.norm() * code.norm())) for f in features]
                sums["backbone_ce"] += weight * -math.log(p[label])
                sums["backbone_l1"] += weight * float((p - q).abs().sum())
                sums["refinement"] += weight * refined
                sums["alignment"] += weight * sum(1 - cosine for cosine in cosines)
                norm, slots = norm + weight, slots + 1
                counts[0] += label in candidates
                counts[1] += label == candidates[0]
    terms = {name: value / norm for name, value in sums.items()}
    ce, l1 = terms["backbone_ce"], terms["backbone_l1"]
    terms["loss"] = a * ce + (1 - a) * l1 + terms["refinement"] + beta * ce * terms["alignment"]
    terms["coverage"], terms["accuracy"] = counts[0] / slots, counts[1] / slots
    terms["kept_l1"] = kept_l1
    return terms


def favoured(target, drafter, ids):
    """Replace tokens of `ids` by the target's own greedy ones in places, so that some labels are likely."""
    ids = ids.clone()
    with torch.no_grad():
        for position in range(1, ids.shape[1], 2):
            ids[:, position] = target(ids[:, :position]).logits[:, -1].argmax(-1)
    return ids


@pytest.mark.parametrize(
    ("settings", "step", "beta"),
    [
        pytest.param({"anchors": 5}, 500, 0.5, id="recipe"),
        pytest.param({"anchors": 40, "candidate_mass_threshold": 0.12}, 400, 0.5, id="anchors-run-out,threshold"),
        pytest.param(
            {
                "anchors": 4,
                "ce_weight": 0.7,
                "slot_decay": 1.5,
                "alignment_weight": 0.9,
                "alignment_warmup_steps": 2000,
            },
            500,
            0.225,
            id="other-weights",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_every_term_equals_plain_loops(pair, taps, settings, step, beta, mode):
    """Catches a target distribution off by one position, a mean that counts unsupervised slots, candidates or L1 not
    renormalised, cross entropy outside the candidates, a wrong predecessor, and features before the write."""
    target, drafter = pair
    config = ObjectiveConfig(**settings)
    objective = DSpineObjective(drafter, target, config, total_steps=600)  # replacement ended at step 200
    objective.train(mode == "train")
    ids, loss_mask = batch_with_holes()
    ids = favoured(target, drafter, ids)
    anchors, real = sample_anchors(loss_mask, config.anchors, seeded(7))
    with torch.no_grad():
        loss, metrics = objective(ids, loss_mask, step, seeded(7))
    expected = naive_terms(target, drafter, taps, ids, loss_mask, anchors, real, config, beta)
    kept = expected.pop("kept_l1")
    if "candidate_mass_threshold" in settings:
        assert 0 < sum(kept) < len(kept), "the case must have slots on both sides of the threshold"
        assert 0 < expected["accuracy"] < expected["coverage"] < 1
    assert float(loss) == float(metrics["loss"])
    assert set(metrics) == set(TERMS)
    for name in TERMS:
        assert float(metrics[name]) == pytest.approx(expected[name], rel=2e-4, abs=2e-4), name


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_replacement_teaches_the_first_layers_of_chosen_blocks_in_training_only(pair, taps, monkeypatch, layers):
    """Catches codes of the label instead of the token before it, teaching in later layers or in every block, and an
    evaluation that reads the answer."""
    target, drafter = pair
    config = ObjectiveConfig(anchors=6, replacement_layers=layers, alignment_warmup_steps=0)
    objective = DSpineObjective(drafter, target, config, total_steps=600).train()
    ids, loss_mask = batch_with_holes()
    anchors, real = sample_anchors(loss_mask, config.anchors, seeded(7))
    seen, run = {}, drafter.run_blocks
    monkeypatch.setattr(drafter, "run_blocks", lambda *args, **kwargs: seen.update(kwargs) or run(*args, **kwargs))
    with torch.no_grad():
        _, taught = objective(ids, loss_mask, 0, seeded(7))
        replace = seen["replace"]
        _, evaluated = objective.eval()(ids, loss_mask, 0, seeded(7))
    assert seen["teacher"] is None and seen["replace"] is None
    assert 0 < int(replace[real.flatten()].sum()) < int(real.sum()), "the case must have blocks of both kinds"
    arguments = (target, drafter, taps, ids, loss_mask, anchors, real, config, 0.5)
    for metrics, chosen in ((taught, replace), (evaluated, None)):
        expected = naive_terms(*arguments, replace=chosen)
        for name in TERMS:
            assert float(metrics[name]) == pytest.approx(expected[name], rel=2e-4, abs=2e-4), name
    assert abs(float(taught["loss"]) - float(evaluated["loss"])) > 1e-3


def test_replacement_chooses_blocks_with_the_scheduled_probability(pair, monkeypatch):
    """Catches a choice a batch or a slot at a time, and `>` for `<`."""
    target, drafter = pair
    config = ObjectiveConfig(anchors=40, replacement_probability=0.8)
    objective = DSpineObjective(drafter, target, config, total_steps=600).train()
    ids = torch.randint(0, 96, (20, 41), generator=seeded())
    loss_mask, seen, run = torch.ones_like(ids, dtype=torch.bool), {}, drafter.run_blocks
    monkeypatch.setattr(drafter, "run_blocks", lambda *args, **kwargs: seen.update(kwargs) or run(*args, **kwargs))
    with torch.no_grad():
        objective(ids, loss_mask, 175, seeded())
    assert seen["replace"].shape == (800,)
    # probability 0.2 at step 175; five standard deviations of a mean over 800 blocks
    assert float(seen["replace"].float().mean()) == pytest.approx(0.2, abs=5 * math.sqrt(0.2 * 0.8 / 800))


def gradients(target, drafter, ids, loss_mask, step=150, **settings):
    config = ObjectiveConfig(anchors=5, **settings)
    objective = DSpineObjective(drafter, target, config, total_steps=600).train()
    drafter.zero_grad()
    loss, _ = objective(ids, loss_mask, step, seeded(7))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in drafter.named_parameters()}


def test_chunking_rows_changes_neither_loss_nor_gradients(pair):
    """Catches a mean of means, a lost last chunk and a recomputation that draws other numbers."""
    ids, loss_mask = batch_with_holes()
    whole, whole_grads = gradients(*pair, ids, loss_mask)
    for rows in (1, 7):
        loss, grads = gradients(*pair, ids, loss_mask, rows_per_chunk=rows)
        torch.testing.assert_close(loss, whole, **REORDERED)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, whole_grads[name], rtol=1e-3, atol=1e-5, msg=name)


def test_every_drafter_parameter_learns_and_nothing_else(pair):
    """Catches a target left trainable, a module tree that owns the target, a detached layer, and a code table or flag
    that training moves."""
    target, drafter = pair
    before = {name: value.clone() for name, value in target.state_dict().items()}
    buffers = {name: value.clone() for name, value in drafter.named_buffers()}
    objective = DSpineObjective(drafter, target, ObjectiveConfig(anchors=5), total_steps=600)
    mine = {id(parameter) for parameter in objective.parameters()}
    assert mine == {id(parameter) for parameter in drafter.parameters()}
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-2)
    ids, loss_mask = batch_with_holes()
    loss, grads = gradients(target, drafter, ids, loss_mask)
    optimizer.step()
    assert math.isfinite(loss)
    for name, grad in grads.items():
        assert grad is not None and bool(grad.isfinite().all()) and bool(grad.any()), name
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in target.parameters())
    for name, value in target.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert buffers.keys() == {"transfer_codes", "transfer_ready"}
    for name, value in drafter.named_buffers():
        assert torch.equal(value, buffers[name]), name


def test_a_silent_drafter_can_start_to_write(pair):
    """With zero writes a gradient must reach the writes, or the injection would stay silent for ever."""
    target, _ = pair
    drafter = build_drafter(target, writes=False).train()
    ids, loss_mask = batch_with_holes()
    _, grads = gradients(target, drafter, ids, loss_mask)
    assert all(bool(grad.isfinite().all()) for grad in grads.values())
    for layer in range(drafter.config.num_hidden_layers):
        assert bool(grads[f"injection.writes.{layer}.weight"].any())


def test_alignment_does_not_train_through_its_own_scale(pair):
    """The cross entropy that scales the alignment is detached: no feature depends on the final norm, so neither may
    its gradient depend on the alignment weight."""
    ids, loss_mask = batch_with_holes()
    without, silent = gradients(*pair, ids, loss_mask, alignment_weight=0.0)
    within, loud = gradients(*pair, ids, loss_mask, alignment_weight=0.5)
    assert float(within) > float(without) + 0.1
    torch.testing.assert_close(loud["norm.weight"], silent["norm.weight"], rtol=0, atol=0)
    assert not torch.equal(loud["injection.readouts.0.weight"], silent["injection.readouts.0.weight"])


@pytest.mark.parametrize("supervised", [0, 1])
def test_gradients_stay_finite_without_supervised_slots(pair, supervised):
    """A batch of padding must not divide by zero; one supervised token must not either."""
    ids, loss_mask = batch_with_holes()
    loss_mask = torch.zeros_like(loss_mask)
    loss_mask[0, 4] = bool(supervised)
    loss, grads = gradients(*pair, ids, loss_mask)
    assert math.isfinite(loss) and (float(loss) > 0) == bool(supervised)
    assert all(grad is None or bool(grad.isfinite().all()) for grad in grads.values())


def test_gradients_stay_finite_at_zero_states(pair):
    """The norms of a zero state have no finite derivative unless they are guarded."""
    target, drafter = pair
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        target.get_input_embeddings().weight[drafter.config.mask_token_id] = 0
    ids, loss_mask = batch_with_holes()
    loss, grads = gradients(target, drafter, ids, loss_mask)
    assert math.isfinite(loss)
    for name, grad in grads.items():
        assert bool(grad.isfinite().all()), name


def test_without_injection_only_the_backbone_learns(pair, taps):
    """The ablation must drop refinement and alignment from the loss, leave the injection untouched, and draft exactly
    the backbone's first choices."""
    target, _ = pair
    drafter = build_drafter(target, writes=False).train()
    config = ObjectiveConfig(anchors=5, injection=False)
    objective = DSpineObjective(drafter, target, config, total_steps=600)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    before = {name: p.detach().clone() for name, p in drafter.injection.named_parameters()}
    ids, loss_mask = batch_with_holes()
    for step in range(3):
        loss, metrics = objective(ids, loss_mask, step, seeded(step))
        loss.backward()
        assert all(p.grad is None for p in drafter.injection.parameters())
        assert all(p.grad.any() for name, p in drafter.named_parameters() if not name.startswith("injection."))
        optimizer.step()
        optimizer.zero_grad()
    total = 0.1 * metrics["backbone_ce"] + 0.9 * metrics["backbone_l1"]
    torch.testing.assert_close(metrics["loss"], total)
    assert metrics["refinement"] == metrics["alignment"] == 0
    for name, parameter in drafter.injection.named_parameters():
        assert torch.equal(parameter, before[name]), name
    drafter.eval()
    text = ids[0].tolist()
    context, anchor = taps(text[:-1], drafter, target), ids[0, -1:]
    draft = drafter.draft(context, anchor)
    block = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
    block[:, 0] = anchor
    with torch.no_grad():
        output = drafter(target.get_input_embeddings()(block), context, anchor_ids=anchor)
        logits = target.get_output_embeddings()(output.last_hidden_state[:, 1:])
    assert torch.equal(draft.tokens, logits.argmax(dim=-1))


def test_causal_lm_loss_counts_supervised_tokens_only():
    """Catches labels shifted by one and a mean over masked tokens."""
    model = build_target()
    ids, loss_mask = batch_with_holes()
    loss, metrics = CausalLMObjective(model)(ids, loss_mask, 0, None)
    log_p = model(ids).logits.double().log_softmax(dim=-1)
    losses = [
        -log_p[row, position - 1, ids[row, position]]
        for row in range(2)
        for position in range(1, ids.shape[1])
        if loss_mask[row, position]
    ]
    torch.testing.assert_close(loss, (sum(losses) / len(losses)).float(), **FLOAT32)
    assert not metrics["loss"].requires_grad


def decode(drafter, target, prompts, count):
    requests = []
    for prompt in prompts:
        output = drafter.eval().spec_generate(
            target, prompt[None], max_new_tokens=count, temperature=0.0, return_dict_in_generate=True
        )
        requests.append(output.statistics)
    return summarize(requests)["tau_pooled"]


def test_training_on_the_targets_own_text_raises_acceptance(pair):
    """The one test of the whole: a sign, a shift or a leak that every formula test misses shows as a drafter that does
    not learn, or one whose loss falls while its drafts stay wrong."""
    target, _ = pair
    prompts = torch.randint(0, 96, (12, 4), generator=seeded(11))
    text = target.generate(prompts, max_new_tokens=28, do_sample=False)
    loss_mask = torch.ones_like(text, dtype=torch.bool)
    loss_mask[:, :4] = False
    drafter = build_drafter(target, writes=False, initializer_range=0.1)
    untrained = decode(drafter, target, prompts, 28)
    config = ObjectiveConfig(anchors=10, alignment_warmup_steps=20)
    objective = DSpineObjective(drafter, target, config, total_steps=150)

    def loss_now():
        with torch.no_grad():
            return float(objective.eval()(text, loss_mask, 149, seeded(99))[0])

    first = loss_now()
    objective.train()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 150)
    for step in range(150):
        loss, _ = objective(text, loss_mask, step, seeded(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    last, trained = loss_now(), decode(drafter, target, prompts, 28)
    # measured: loss 14.6 -> 1.8, tau 1.01 -> 4.19 of at most 5; the bounds leave room for rounding
    assert last < first / 5
    assert untrained < 1.3
    assert trained > 3.5


# -- data -----------------------------------------------------------------------------------------------------------


def test_step_indices_visit_every_sequence_once_an_epoch():
    """Catches a tail that is dropped at the epoch's end and a shuffle that repeats from epoch to epoch."""
    stream = np.concatenate([step_indices(7, 3, step, seed=4) for step in range(14)])
    epochs = stream.reshape(6, 7)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(7))
    assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1


def test_step_indices_are_a_function_of_seed_and_step():
    """A resumed run must see the batches of an unbroken one, whatever was asked before."""
    steps = [step_indices(50, 8, step, seed=4).tolist() for step in range(20)]
    np.random.seed(0)
    for step in (13, 0, 19, 6):
        assert step_indices(50, 8, step, seed=4).tolist() == steps[step]
    assert [step_indices(50, 8, step, seed=5).tolist() for step in range(20)] != steps


def test_step_indices_of_a_batch_larger_than_the_data():
    """Catches an index past the end where one batch holds several epochs."""
    indices = step_indices(3, 10, 0, seed=0)
    assert [sorted(indices[i : i + 3].tolist()) for i in (0, 3, 6)] == [[0, 1, 2]] * 3


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MINI / "target")


def sequences(paths, tokenizer=None, length=4, repeat=1, **fields):
    sources = [SourceConfig(path=path, repeat=repeat) for path in paths]
    config = DataConfig(train=sources, sequence_length=length, **fields)
    return Sequences(sources, config, tokenizer)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bin_is_cut_into_consecutive_sequences(tmp_path, dtype):
    """Catches a wrong token width, a tail kept in part, and ids left in an unsigned type."""
    np.arange(60_000, 60_011, dtype=dtype).tofile(tmp_path / "a.bin")
    data = sequences([tmp_path / "a.bin"], token_dtype=dtype)
    ids, mask = data.batch(np.array([1, 0]))
    assert len(data) == 2
    assert ids.tolist() == [[60_004, 60_005, 60_006, 60_007], [60_000, 60_001, 60_002, 60_003]]
    assert ids.dtype == torch.int64 and mask.dtype == torch.bool and bool(mask.all())


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64])
def test_npz_is_cut_to_length_with_a_boolean_mask(tmp_path, dtype):
    """Masks are often stored as 0 and 1: an integer one fails in the middle of the first step, far from its file."""
    rows, mask = np.arange(12).reshape(2, 6), np.array([[0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 1]], dtype=dtype)
    np.savez(tmp_path / "a.npz", input_ids=rows, loss_mask=mask)
    ids, found = sequences([tmp_path / "a.npz"]).batch(np.array([0, 1]))
    assert ids.tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert found.dtype == torch.bool
    assert found.tolist() == [[False, False, True, True], [True, False, True, False]]


def test_jsonl_supervises_the_completion_and_its_end(tmp_path, tokenizer):
    """Catches a supervised prompt or padding, and a missing end token."""
    prompt, completion = "def add(a, b):\n", "    return a + b\n"
    records = [{"text": prompt}, {"prompt": prompt, "completion": completion}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    ids, mask = sequences([tmp_path / "a.jsonl"], tokenizer, length=40).batch(np.array([0, 1]))
    first, second = tokenizer(prompt)["input_ids"], tokenizer(completion)["input_ids"]
    end = tokenizer.eos_token_id
    assert 0 < len(first) + len(second) < 39
    assert ids[0].tolist() == first + [end] * (40 - len(first))
    assert mask[0].tolist() == [True] * (len(first) + 1) + [False] * (39 - len(first))
    assert ids[1].tolist() == first + second + [end] * (40 - len(first) - len(second))
    rest = 39 - len(first) - len(second)
    assert mask[1].tolist() == [False] * len(first) + [True] * (len(second) + 1) + [False] * rest


def test_jsonl_cuts_long_records(tmp_path, tokenizer):
    """Catches ragged rows, and a mask that is not cut with its row."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x = 1\n" * 9, "completion": "y = 2\n" * 9}))
    ids, mask = sequences([tmp_path / "a.jsonl"], tokenizer, length=8).batch(np.array([0]))
    assert ids[0].tolist() == tokenizer("x = 1\n" * 9)["input_ids"][:8] and not mask.any()


def test_jsonl_lines_end_at_newlines_only(tmp_path, tokenizer):
    """U+2028 and U+0085 are legal inside a JSON string: splitting there breaks a valid file."""
    text = "a = 'x\u2028y\u0085z'\n"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    data = sequences([tmp_path / "a.jsonl"], tokenizer, length=40)
    ids = tokenizer(text)["input_ids"]
    assert data.batch(np.array([0]))[0][0, : len(ids)].tolist() == ids


def test_sources_are_concatenated_and_repeated(tmp_path):
    """Catches a repeat that counts the next source's rows, and offsets that run on from source to source."""
    np.arange(0, 8, dtype="uint16").tofile(tmp_path / "a.bin")
    np.arange(100, 104, dtype="uint16").tofile(tmp_path / "b.bin")
    sources = [SourceConfig(path=tmp_path / "a.bin", repeat=2), SourceConfig(path=tmp_path / "b.bin", repeat=3)]
    data = Sequences(sources, DataConfig(train=sources, sequence_length=4), None)
    ids, _ = data.batch(np.arange(len(data)))
    assert ids[:, 0].tolist() == [0, 4, 0, 4, 100, 100, 100]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        pytest.param("gone.bin", None, r"`data`.*`.*gone\.bin`", id="missing"),
        pytest.param("a.txt", b"text", r"`data` files must end in .*`.*a\.txt`", id="suffix"),
        pytest.param("a.bin", b"\x01\x00" * 3, r"`data` must hold .* 4 tokens.*a\.bin", id="short"),
        pytest.param("a.bin", b"", r"a\.bin", id="empty-bin"),
        pytest.param("a.jsonl", b"", r"`data` must hold .*a\.jsonl", id="empty-jsonl"),
        pytest.param("a.jsonl", b'{"text": "x"}\n{"prompt": "y"}\n', r"`.*a\.jsonl` line 2 .*prompt", id="no-text"),
        pytest.param("a.jsonl", b'{"text": "x"}\n{"text": \n', r"`.*a\.jsonl` line 2", id="broken-json"),
        pytest.param("a.jsonl", b"3\n", r"`.*a\.jsonl` line 1", id="json-but-no-object"),
        pytest.param("a.jsonl", b'{"text": 3}\n', r"`.*a\.jsonl` line 1", id="text-is-no-string"),
    ],
)
def test_bad_data_is_refused_by_name(tmp_path, tokenizer, name, content, message):
    """A user's file is a user's error: it must name file and line, and never end in a traceback."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DSpineHubError, match=message):
        sequences([tmp_path / name], tokenizer)


def test_short_npz_rows_are_refused_by_name(tmp_path):
    """Rows shorter than the sequences would be cut to nothing, or be ragged with another file's."""
    np.savez(tmp_path / "a.npz", input_ids=np.zeros((2, 3), int), loss_mask=np.ones((2, 3), bool))
    with pytest.raises(DSpineHubError, match=r"`.*a\.npz` must hold rows of at least 4 tokens, got 3"):
        sequences([tmp_path / "a.npz"])


# -- config ---------------------------------------------------------------------------------------------------------


def run_fields(output, target, train, **fields) -> dict:
    """Fields of a small valid run."""
    base = {
        "kind": "drafter",
        "output": str(output),
        "target": str(target),
        "model": {},
        "data": {"train": [{"path": str(train)}], "sequence_length": 32},
        "optimizer": {"learning_rate": 2e-3},
        "steps": 6,
        "batch_size": 4,
        "mixed_precision": "no",
    }
    return {**base, **fields}


@pytest.fixture
def write_config(tmp_path):
    """Return `write(**fields)`, which writes a YAML run; a value of `...` drops the key."""

    def write(**fields):
        fields = {**run_fields("out", "t", "a.bin"), **fields}
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({name: value for name, value in fields.items() if value is not ...}))
        return path

    return write


def test_defaults_are_the_public_recipe(write_config):
    """A silent change of a default changes every later run."""
    config = load_config(write_config())
    assert config.objective.model_dump() == {
        "anchors": 512,
        "ce_weight": 0.1,
        "slot_decay": 7.0,
        "alignment_weight": 0.5,
        "alignment_warmup_steps": 146,
        "replacement_layers": 3,
        "replacement_probability": 0.5,
        "replacement_hold_ratio": 1 / 6,
        "replacement_end_ratio": 1 / 3,
        "candidate_mass_threshold": 1e-4,
        "rows_per_chunk": 8192,
        "injection": True,
    }
    assert config.optimizer.clip == 1.0 and config.optimizer.warmup_ratio == 0.04


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_example_recipes_are_valid(name):
    """A renamed key must be renamed in the recipes."""
    assert load_config(MINI / "recipe" / f"{name}.yaml").output == Path(f"runs/mini/{name}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"stepz": 3}, r"`stepz`", id="unknown"),
        pytest.param({"objective": {"anchor": 3}}, r"`objective\.anchor`", id="unknown-nested"),
        pytest.param({"data": {"train": [], "sequence_length": 8}}, r"`data\.train`", id="no-source"),
        pytest.param({"steps": ...}, r"`steps`", id="missing"),
        pytest.param({"optimizer": {}}, r"`optimizer\.learning_rate`", id="missing-nested"),
        pytest.param({"steps": 0}, r"`steps`.*got 0", id="range"),
        pytest.param({"kind": "eagle"}, r"`kind`.*got 'eagle'", id="choice"),
        pytest.param(
            {"objective": {"replacement_hold_ratio": 0.5}}, r"`replacement_hold_ratio`.*0\.5", id="ratios-in-order"
        ),
    ],
)
def test_broken_rules_are_named(write_config, fields, message):
    """A misspelt key that is ignored trains the wrong run for days."""
    path = write_config(**fields)
    with pytest.raises(DSpineHubError, match=message) as error:
        load_config(path)
    assert f"`{path}`" in str(error.value)


def test_all_broken_rules_are_listed_at_once(write_config):
    """One error a start is a slow way to fix a file."""
    with pytest.raises(DSpineHubError, match=r"2 rule\(s\)") as error:
        load_config(write_config(stepz=3, steps=0))
    assert "`stepz`" in str(error.value) and "`steps`" in str(error.value)


def test_a_bare_no_is_a_word_and_not_false(write_config):
    """Catches `mixed_precision: no`, which YAML reads as false, refused in words nobody can act on."""
    assert load_config(write_config(), ("mixed_precision=no",)).mixed_precision == "no"


def test_overrides_apply_as_yaml(write_config):
    """Catches values kept as strings, a section replaced instead of changed, and a section that is not there yet."""
    overrides = (
        "steps=9",
        "data.sequence_length=64",
        "optimizer.learning_rate=1e-3",
        "objective.injection=false",
        "data.train=[{path: b.bin, repeat: 2}]",
        "output=a=b",
    )
    config = load_config(write_config(), overrides)
    assert config.steps == 9 and config.data.sequence_length == 64
    assert config.optimizer.learning_rate == 1e-3 and config.objective.injection is False
    assert config.objective.anchors == 512
    assert config.data.train == [SourceConfig(path="b.bin", repeat=2)]
    assert config.output == Path("a=b")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("steps", r"`--set` takes dotted\.key=value, got 'steps'", id="no-value"),
        pytest.param("stepz=3", r"`stepz`", id="unknown"),
        pytest.param("steps=many", r"`steps`.*'many'", id="type"),
        pytest.param("steps.deep=3", r"steps\.deep|`steps`", id="below-a-number"),
        pytest.param("steps.deep.er=3", r"steps\.deep|`steps`", id="far-below-a-number"),
        pytest.param("data.train.0.path=b.bin", r"data\.train", id="below-a-list"),
        pytest.param("steps=[", r"`--set`", id="no-YAML"),
    ],
)
def test_bad_overrides_are_refused(write_config, override, message):
    """A user's `--set` is a user's error and never ends in a traceback."""
    with pytest.raises(DSpineHubError, match=message):
        load_config(write_config(), (override,))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, r"`CONFIG` must name a YAML file, got `.*run\.yaml`", id="missing"),
        pytest.param("- 1\n- 2\n", r"`.*run\.yaml` must hold a YAML mapping, got list", id="list"),
        pytest.param("", r"`.*run\.yaml` must hold a YAML mapping, got NoneType", id="empty"),
        pytest.param("a: [", r"`.*run\.yaml` must be valid YAML", id="syntax"),
    ],
)
def test_unreadable_configs_are_refused(tmp_path, content, message):
    """Catches a traceback where the file is the problem."""
    if content is not None:
        (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(DSpineHubError, match=message):
        load_config(tmp_path / "run.yaml")


# -- loop -----------------------------------------------------------------------------------------------------------


class RecordingTrainer(Trainer):
    """A trainer that keeps its float32 weights, which saving rounds, and can be stopped at a step."""

    stop_at = None

    def _train_step(self):
        if self.step == self.stop_at:
            raise KeyboardInterrupt
        return super()._train_step()

    def save_model(self, evaluation):
        self.final = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        super().save_model(evaluation)


TINY_TARGET = {
    "vocab_size": 8192,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": 8124,
    "pad_token_id": 8124,
}

TINY_DRAFTER = {
    "target_id": "lab/Tiny",
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "block_size": 4,
    "target_layer_ids": [0, 2],
    "mask_token_id": 8125,
    "transfer_rank": 16,
    "message_size": 8,
    "num_candidates": 6,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tokenizer):
    """A folder with `train.bin`, `eval.bin` (a few thousand tokens of source) and `prompts.jsonl`."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [json.loads(line)["prompt"] for line in (MINI / "heldout.jsonl").open(encoding="utf-8")]
    stream = [token for text in texts for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    np.array(stream[:3000], dtype="uint16").tofile(folder / "train.bin")
    np.array(stream[3000:4000], dtype="uint16").tofile(folder / "eval.bin")
    prompts = [json.dumps({"prompt": text[:40]}) for text in texts[:3]]
    (folder / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    return folder


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    """Bit-identity and the tolerances here are the CPU's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        yield


def train_config(corpus, output, target, **fields) -> TrainConfig:
    fields = {
        "data": {
            "train": [{"path": str(corpus / "train.bin")}],
            "eval": [{"path": str(corpus / "eval.bin")}],
            "sequence_length": 32,
        },
        "log_every": 1,
        "eval_every": 3,
        **fields,
    }
    return TrainConfig.model_validate(run_fields(output, target, corpus / "train.bin", **fields))


def drafter_config(corpus, output, target, **fields) -> TrainConfig:
    fields = {
        "model": TINY_DRAFTER,
        "objective": {"anchors": 4},
        "acceptance": {"prompts": str(corpus / "prompts.jsonl"), "count": 2, "max_new_tokens": 6},
        **fields,
    }
    return train_config(corpus, output, target, **fields)


def causal_config(corpus, output, **fields) -> TrainConfig:
    fields = {"kind": "causal_lm", "model": TINY_TARGET, "optimizer": {"learning_rate": 1e-2}, **fields}
    return train_config(corpus, output, MINI / "target", **fields)


def read_log(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained_target(corpus, tmp_path_factory):
    """A tiny target trained by the loop itself; the drafter runs below use its folder."""
    output = tmp_path_factory.mktemp("target") / "run"
    Trainer(causal_config(corpus, output, steps=40)).run()
    return output


@pytest.fixture(scope="module")
def unbroken(corpus, trained_target, tmp_path_factory):
    """An unbroken drafter run: its trainer, config and evaluation."""
    config = drafter_config(corpus, tmp_path_factory.mktemp("drafter") / "run", trained_target)
    trainer = RecordingTrainer(config)
    return trainer, config, trainer.run()


def test_a_causal_lm_run_learns_and_loads(trained_target, tokenizer):
    """Catches an optimizer that steps nothing, and a folder that lacks tokenizer, end token or weights."""
    log = read_log(trained_target)
    losses = [record["loss"] for record in log if "loss" in record]
    assert len(losses) == 40
    assert losses[0] == pytest.approx(math.log(8192), abs=0.2)
    assert losses[-1] < losses[0] - 1.5
    assert log[-1]["step"] == 40 and log[-1]["eval_loss"] < losses[0]
    model, report = AutoModelForCausalLM.from_pretrained(trained_target, dtype="auto", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype == torch.bfloat16 and model.config.eos_token_id == 8124
    assert AutoTokenizer.from_pretrained(trained_target).get_vocab() == tokenizer.get_vocab()


def test_a_drafter_run_logs_every_term(unbroken):
    """A term that is not logged cannot be watched; an evaluation that is not logged is lost at the next one."""
    _, config, evaluation = unbroken
    log = read_log(config.output)
    training = [record for record in log if "loss" in record]
    assert [record["step"] for record in training] == [1, 2, 3, 4, 5, 6]
    for record in training:
        assert set(record) == {"step", "grad_norm", "learning_rate", *TERMS}
        assert all(math.isfinite(value) for value in record.values())
    held_out = [record for record in log if "eval_loss" in record]
    assert [record["step"] for record in held_out] == [3, 6]
    names = {f"eval_{name}" for name in TERMS} | {"eval_tau_pooled", "eval_acceptance_per_slot"}
    assert set(held_out[-1]) == {"step", *names}
    assert {**evaluation, "step": 6} == held_out[-1]
    assert 1 <= evaluation["eval_tau_pooled"] <= 4 and len(evaluation["eval_acceptance_per_slot"]) == 3


def test_the_learning_rate_warms_up_and_decays(corpus, trained_target, tmp_path):
    """Catches a scheduler stepped twice a step (accelerate does so for every process) or not at all."""
    optimizer = {"learning_rate": 1e-2, "warmup_ratio": 0.5, "final_ratio": 0.1}
    config = causal_config(corpus, tmp_path / "run", optimizer=optimizer, steps=4, eval_every=100)
    trainer = Trainer(config)
    rates = []
    for _ in range(4):
        rates.append(trainer.scheduler.get_last_lr()[0])
        trainer._train_step()
    # two warm-up steps from 0, then a cosine over two steps; never reaching its end, 0.1
    assert rates == pytest.approx([0.0, 0.5e-2, 1e-2, 1e-2 * (0.1 + 0.9 * 0.5)])
    assert trainer.scheduler.get_last_lr()[0] == pytest.approx(1e-3)


def test_a_drafter_run_saves_what_transformers_loads(unbroken, trained_target, tokenizer):
    """Catches weights saved in float32 or not at all, a record of another target, and codes that were rounded or
    rebuilt on the way."""
    trainer, config, _ = unbroken
    drafter, report = DSpineForSpeculation.from_pretrained(config.output, dtype="auto", output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
    assert drafter.config.dtype == torch.bfloat16
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, trainer.final[name].to(value.dtype)), name
    target = AutoModelForCausalLM.from_pretrained(trained_target, dtype=torch.float32)
    assert drafter.config.target == describe_target(target, tokenizer, "lab/Tiny")
    assert bool(drafter.transfer_ready)
    drafter.float().bind(target, tokenizer)
    ids = tokenizer("def f(x):\n", return_tensors="pt")["input_ids"]
    text = drafter.spec_generate(target, ids, max_new_tokens=8, temperature=0.0)
    assert torch.equal(text, target.generate(ids, max_new_tokens=8, do_sample=False))


def test_training_json_records_config_environment_and_steps(unbroken):
    """A checkpoint without its recipe cannot be reproduced."""
    _, config, evaluation = unbroken
    record = json.loads((config.output / "training.json").read_text())
    assert set(record) == {"config", "environment", "steps", "evaluation"}
    assert TrainConfig.model_validate(record["config"]) == config
    assert set(record["environment"]) == {"machine", "versions", "commit"}
    assert record["environment"]["versions"]["torch"] == torch.__version__
    assert record["steps"] == 6 and record["evaluation"] == evaluation


def test_an_interrupted_run_ends_in_the_same_bits(unbroken, corpus, trained_target, tmp_path):
    """Catches state missing from a checkpoint (optimizer, schedule, step), batches or anchors drawn from a stream that
    a restart resets, and log lines written twice."""
    reference, config, _ = unbroken
    config = config.model_copy(update={"output": tmp_path / "run", "save_every": 2})
    broken = RecordingTrainer(config)
    broken.stop_at = 5
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    assert [folder.name for folder in broken._checkpoints()] == ["step-2", "step-4"]
    assert read_log(config.output)[-1]["step"] == 5
    torch.rand(7)
    resumed = RecordingTrainer(config)
    resumed.run()
    assert resumed.step == 6
    assert reference.final.keys() == resumed.final.keys()
    for name, value in reference.final.items():
        assert torch.equal(value, resumed.final[name]), name
    saved = [(folder / "model.safetensors").read_bytes() for folder in (reference.config.output, config.output)]
    assert saved[0] == saved[1]
    assert read_log(reference.config.output) == read_log(config.output)


def test_an_interrupted_causal_lm_run_ends_in_the_same_bits(corpus, tmp_path):
    """As above for the other kind of run, whose tied weights a checkpoint must keep tied."""
    finals = []
    for name, stop in (("whole", None), ("broken", 3)):
        config = causal_config(corpus, tmp_path / name, steps=4, save_every=2, eval_every=100)
        trainer = RecordingTrainer(config)
        trainer.stop_at = stop
        if stop:
            with pytest.raises(KeyboardInterrupt):
                trainer.run()
            trainer = RecordingTrainer(config)
        trainer.run()
        finals.append(trainer.final)
    for name, value in finals[0].items():
        assert torch.equal(value, finals[1][name]), name


def test_only_the_newest_checkpoints_stay(corpus, tmp_path):
    """Sorted as text, step 10 would be older than step 9, and the newest would be deleted."""
    trainer = Trainer(causal_config(corpus, tmp_path / "run", keep_checkpoints=2))
    trainer.config.output.mkdir()
    for step in (8, 9, 10, 11):
        trainer.step = step
        trainer.save_checkpoint()
    assert [folder.name for folder in trainer._checkpoints()] == ["step-10", "step-11"]
    trainer.step = 0
    trainer.resume()
    assert trainer.step == 11


def test_micro_batches_add_up_to_the_batch(corpus, tmp_path):
    """Catches gradients that are summed instead of averaged, and an optimizer that steps at every piece."""
    results = []
    for micro in (4, 2, 1):
        config = causal_config(
            corpus, tmp_path / str(micro), micro_batch_size=micro, optimizer={"learning_rate": 1e-2}
        )
        trainer = Trainer(config)
        metrics = [trainer._train_step() for _ in range(2)]
        results.append([(float(m["loss"]), float(m["grad_norm"])) for m in metrics])
    for other in results[1:]:
        for (loss, norm), (other_loss, other_norm) in zip(results[0], other, strict=True):
            assert other_loss == pytest.approx(loss, rel=1e-5)
            assert other_norm == pytest.approx(norm, rel=1e-4)


def test_a_batch_that_does_not_divide_is_refused(corpus, tmp_path):
    """A remainder would be dropped in silence."""
    with pytest.raises(DSpineHubError, match=r"`batch_size` must be a multiple .* got 4"):
        Trainer(causal_config(corpus, tmp_path / "run", micro_batch_size=3))


def test_evaluation_leaves_training_as_it_was(corpus, trained_target, tmp_path, unbroken):
    """An evaluation that draws from the training stream, or leaves eval mode on, changes the run that it measures."""
    reference, config, _ = unbroken
    config = config.model_copy(update={"output": tmp_path / "run", "eval_every": 1})
    trainer = RecordingTrainer(config)
    trainer.run()
    assert trainer.objective.training and trainer.model.training
    for name, value in reference.final.items():
        assert torch.equal(value, trainer.final[name]), name


def test_a_compact_drafter_keeps_its_codes_when_saved(corpus, trained_target, tmp_path):
    """A basis rounded to bfloat16 rebuilds other codes than the ones the drafter was trained with."""
    model = {**TINY_DRAFTER, "transfer_storage": "basis"}
    trainer = RecordingTrainer(drafter_config(corpus, tmp_path / "run", trained_target, model=model, steps=1))
    codes = trainer.model.transfer_codes.clone()
    trainer.run()
    target = AutoModelForCausalLM.from_pretrained(trained_target, dtype=torch.float32)
    drafter = DSpineForSpeculation.from_pretrained(tmp_path / "run", dtype="auto").bind(target)
    assert {buffer.dtype for buffer in drafter.transfer_basis.buffers()} == {torch.float32}
    assert torch.equal(drafter.transfer_codes, codes)


def test_without_injection_a_run_leaves_the_injection_silent(corpus, trained_target, tmp_path):
    """Weight decay or an optimizer group of frozen parameters would move what the ablation freezes."""
    optimizer = {"learning_rate": 1e-2, "weight_decay": 0.1}
    objective = {"anchors": 4, "injection": False}
    config = drafter_config(
        corpus, tmp_path / "run", trained_target, optimizer=optimizer, objective=objective, steps=2, acceptance=None
    )
    trainer = RecordingTrainer(config)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    evaluation = trainer.run()
    assert "eval_tau_pooled" not in evaluation
    for name, value in trainer.final.items():
        frozen = name.startswith(("injection.", "transfer_"))
        assert torch.equal(value, before[name]) == frozen, name


def test_two_processes_train_one_model(unbroken, tmp_path):
    """Catches a model saved twice or in parts, a log written by every process, and a result printed twice."""
    _, config, _ = unbroken
    fields = json.loads(config.model_dump_json()) | {"output": str(tmp_path / "run"), "micro_batch_size": 1}
    (tmp_path / "run.yaml").write_text(json.dumps(fields))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    result = subprocess.run(
        [*command, "-m", "dspine_hub", "train", str(tmp_path / "run.yaml")],
        capture_output=True,
        text=True,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count('"output"') == 1
    log = read_log(tmp_path / "run")
    assert [record["step"] for record in log if "loss" in record] == sorted({r["step"] for r in log if "loss" in r})
    drafter = DSpineForSpeculation.from_pretrained(tmp_path / "run")
    assert bool(drafter.transfer_ready)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in drafter.parameters())
