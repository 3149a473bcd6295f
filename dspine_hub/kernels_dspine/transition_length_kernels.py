"""The Triton kernels that run in front of transition scores, and what launches them.

[`launch_lengths`] does the matrix products of a length, `|F z|^2`, for several slots at once; `F` is the triangular
factor of the write. [`gathered_head_messages`] computes `G_d` of the candidates where there is no table of it.

In the kernels `b` is a request, `s` its slot, `c` a candidate or, of the slot before, a predecessor; `k` are columns
of a state, `m` of a message, `n` of a result; `z` is what a predecessor sends through its gate, `e` a row of the head.
Rows of the tables lie anywhere in memory: each is asked for one step before it is used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .transfer_tables import TransferTables
from .triton_support import (
    ProductTile,
    TileTable,
    cdiv,
    dot_of_halves,
    dot_precision,
    jit,
    next_power_of_2,
    overlap,
    pick_tile,
    tl,
)


class LengthTile(NamedTuple):
    """How the lengths are cut.

    Args:
        slots (`int`): A program takes so many.
        columns (`int`): Of `F z`, rows of `F`; a program computes so many.
        depth (`int`): What is read at once of the message axis.
        warps, stages (`int`): Of a program.
    """

    slots: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 4


@jit
def _head_message_kernel(
    candidates_ptr,  # [rows], int64
    head_ptr,  # [V, H]
    norm_ptr,  # [H]
    write_ptr,  # [H, M]
    out_ptr,  # [rows, M], float32
    rows,
    H: tl.constexpr,
    M: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply head rows of candidates, weighted by the norm, by the write; grid `[ceil(M / BN), ceil(rows / BM)]`."""
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    m = tl.program_id(0) * BN + tl.arange(0, BN)
    token = tl.load(candidates_ptr + r, r < rows, 0)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range((H + BK - 1) // BK):
        k = step * BK + tl.arange(0, BK)
        e = tl.load(head_ptr + token[:, None] * H + k[None, :], (r < rows)[:, None] & (k < H)[None, :], 0.0)
        norm = tl.load(norm_ptr + k, k < H, 0.0)
        w = tl.load(write_ptr + k[:, None] * M + m[None, :], (k < H)[:, None] & (m < M)[None, :], 0.0)
        total = dot_of_halves(e.to(tl.float32) * norm.to(tl.float32)[None, :], w, total, PRECISION)
    inside = (r < rows)[:, None] & (m < M)[None, :]
    tl.store(out_ptr + r.to(tl.int64)[:, None] * M + m[None, :], total, inside)


@jit
def ask_predecessors(table_row, m, mask, M: tl.constexpr):
    """Ask the table for columns of message and predecessor gate; each of the shape of `mask`, `[rows, BK]`."""
    message = tl.load(table_row + m[None, :], mask, 0)
    gate = tl.load(table_row + M + m[None, :], mask, 0)
    return message, gate


@jit
def gated_message(message, gate, scale, receiver, bias):
    """Send what [`ask_predecessors`] returned through its gate: `z` in float32, `[rows, BK]`.

    `scale` is `[rows, 1]`, what the receiver adds `[rows, BK]` or `[1, BK]`, the bias `[1, BK]`.
    """
    gate = gate.to(tl.float32) * scale + receiver.to(tl.float32) + bias.to(tl.float32)
    return message.to(tl.float32) * scale * tl.sigmoid(gate)


@jit
def _length_kernel(
    candidates_ptr,  # [B, S, K], int64
    anchor_ptr,  # [B], int64
    receiver_ptr,  # [B, S, M]
    table_ptr,  # [V, 2M]
    table_scale_ptr,  # [V]
    bias_ptr,  # [M]
    factor_ptr,  # [M, M], upper triangle
    out_ptr,  # [B, S, K, K], float32
    slots,
    receiver_batch,
    receiver_slot,
    S: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    M: tl.constexpr,
    BS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute parts of `|F z|^2` of every predecessor of some slots; each waits in the row of scores it will scale.

    Grid `[ceil(B * S / BS), ceil(M / BN)]`: a program takes `BS` slots and sums the squares of `BN` columns of `F z`.
    """
    ROWS: tl.constexpr = BS * KP
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    slot, c = tl.program_id(0) * BS + row // KP, row % KP
    inside = (slot < slots) & (c < K)
    if OVERLAP:
        # waits first: the launch behind this one then finds candidates and projection complete
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # which tokens: candidates of the slot before, or the anchor
    before = tl.load(candidates_ptr + (slot - 1) * K + c, inside & (slot % S > 0), 0)
    token = tl.where(slot % S > 0, before, tl.load(anchor_ptr + slot // S, inside, 0))
    table_row = table_ptr + token[:, None] * (2 * M)
    receiver_row = receiver_ptr + ((slot // S).to(tl.int64) * receiver_batch + slot % S * receiver_slot)[:, None]
    scale = tl.load(table_scale_ptr + token, inside, 0.0)[:, None]

    # their messages through the factor; left of its diagonal it is zero, but skipping that would have the compiler
    # wait for every product
    n, m = part * BN + tl.arange(0, BN), tl.arange(0, BK)
    mask = inside[:, None] & (m < M)[None, :]
    message, gate = ask_predecessors(table_row, m, mask, M)
    image = tl.zeros((ROWS, BN), tl.float32)
    for _ in range((M + BK - 1) // BK):
        factor = tl.load(factor_ptr + n[None, :] * M + m[:, None], (m < M)[:, None] & (n < M)[None, :], 0.0)
        receiver = tl.load(receiver_row + m[None, :], mask, 0.0)
        z = gated_message(message, gate, scale, receiver, tl.load(bias_ptr + m, m < M, 0.0)[None, :])
        m += BK
        mask = inside[:, None] & (m < M)[None, :]
        message, gate = ask_predecessors(table_row, m, mask, M)
        # a length is the same for all candidates of a row: it may be rounded, it tells none from another
        image = tl.dot(z.to(factor.dtype), factor, image, input_precision=PRECISION)
    tl.store(out_ptr + (slot * K + c).to(tl.int64) * K + part, tl.sum(image * image, 1), inside)


# measured on an H200 at H 4096, M 512, K 16; bounds are slots: 15 a request
LENGTH_TILES = TileTable(
    half=(
        (16, LengthTile(1, 64, 256, stages=1)),
        (64, LengthTile(1, 256, 64, stages=3)),
        (128, LengthTile(2, 512, 32, warps=8, stages=3)),
        (256, LengthTile(4, 256, 64, warps=8, stages=3)),
        (1 << 30, LengthTile(4, 512, 32, warps=8, stages=3)),
    ),
    float32=LengthTile(1, 32, 32, stages=2),
)
HEAD_MESSAGE_TILES = TileTable(half=((1 << 30, ProductTile(64, 128, 64)),), float32=ProductTile(16, 32, 32, stages=2))


class SlotOperands(NamedTuple):
    """What both launches read of the slots, as [`slot_operands`] makes it: rows in one piece, whatever lies between.

    Args:
        state (`torch.Tensor` of shape `[B, S, H]`), candidates (`torch.Tensor` of shape `[B, S, K]`, int64), anchor
            (`torch.Tensor` of shape `[B]`, int64): As of `transition_scores`.
        receiver, write_projection (`torch.Tensor` of shape `[B, S, M]`): What the last injection knew.
    """

    state: torch.Tensor
    candidates: torch.Tensor
    anchor: torch.Tensor
    receiver: torch.Tensor
    write_projection: torch.Tensor


def by_rows(x: torch.Tensor) -> torch.Tensor:
    """Return `[B, S, n]` with every row in one piece, the tensor itself if it has that."""
    return x if x.stride(2) == 1 else x.contiguous()


def slot_operands(state, candidates, anchor, receiver, write_projection) -> SlotOperands:
    """Make operands of what `transition_scores` is given; views are read as they come where they can be."""
    rows = by_rows(state), candidates.contiguous(), anchor, by_rows(receiver), by_rows(write_projection)
    return SlotOperands(*rows)


def gathered_head_messages(candidates: torch.Tensor, tables: TransferTables) -> torch.Tensor:
    """Compute `G_d` of the candidates only, `[B * S * K, M]` in float32, where there is no table of it."""
    write = tables.layers[tables.last].write
    rows, (width, size) = candidates.numel(), write.shape
    out = write.new_empty(rows, size, dtype=torch.float32)
    tile = pick_tile(HEAD_MESSAGE_TILES, rows, write.dtype)
    _head_message_kernel[(cdiv(size, tile.columns), cdiv(rows, tile.rows))](
        candidates,
        tables.head_weight,
        tables.norm_weight,
        write,
        out,
        rows,
        H=width,
        M=size,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        PRECISION=dot_precision(write),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def launch_lengths(slots: SlotOperands, tables: TransferTables, out: torch.Tensor) -> int:
    """Launch 1: fill the first columns of the scores `[B, S, K, K]` with parts of `|F z|^2`; returns how many."""
    (batch, number, count), size = slots.candidates.shape, tables.write_factor.shape[0]
    tile = pick_tile(LENGTH_TILES, batch * number, tables.write_factor.dtype)
    # a row of the scores holds as many parts as there are candidates
    columns = max(tile.columns, next_power_of_2(cdiv(size, count)))
    lengths = cdiv(size, columns)
    _length_kernel[(cdiv(batch * number, tile.slots), lengths)](
        slots.candidates,
        slots.anchor,
        slots.receiver,
        *tables.predecessors,
        tables.layers[tables.last].bias,
        tables.write_factor,
        out,
        batch * number,
        *slots.receiver.stride()[:2],
        S=number,
        K=count,
        KP=max(16 // tile.slots, next_power_of_2(count)),
        M=size,
        BS=tile.slots,
        BN=columns,
        BK=tile.depth,
        PRECISION=dot_precision(slots.state),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(slots.state),
    )
    return lengths
