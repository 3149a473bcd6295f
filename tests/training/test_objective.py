"""Every term of the objective against plain loops, and the schedules of two of them."""

import math

import pytest
import torch
from helpers.oracle import Oracle
from helpers.training import TERMS, batch_with_holes, seeded

from dspine_hub.training.blocks import sample_anchors
from dspine_hub.training.config import ObjectiveConfig
from dspine_hub.training.objective import DSpineObjective, alignment_scale, replacement_probability


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
    seen, make = {}, drafter.injection.from_weights
    monkeypatch.setattr(
        drafter.injection, "from_weights", lambda code, **given: seen.update(given=given) or make(code, **given)
    )
    with torch.no_grad():
        _, taught = objective(ids, loss_mask, 0, seeded(7))
        replace = seen["given"]["replaced"]
        _, evaluated = objective.eval()(ids, loss_mask, 0, seeded(7))
    assert seen["given"] == {}
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
    loss_mask, seen, make = torch.ones_like(ids, dtype=torch.bool), {}, drafter.injection.from_weights
    monkeypatch.setattr(
        drafter.injection, "from_weights", lambda code, **given: seen.update(given) or make(code, **given)
    )
    with torch.no_grad():
        objective(ids, loss_mask, 175, seeded())
    assert seen["replaced"].shape == (800,)
    # probability 0.2 at step 175; five standard deviations of a mean over 800 blocks
    assert float(seen["replaced"].float().mean()) == pytest.approx(0.2, abs=5 * math.sqrt(0.2 * 0.8 / 800))
