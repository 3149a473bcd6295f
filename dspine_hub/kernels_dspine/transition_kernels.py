"""The Triton kernel that turns lengths into transition scores, and what launches it.

A program takes one slot, or a part of its axes where there are few: it reads the rows of the slot's candidates, sums
what `transition_scores` puts together over hidden and message axis, and finds each predecessor's length where its
scores will stand. Nothing larger than the scores is in memory. Names are those of `transition_length_kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .transfer_tables import TransferTables
from .transition_length_kernels import SlotOperands, ask_predecessors, by_rows, gated_message
from .triton_support import TileTable, dot_of_halves, dot_precision, jit, next_power_of_2, overlap, pick_tile, tl


class ScoreTile(NamedTuple):
    """How the scores of a slot are cut.

    Args:
        hidden (`int`): What is read at once of the hidden axis.
        message (`int`): What is read at once of the message axis.
        split (`int`): Programs that share the two.
        warps, stages (`int`): Of a program.
    """

    hidden: int
    message: int
    split: int = 1
    warps: int = 4
    stages: int = 1


@jit
def _row_of(rows_ptr, b, s, batch_stride, slot_stride):
    """Point to the row of slot `s` of request `b`, in `[B, S, ...]` of given strides."""
    return rows_ptr + (b * batch_stride + s * slot_stride)


@jit
def _hidden_axis(
    state_row,
    norm_ptr,
    head_row,
    k,
    inside,
    H: tl.constexpr,
    KP: tl.constexpr,
    BH: tl.constexpr,
    STEPS: tl.constexpr,
    FROM_LOGITS: tl.constexpr,
):
    """Sum `STEPS` times `BH` columns from `k` on: `<h, w*e_d>` of every candidate, `[KP]`, and `|h|^2`.

    Where the head's rows cannot be read the former are zero.
    """
    products = tl.zeros((KP, BH), tl.float32)
    squares = tl.zeros((BH,), tl.float32)
    if FROM_LOGITS:
        for _ in range(STEPS):
            h = tl.load(state_row + k, k < H, 0.0).to(tl.float32)
            squares += h * h
            k += BH
    else:
        e = tl.load(head_row + k[None, :], inside[:, None] & (k < H)[None, :], 0.0)
        for _ in range(STEPS):
            h = tl.load(state_row + k, k < H, 0.0).to(tl.float32)
            weighted = h * tl.load(norm_ptr + k, k < H, 0.0).to(tl.float32)
            squares += h * h
            k += BH
            ahead = tl.load(head_row + k[None, :], inside[:, None] & (k < H)[None, :], 0.0)
            products += e.to(tl.float32) * weighted[None, :]
            e = ahead
    return tl.sum(products, 1), tl.sum(squares, 0)


@jit
def _dot_head_messages(z, head_message, total, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Add `z.G_d` of all pairs, `[KP, KP]`, of `z` and `G_d` in float32: what tells candidates apart is not rounded.

    Both enter as two halves in `dtype`; the product of the lesser two is left out.
    """
    near = head_message.to(dtype)
    total = dot_of_halves(z, tl.trans(near), total, PRECISION)
    if near.dtype != tl.float32:
        rest = (head_message - near.to(tl.float32)).to(near.dtype)
        total = tl.dot(z.to(near.dtype), tl.trans(rest), total, input_precision=PRECISION)
    return total


