"""Drafts: the cached walk equals direct refinement, and q is the row each draft was drawn from."""

import pytest
import torch
from helpers.block_pass import FLOAT32, SHAPES, TEXT, oracle_of


@pytest.mark.parametrize("fields", SHAPES)
def test_every_cached_score_equals_direct_refinement(make_drafter, taps, fields):
    """Catches a score computed from the wrong slot, the post-injection state or another predecessor."""
    drafter = make_drafter(**fields)
    context = taps(TEXT, drafter)
    draft = drafter.draft(context, torch.tensor([7]))
    oracle = oracle_of(drafter)
    block = oracle.block(7, context[0])
    for slot, ids in enumerate(draft.candidates[0].tolist()):
        logits = oracle.head @ block["final"][slot + 1]
        assert sorted(ids) == sorted(logits.topk(len(ids)).indices.tolist())
        for c in range(len(ids)):
            before = 7 if slot == 0 else int(draft.candidates[0, slot - 1, c])
            expected = oracle.head[ids] @ oracle.refine(block["states"][slot + 1], before)
            torch.testing.assert_close(draft.scores[0, slot, c].double(), expected, **FLOAT32)
            if len(ids) > 20 and c > 3:
                break  # K = V: a few rows are enough of a loop in Python


@pytest.mark.parametrize("fields", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.6], ids=["greedy", "T=0.7", "T=1.6"])
def test_the_cached_walk_equals_the_sequential_walk(make_drafter, taps, fields, temperature):
    """Catches a walk that follows another row than the token just chosen; sampled walks read the same uniforms."""
    drafter = make_drafter(**fields)
    oracle = oracle_of(drafter)
    slots = drafter.config.block_size - 1
    for seed, anchor in enumerate([7, 20, 76]):
        context = taps(TEXT[: 3 + seed], drafter)
        draft = drafter.draft(context, torch.tensor([anchor]), temperature, torch.Generator().manual_seed(seed))
        uniforms = torch.rand(1, slots, generator=torch.Generator().manual_seed(seed))[0].tolist()
        states = oracle.block(anchor, context[0])["states"]
        expected = oracle.sequential_walk(states, draft.candidates[0].tolist(), anchor, temperature, uniforms)
        assert draft.tokens[0].tolist() == expected


def test_the_walk_is_not_the_backbones_own_argmax(make_drafter, taps):
    """Catches fixtures so tame that every equality above would hold without any refinement."""
    drafter = make_drafter()
    different = 0
    for anchor in range(20):
        context = taps(TEXT, drafter)
        draft = drafter.draft(context, torch.tensor([anchor]))
        different += draft.tokens[0].tolist() != draft.candidates[0, :, 0].tolist()
    assert different > 5


def test_q_is_the_row_each_draft_was_drawn_from(make_drafter, taps):
    """Catches a q of the backbone or of another predecessor: sampling would no longer be lossless."""
    drafter = make_drafter()
    draft = drafter.draft(taps(TEXT, drafter), torch.tensor([7]), 0.7, torch.Generator().manual_seed(3))
    row = 0
    for slot in range(4):
        torch.testing.assert_close(draft.q[0, slot], torch.softmax(draft.scores[0, slot, row] / 0.7, dim=-1))
        row = int((draft.candidates[0, slot] == draft.tokens[0, slot]).nonzero())


def test_greedy_drafting_leaves_the_global_generator_alone(make_drafter, taps):
    """Catches a greedy draft that moves the random stream of the caller's own sampling."""
    drafter = make_drafter()
    context = taps(TEXT, drafter)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drafter.draft(context, torch.tensor([7]))
    assert torch.equal(torch.get_rng_state(), before)
