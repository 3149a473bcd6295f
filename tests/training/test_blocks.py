"""Blocks of training: masks, labels, positions, anchors, and packing."""

import pytest
import torch
from helpers.training import batch_with_holes, seeded
from torch.nn import functional as F

from dspine_hub.training.blocks import build_blocks, sample_anchors


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
            embedding(tokens.flatten(1)),
            context,
            blocks.position_ids,
            blocks.mask,
            drafter.injection.from_weights(codes),
            output_features=True,
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