@jit
def _message_axis(
    message,
    gate,
    head_message,
    scale,
    table_row,
    head_message_row,
    receiver_row,
    projection_row,
    written_row,
    bias_ptr,
    m,
    inside,
    M: tl.constexpr,
    KP: tl.constexpr,
    BK: tl.constexpr,
    STEPS: tl.constexpr,
    FROM_LOGITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum `STEPS` times `BK` columns from `m` on: `z.G_d` of all pairs, `[KP, KP]`, and `z.(W^T h)`, `[KP]`.

    The first columns come with the call, asked for before. From logits `z_0.G_d` of the written message is taken away.
    """
    numerator = tl.zeros((KP, KP), tl.float32)
    crosses = tl.zeros((KP, BK), tl.float32)
    written = tl.zeros((KP, BK), tl.float32)
    for _ in range(STEPS):
        receiver = tl.load(receiver_row + m, m < M, 0.0)[None, :]
        z = gated_message(message, gate, scale, receiver, tl.load(bias_ptr + m, m < M, 0.0)[None, :])
        crosses += z * tl.load(projection_row + m, m < M, 0.0).to(tl.float32)[None, :]
        wide = head_message.to(tl.float32)
        if FROM_LOGITS:
            written += wide * tl.load(written_row + m, m < M, 0.0).to(tl.float32)[None, :]
        m += BK
        mask = inside[:, None] & (m < M)[None, :]
        message, gate = ask_predecessors(table_row, m, mask, M)
        head_message = tl.load(head_message_row + m[None, :], mask, 0)
        numerator = _dot_head_messages(z, wide, numerator, bias_ptr.dtype.element_ty, PRECISION)
    cross = tl.sum(crosses, 1)
    if FROM_LOGITS:
        numerator -= tl.sum(written, 1)[None, :]
    return numerator, cross


@jit
def _leave_part(part_ptr, c, numerator, dots, cross, square, KP: tl.constexpr):
    """Store a part where the other programs of its slot find it: `(KP + 2) * KP + 1` numbers."""
    at = c[:, None] * KP + c[None, :]
    tl.store(part_ptr + at, numerator)
    tl.store(part_ptr + KP * KP + c, dots)
    tl.store(part_ptr + KP * KP + KP + c, cross)
    tl.store(part_ptr + (KP + 2) * KP, square)


@jit
def _add_parts(slot_ptr, c, KP: tl.constexpr, SPLIT: tl.constexpr):
    """Add what the programs of a slot left, always in the same order; returns what [`_leave_part`] takes."""
    at = c[:, None] * KP + c[None, :]
    numerator = tl.zeros((KP, KP), tl.float32)
    dots = tl.zeros((KP,), tl.float32)
    cross = tl.zeros((KP,), tl.float32)
    square = 0.0
    for part in tl.static_range(SPLIT):
        part_ptr = slot_ptr + part * ((KP + 2) * KP + 1)
        numerator += tl.load(part_ptr + at, cache_modifier=".cg")
        dots += tl.load(part_ptr + KP * KP + c, cache_modifier=".cg")
        cross += tl.load(part_ptr + KP * KP + KP + c, cache_modifier=".cg")
        square += tl.load(part_ptr + (KP + 2) * KP, cache_modifier=".cg")
    return numerator, dots, cross, square


@jit
def _store_scores(
    row_ptr,
    c,
    numerator,
    dots,
    cross,
    square,
    inside,
    eps,
    K: tl.constexpr,
    KP: tl.constexpr,
    H: tl.constexpr,
    LENGTHS: tl.constexpr,
):
    """Finish the scores of a slot, `[KP, KP]`, from the sums and from the `LENGTHS` parts that wait in their rows."""
    quadratic = tl.zeros((KP,), tl.float32)
    for part in tl.static_range(LENGTHS):
        quadratic += tl.load(row_ptr + part, inside, 0.0)
    # read by all before any is written over
    tl.debug_barrier()
    rms = tl.sqrt(square / H)
    mean_square = tl.maximum(square + 2 * rms * cross + rms * rms * quadratic, 0.0) / H
    scores = (dots[None, :] + rms * numerator) / tl.sqrt(mean_square + eps)[:, None]
    tl.store(row_ptr[:, None] + c[None, :], scores, inside[:, None] & inside[None, :])


@jit
def _scores_kernel(
    state_ptr,  # [B, S, H]
    candidates_ptr,  # [B, S, K], int64
    anchor_ptr,  # [B], int64
    receiver_ptr,  # [B, S, M]
    projection_ptr,  # [B, S, M], W^T h
    table_ptr,  # [V, 2M]
    table_scale_ptr,  # [V]
    bias_ptr,  # [M]
    norm_ptr,  # [H]
    head_ptr,  # [V, H], or not read
    head_messages_ptr,  # [V, M], or [B * S * K, M] in the order of the candidates
    head_messages_scale_ptr,  # [V], or not read
    logits_ptr,  # [B, S, K], float32, or not read
    written_ptr,  # [B, S, M], or not read
    length_ptr,  # [B, S], or not read
    out_ptr,  # [B, S, K, K], float32; in its first columns the parts of a row's |W z|^2
    partial_ptr,  # [B * S, SPLIT, (KP + 2) * KP + 1], float32
    arrivals_ptr,  # [B * S], int32
    state_batch,
    state_slot,
    receiver_batch,
    receiver_slot,
    projection_batch,
    projection_slot,
    written_batch,
    written_slot,
    length_batch,
    length_slot,
    eps,
    S: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    H: tl.constexpr,
    M: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    FROM_LOGITS: tl.constexpr,
    LENGTHS: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Score the candidates of a slot after each candidate of the slot before it; grid `[B * S, SPLIT]`.

    Every program of a slot takes a part of both axes. `BY_TOKEN` says that head messages are a table of tokens,
    `FROM_LOGITS` that the backbone's logits stand in for the head's rows.
    """
    slot, part = tl.program_id(0), tl.program_id(1)
    b, s = (slot // S).to(tl.int64), slot % S
    c = tl.arange(0, KP)
    inside = c < K
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()

    # which tokens: the candidates, and those of the slot before or the anchor
    own = tl.load(candidates_ptr + slot * K + c, inside, 0)
    before = tl.load(candidates_ptr + (slot - 1) * K + c, c < tl.where(s > 0, K, 0), 0)
    token = tl.where(s > 0, before, tl.load(anchor_ptr + b))

    # rows of the tables, and of what the last injection knew of the slot
    source = own if BY_TOKEN else (slot * K + c).to(tl.int64)
    table_row, head_message_row = table_ptr + token[:, None] * (2 * M), head_messages_ptr + source[:, None] * M
    receiver_row = _row_of(receiver_ptr, b, s, receiver_batch, receiver_slot)
    projection_row = _row_of(projection_ptr, b, s, projection_batch, projection_slot)
    written_row = _row_of(written_ptr, b, s, written_batch, written_slot)
    m_steps: tl.constexpr = (M + SPLIT * BK - 1) // (SPLIT * BK)
    m = part * m_steps * BK + tl.arange(0, BK)
    mask = inside[:, None] & (m < M)[None, :]
    message, gate = ask_predecessors(table_row, m, mask, M)
    head_message = tl.load(head_message_row + m[None, :], mask, 0)
    scale = tl.load(table_scale_ptr + token, inside, 0.0)[:, None]

    # this part of the hidden axis, and of the message axis
    state_row, head_row = _row_of(state_ptr, b, s, state_batch, state_slot), head_ptr + own[:, None] * H
    h_steps: tl.constexpr = (H + SPLIT * BH - 1) // (SPLIT * BH)
    k = part * h_steps * BH + tl.arange(0, BH)
    dots, square = _hidden_axis(state_row, norm_ptr, head_row, k, inside, H, KP, BH, h_steps, FROM_LOGITS)
    numerator, cross = _message_axis(
        message, gate, head_message, scale, table_row, head_message_row, receiver_row, projection_row, written_row,
        bias_ptr, m, inside, M, KP, BK, m_steps, FROM_LOGITS, PRECISION,
    )  # fmt: skip
    if FROM_LOGITS:
        # not a sum: one part alone holds it
        length = tl.load(_row_of(length_ptr, b, s, length_batch, length_slot)).to(tl.float32)
        logits = tl.load(logits_ptr + slot * K + c, inside, 0.0)
        # a compiled graph hands numbers over in float64
        root = tl.sqrt(length * length / H + eps).to(tl.float32)
        dots = tl.where(part == 0, 1.0, 0.0) * logits * root
    if BY_TOKEN:
        numerator *= tl.load(head_messages_scale_ptr + own, inside, 0.0)[None, :]

    # the last program of the slot to arrive adds all parts, and leaves the counter as it was
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    last = SPLIT == 1
    if SPLIT > 1:
        size: tl.constexpr = (KP + 2) * KP + 1
        parts_ptr = partial_ptr + slot * SPLIT * size
        _leave_part(parts_ptr + part * size, c, numerator, dots, cross, square, KP)
        tl.debug_barrier()
        last = tl.atomic_add(arrivals_ptr + slot, 1) == SPLIT - 1
    if last:
        if SPLIT > 1:
            numerator, dots, cross, square = _add_parts(parts_ptr, c, KP, SPLIT)
            tl.store(arrivals_ptr + slot, 0)
        row_ptr = out_ptr + (slot * K + c).to(tl.int64) * K
        _store_scores(row_ptr, c, numerator, dots, cross, square, inside, eps, K, KP, H, LENGTHS)


# measured on an H200 at H 4096, M 512, K 16; bounds are slots: 15 a request
SCORE_TILES = TileTable(
    half=(
        (16, ScoreTile(256, 64, split=4)),
        (64, ScoreTile(512, 64, split=2)),
        (256, ScoreTile(128, 64, split=2)),
        (1 << 30, ScoreTile(256, 64)),
    ),
    float32=ScoreTile(32, 32, split=2, stages=2),
)


def launch_scores(
    slots: SlotOperands, gathered, backbone, lengths: int, tables: TransferTables, out: torch.Tensor
) -> None:
    """Launch 2: turn the `lengths` parts in every row of `out`, `[B, S, K, K]`, into the row's scores.

    Args:
        slots ([`SlotOperands`]): The slots.
        gathered (`torch.Tensor` of shape `[B * S * K, M]`, *optional*): Head messages, without a table of them.
        backbone (`BackboneLogits`, *optional*): In place of the head's rows.
    """
    state, candidates, _, receiver, projection = slots
    (batch, number, count), size = candidates.shape, tables.write_factor.shape[0]
    # a launch names all operands, also those it does not read
    head_messages = (gathered, out) if gathered is not None else tables.head_messages
    logits, written, length = (state, state, state[..., 0]) if backbone is None else backbone
    if backbone is not None:
        logits, written = logits.contiguous(), by_rows(written)
    tile = pick_tile(SCORE_TILES, batch * number, tables.write_factor.dtype)
    split = tile.split if batch * number <= tables.arrivals.shape[0] else 1
    padded = max(16, next_power_of_2(count))
    _scores_kernel[(batch * number, split)](
        state,
        candidates,
        slots.anchor,
        receiver,
        projection,
        *tables.predecessors,
        tables.layers[tables.last].bias,
        tables.norm_weight,
        tables.head_weight,
        *head_messages,
        logits,
        written,
        length,
        out,
        out if split == 1 else out.new_empty(batch * number * split * ((padded + 2) * padded + 1)),
        tables.arrivals,
        *(stride for rows in (state, receiver, projection, written, length) for stride in rows.stride()[:2]),
        tables.norm_eps,
        S=number,
        K=count,
        KP=padded,
        H=state.shape[2],
        M=size,
        BY_TOKEN=gathered is None,
        FROM_LOGITS=backbone is not None,
        LENGTHS=lengths,
        BH=tile.hidden,
        BK=tile.message,
        SPLIT=split,
        PRECISION=dot_precision(state),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(state),
    )
