"""Blocks of a training step: random anchors, labels, and the mask that packs all blocks into one pass."""

from dataclasses import dataclass

import torch


@dataclass
class Blocks:
    """`A` blocks a sequence, cut from sequences of length `n`.

    Args:
        anchors (`torch.Tensor` of shape `[B, A]`, int64): Anchor positions.
        labels (`torch.Tensor` of shape `[B, A, N]`, int64): Tokens at `anchor + j`; entry 0 is the anchor itself.
        supervised (`torch.Tensor` of shape `[B, A, S]`, bool): Slots that count: a slot ends with the first
            unsupervised token of its block, sequence end included.
        position_ids (`torch.Tensor` of shape `[B, n + A * N]`, int64): Context positions, then block positions.
        mask (`torch.Tensor` of shape `[B, 1, A * N, n + A * N]`, bool): A block row sees the context before its anchor
            and its own block up to itself.
    """

    anchors: torch.LongTensor
    labels: torch.LongTensor
    supervised: torch.BoolTensor
    position_ids: torch.LongTensor
    mask: torch.BoolTensor


def sample_anchors(
    loss_mask: torch.Tensor, count: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw distinct anchors whose next token is supervised.

    Args:
        loss_mask (`torch.Tensor` of shape `[B, n]`, bool): Supervised tokens.
        count (`int`): Anchors `A` a sequence.
        generator (`torch.Generator`): On the mask's device.

    Returns:
        `tuple` of positions (`[B, A]`, int64) and whether each is a real anchor (`[B, A]`, bool); a sequence with
        fewer possible anchors fills up with unreal ones.
    """
    possible = loss_mask[:, 1:]
    keys = torch.rand(possible.shape, generator=generator, device=loss_mask.device).masked_fill(~possible, -1.0)
    keys, positions = keys.topk(min(count, possible.shape[1]), dim=-1)
    return positions, keys >= 0


def build_blocks(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, anchors: torch.Tensor, real: torch.Tensor, block_size: int
) -> Blocks:
    """Cut blocks of `block_size` tokens at the anchors; shapes as in [`Blocks`], inputs `[B, n]` and `[B, A]`."""
    batch, length = input_ids.shape
    device = input_ids.device
    offsets = torch.arange(block_size, device=device)
    positions = anchors[..., None] + offsets  # [B, A, N]
    inside = positions < length
    safe = positions.clamp(max=length - 1).flatten(1)
    labels = input_ids.gather(1, safe).view_as(positions)
    counted = (loss_mask.gather(1, safe).view_as(positions) & inside)[..., 1:]
    supervised = counted.int().cumprod(dim=-1).bool() & real[..., None]

    context = torch.arange(length, device=device)
    rows = anchors.shape[1] * block_size
    block_of = torch.arange(rows, device=device) // block_size
    step = torch.arange(rows, device=device) % block_size
    sees_context = context < anchors.repeat_interleave(block_size, dim=1)[..., None]  # [B, A * N, n]
    sees_block = (block_of[:, None] == block_of) & (step[:, None] >= step)
    mask = torch.cat((sees_context, sees_block.expand(batch, -1, -1)), dim=-1)[:, None]
    position_ids = torch.cat((context.expand(batch, -1), positions.flatten(1)), dim=1)
    return Blocks(anchors, labels, supervised, position_ids, mask)
