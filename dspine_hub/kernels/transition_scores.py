"""Transition scores: for every slot, each candidate given each candidate of the slot before it.

The last write of the last layer is redone with a concrete predecessor token in place of the predicted feature, and the
refined state meets the LM-head rows of the slot's candidates:

    r = norm(h + rms(h) * write(sigmoid(receiver_gate(f) + predecessor_gate(p_c) + bias) * message(p_c)))
    scores[s, c, d] = <r, lm_head[d]>,   p_c = sqrt(R) * codes[c],   f = predicted feature of h

The reference says it in *hidden space*: `r` for every pair of slot and predecessor, `[B, S, K, H]` values. The rest of
this file says the same in *message space*, around `z = gate * message(p_c)`, `M` values a row:

    <r, e_d> = (<h, w*e_d> + s z.G_d) / sqrt((|h|^2 + 2 s z.(W^T h) + s^2 z^T (W^T W) z) / H + eps)

with `s = rms(h)`, `W` the write, `w` the norm's weight, `G_d = W^T (w*e_d)`. What depends on a token alone comes from
the tables of `transfer_tables`, what the last injection has already computed from its projection.

Two launches, and nothing larger than the scores in memory. The first does the matrix products of a length,
`z^T (W^T W) z = |F z|^2` with the triangular factor `F` of `W`, for several slots at once. The second takes one slot a
program, reads the rows of its candidates, and finds each predecessor's length where its scores will stand.

A head that is split over ranks, or quantised, has no rows to read. The backbone's own logit `u_d` went through it, and
gives the product with the message `z_0` the slot was written:

    <h, w*e_d> = u_d sqrt(|h + s W z_0|^2 / H + eps) - s z_0.G_d

Source of the method: arXiv 2609.36173.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional as F

from .adjacent_injection import SlotProjection, inject_message, predicted_feature
from .transfer_tables import InjectionWeights, TransferTables
from .triton_support import (
    FLOAT32_TILE,
    Tile,
    cdiv,
    dot_of_halves,
    dot_precision,
    jit,
    next_power_of_2,
    overlap,
    pick_tile,
    tl,
    use_triton,
)


class BackboneLogits(NamedTuple):
    """The backbone's own logits of the candidates, and the states they are of; in place of the head's rows.

    Args:
        logits (`torch.Tensor` of shape `[B, S, K]`, float32): Of the candidates.
        message (`torch.Tensor` of shape `[B, S, M]`): Gated messages the last injection wrote.
        length (`torch.Tensor` of shape `[B, S]`): Of the states after that write.
    """

    logits: torch.Tensor
    message: torch.Tensor
    length: torch.Tensor


def predecessors_of(candidates: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Shift the candidates right by one slot; the anchor, repeated, precedes slot 1. Returns `[B, S, K]` token ids."""
    first = anchor[:, None, None].expand(-1, 1, candidates.shape[-1])
    return torch.cat((first, candidates[:, :-1]), dim=1)


def transition_scores_reference(
    state: torch.Tensor,
    candidates: torch.Tensor,
    anchor: torch.Tensor,
    codes: torch.Tensor,
    weights: InjectionWeights,
    norm_weight: torch.Tensor,
    norm_eps: float,
    head_weight: torch.Tensor,
) -> torch.Tensor:
    """Define the scores in hidden space, from the weights alone; differentiable.

    Args:
        state (`torch.Tensor` of shape `[B, S, H]`): Last-layer states of the proposal slots before the last injection.
        candidates (`torch.Tensor` of shape `[B, S, K]`, int64): Token ids of each slot's candidates.
        anchor (`torch.Tensor` of shape `[B]`, int64): Token ids of the anchors, the predecessors of slot 1.
        codes (`torch.Tensor` of shape `[V, R]`): Unit code of every token.
        weights ([`InjectionWeights`]): Of the last layer.
        norm_weight (`torch.Tensor` of shape `[H]`), norm_eps (`float`): Final RMSNorm.
        head_weight (`torch.Tensor` of shape `[V, H]`): The target's LM head.

    Returns:
        `torch.Tensor` of shape `[B, S, K, K]`, float32: As of [`transition_scores`].
    """
    receiver = predicted_feature(state, weights.readout)[:, :, None]
    scale = math.sqrt(weights.readout.shape[0])
    predecessor = scale * F.embedding(predecessors_of(candidates, anchor), codes).to(state.dtype)
    wide = state[:, :, None].expand(-1, -1, candidates.shape[-1], -1)
    refined = inject_message(wide, receiver, predecessor, weights).float()
    normed = (refined * torch.rsqrt(refined.pow(2).mean(-1, keepdim=True) + norm_eps)).to(state.dtype) * norm_weight
    rows = F.embedding(candidates, head_weight).to(state.dtype)
    return torch.matmul(normed, rows.transpose(-1, -2)).float()


def slot_projection(state: torch.Tensor, tables: TransferTables) -> SlotProjection:
    """Compute the projection of states `[B, S, H]` whose injection did not keep it."""
    weights = tables.layers[tables.last]
    receiver = F.linear(predicted_feature(state, weights.readout), weights.receiver_gate)
    return SlotProjection(receiver, torch.matmul(state, weights.write))


def _scores_torch(state, candidates, anchor, projection, tables, backbone) -> torch.Tensor:
    weights = tables.layers[tables.last]
    message, gate = tables.predecessors.rows(predecessors_of(candidates, anchor)).float().chunk(2, dim=-1)
    z = message * torch.sigmoid(projection.receiver.float()[:, :, None] + gate + weights.bias.float())  # [B, S, K, M]
    h = state.float()
    square = h.pow(2).sum(dim=-1, keepdim=True)  # [B, S, 1]
    s = (square / h.shape[-1]).sqrt()
    if tables.head_messages is not None:
        head = tables.head_messages.rows(candidates).float()  # G_d, [B, S, K, M]
    if backbone is None:
        rows = F.embedding(candidates, tables.head_weight).float() * tables.norm_weight.float()
        dots = torch.matmul(rows, h[..., None]).squeeze(-1)  # <h, w*e_d>, [B, S, K]
        if tables.head_messages is None:
            head = torch.matmul(rows, weights.write.float())
    else:
        scale = (backbone.length.float().pow(2) / h.shape[-1] + tables.norm_eps).sqrt()[..., None]
        own = torch.matmul(head, backbone.message.float()[..., None]).squeeze(-1)  # z_0.G_d, [B, S, K]
        dots = backbone.logits * scale - s * own
    numerator = dots[:, :, None, :] + s[..., None] * torch.matmul(z, head.transpose(-1, -2))
    cross = torch.matmul(z, projection.write_projection.float()[..., None]).squeeze(-1)  # z.(W^T h), [B, S, K]
    quadratic = torch.matmul(z, tables.write_factor.float().T).pow(2).sum(-1)  # z^T (W^T W) z, [B, S, K]
    mean_square = (square + 2 * s * cross + s.pow(2) * quadratic).clamp_min(0) / h.shape[-1]
    return numerator * torch.rsqrt(mean_square + tables.norm_eps)[..., None]


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
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    m = tl.program_id(0) * BN + tl.arange(0, BN)
    token = tl.load(candidates_ptr + r, r < rows, 0)
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range((H + BK - 1) // BK):
        k = step * BK + tl.arange(0, BK)
        e = tl.load(head_ptr + token[:, None] * H + k[None, :], (r < rows)[:, None] & (k < H)[None, :], 0.0)
        w = tl.load(norm_ptr + k, k < H, 0.0)
        y = tl.load(write_ptr + k[:, None] * M + m[None, :], (k < H)[:, None] & (m < M)[None, :], 0.0)
        acc = dot_of_halves(e.to(tl.float32) * w.to(tl.float32)[None, :], y, acc, PRECISION)
    inside = (r < rows)[:, None] & (m < M)[None, :]
    tl.store(out_ptr + r.to(tl.int64)[:, None] * M + m[None, :], acc, inside)


@jit
def _gated_message(message, gate, scale, receiver, bias):
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
    RP: tl.constexpr = BS * KP
    part = tl.program_id(1)
    row = tl.arange(0, RP)
    slot, c = tl.program_id(0) * BS + row // KP, row % KP
    inside = (slot < slots) & (c < K)
    if OVERLAP:
        # waits first: the launch behind this one then finds candidates and projection complete
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    before = tl.load(candidates_ptr + (slot - 1) * K + c, inside & (slot % S > 0), 0)
    token = tl.where(slot % S > 0, before, tl.load(anchor_ptr + slot // S, inside, 0))
    table_row = table_ptr + token[:, None] * (2 * M)
    receiver_row = receiver_ptr + ((slot // S).to(tl.int64) * receiver_batch + slot % S * receiver_slot)[:, None]
    scale = tl.load(table_scale_ptr + token, inside, 0.0)[:, None]
    n, m = part * BN + tl.arange(0, BN), tl.arange(0, BK)
    # rows of the table lie anywhere in memory: each is asked for one step before it is used
    mask = inside[:, None] & (m < M)[None, :]
    message = tl.load(table_row + m[None, :], mask, 0)
    gate = tl.load(table_row + M + m[None, :], mask, 0)
    image = tl.zeros((RP, BN), tl.float32)
    # left of its diagonal the factor is zero; skipping that would have the compiler wait for every product
    for _ in range((M + BK - 1) // BK):
        factor = tl.load(factor_ptr + n[None, :] * M + m[:, None], (m < M)[:, None] & (n < M)[None, :], 0.0)
        receiver = tl.load(receiver_row + m[None, :], mask, 0.0)
        z = _gated_message(message, gate, scale, receiver, tl.load(bias_ptr + m, m < M, 0.0)[None, :])
        m += BK
        mask = inside[:, None] & (m < M)[None, :]
        message = tl.load(table_row + m[None, :], mask, 0)
        gate = tl.load(table_row + M + m[None, :], mask, 0)
        # a length is the same for all candidates of a row: it may be rounded, it tells none from another
        image = tl.dot(z.to(factor.dtype), factor, image, input_precision=PRECISION)
    # it waits in the row of the scores it will scale
    tl.store(out_ptr + (slot * K + c).to(tl.int64) * K + part, tl.sum(image * image, 1), inside)


@jit
def _scores_kernel(
    state_ptr,  # [B, S, H]
    candidates_ptr,  # [B, S, K], int64
    anchor_ptr,  # [B], int64
    receiver_ptr,  # [B, S, M]
    write_projection_ptr,  # [B, S, M]
    table_ptr,  # [V, 2M]
    table_scale_ptr,  # [V]
    bias_ptr,  # [M]
    norm_ptr,  # [H]
    head_ptr,  # [V, H]
    messages_ptr,  # [V, M], or [B * S * K, M] in the order of the candidates
    messages_scale_ptr,  # [V], or not read
    logits_ptr,  # [B, S, K], float32
    own_ptr,  # [B, S, M]
    length_ptr,  # [B, S]
    out_ptr,  # [B, S, K, K], float32; in its first columns the parts of a row's |W z|^2
    partial_ptr,  # [B * S, SPLIT, (KP + 2) * KP + 1], float32
    arrivals_ptr,  # [B * S], int32
    state_batch,
    state_slot,
    receiver_batch,
    receiver_slot,
    write_projection_batch,
    write_projection_slot,
    own_batch,
    own_slot,
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
    slot, part = tl.program_id(0), tl.program_id(1)
    b, s = (slot // S).to(tl.int64), slot % S
    c = tl.arange(0, KP)
    inside = c < K
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    own = tl.load(candidates_ptr + slot * K + c, inside, 0)
    before = tl.load(candidates_ptr + (slot - 1) * K + c, c < tl.where(s > 0, K, 0), 0)
    token = tl.where(s > 0, before, tl.load(anchor_ptr + b))
    source = own if BY_TOKEN else (slot * K + c).to(tl.int64)
    table_row, message_row = table_ptr + token[:, None] * (2 * M), messages_ptr + source[:, None] * M
    receiver_ptr += b * receiver_batch + s * receiver_slot
    write_projection_ptr += b * write_projection_batch + s * write_projection_slot
    own_ptr += b * own_batch + s * own_slot
    # rows of the tables lie anywhere in memory: each is asked for one step before it is used
    m_steps: tl.constexpr = (M + SPLIT * BK - 1) // (SPLIT * BK)
    m = part * m_steps * BK + tl.arange(0, BK)
    mask = inside[:, None] & (m < M)[None, :]
    message = tl.load(table_row + m[None, :], mask, 0)
    gate = tl.load(table_row + M + m[None, :], mask, 0)
    g = tl.load(message_row + m[None, :], mask, 0)
    scale = tl.load(table_scale_ptr + token, inside, 0.0)[:, None]

    # this part of the hidden axis: <h, w*e_d> and |h|^2
    state_ptr += b * state_batch + s * state_slot
    head_row = head_ptr + own[:, None] * H
    h_steps: tl.constexpr = (H + SPLIT * BH - 1) // (SPLIT * BH)
    k = part * h_steps * BH + tl.arange(0, BH)
    products = tl.zeros((KP, BH), tl.float32)
    squares = tl.zeros((BH,), tl.float32)
    if FROM_LOGITS:
        for _ in range(h_steps):
            h = tl.load(state_ptr + k, k < H, 0.0).to(tl.float32)
            squares += h * h
            k += BH
    else:
        e = tl.load(head_row + k[None, :], inside[:, None] & (k < H)[None, :], 0.0)
        for _ in range(h_steps):
            h = tl.load(state_ptr + k, k < H, 0.0).to(tl.float32)
            weighted = h * tl.load(norm_ptr + k, k < H, 0.0).to(tl.float32)
            squares += h * h
            k += BH
            ahead = tl.load(head_row + k[None, :], inside[:, None] & (k < H)[None, :], 0.0)
            products += e.to(tl.float32) * weighted[None, :]
            e = ahead
    dots, square = tl.sum(products, 1), tl.sum(squares, 0)

    # this part of the message axis: z.G_d and z.(W^T h)
    numerator = tl.zeros((KP, KP), tl.float32)
    crosses = tl.zeros((KP, BK), tl.float32)
    written = tl.zeros((KP, BK), tl.float32)
    for _ in range(m_steps):
        receiver = tl.load(receiver_ptr + m, m < M, 0.0)[None, :]
        z = _gated_message(message, gate, scale, receiver, tl.load(bias_ptr + m, m < M, 0.0)[None, :])
        crosses += z * tl.load(write_projection_ptr + m, m < M, 0.0).to(tl.float32)[None, :]
        wide = g.to(tl.float32)
        if FROM_LOGITS:
            written += wide * tl.load(own_ptr + m, m < M, 0.0).to(tl.float32)[None, :]
        m += BK
        mask = inside[:, None] & (m < M)[None, :]
        message = tl.load(table_row + m[None, :], mask, 0)
        gate = tl.load(table_row + M + m[None, :], mask, 0)
        g = tl.load(message_row + m[None, :], mask, 0)
        # what tells candidates apart is not rounded
        near = wide.to(bias_ptr.dtype.element_ty)
        numerator = dot_of_halves(z, tl.trans(near), numerator, PRECISION)
        if near.dtype != tl.float32:
            rest = (wide - near.to(tl.float32)).to(near.dtype)
            numerator = tl.dot(z.to(near.dtype), tl.trans(rest), numerator, input_precision=PRECISION)
    cross = tl.sum(crosses, 1)
    if FROM_LOGITS:
        numerator -= tl.sum(written, 1)[None, :]
        length = tl.load(length_ptr + b * length_batch + s * length_slot).to(tl.float32)
        logits = tl.load(logits_ptr + slot * K + c, inside, 0.0)
        dots = tl.where(part == 0, 1.0, 0.0) * logits * tl.sqrt(length * length / H + eps)
    if BY_TOKEN:
        numerator *= tl.load(messages_scale_ptr + own, inside, 0.0)[None, :]

    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    last = SPLIT == 1
    if SPLIT > 1:
        size: tl.constexpr = (KP + 2) * KP + 1
        part_ptr = partial_ptr + slot * SPLIT * size
        mine = part_ptr + part * size
        at = c[:, None] * KP + c[None, :]
        tl.store(mine + at, numerator)
        tl.store(mine + KP * KP + c, dots)
        tl.store(mine + KP * KP + KP + c, cross)
        tl.store(mine + (KP + 2) * KP, square)
        tl.debug_barrier()
        last = tl.atomic_add(arrivals_ptr + slot, 1) == SPLIT - 1
    if last:
        if SPLIT > 1:
            # the last to arrive adds all parts, always in the same order, and leaves the counter as it was
            numerator = tl.zeros((KP, KP), tl.float32)
            dots = tl.zeros((KP,), tl.float32)
            cross = tl.zeros((KP,), tl.float32)
            square = 0.0
            for index in tl.static_range(SPLIT):
                theirs = part_ptr + index * size
                numerator += tl.load(theirs + at, cache_modifier=".cg")
                dots += tl.load(theirs + KP * KP + c, cache_modifier=".cg")
                cross += tl.load(theirs + KP * KP + KP + c, cache_modifier=".cg")
                square += tl.load(theirs + (KP + 2) * KP, cache_modifier=".cg")
            tl.store(arrivals_ptr + slot, 0)
        row_ptr = out_ptr + (slot * K + c).to(tl.int64) * K
        quadratic = tl.zeros((KP,), tl.float32)
        for index in tl.static_range(LENGTHS):
            quadratic += tl.load(row_ptr + index, inside, 0.0)
        tl.debug_barrier()
        rms = tl.sqrt(square / H)
        mean_square = tl.maximum(square + 2 * rms * cross + rms * rms * quadratic, 0.0) / H
        scores = (dots[None, :] + rms * numerator) / tl.sqrt(mean_square + eps)[:, None]
        tl.store(row_ptr[:, None] + c[None, :], scores, inside[:, None] & inside[None, :])


# measured on an H200 at H 4096, M 512, K 16; bounds are slots: 15 a request. `rows` are slots of a program, `columns`
# its rows of the factor, `depth` what is read at once of the message axis
LENGTH_TILES = (
    (16, Tile(1, 64, 256, stages=1)),
    (64, Tile(1, 256, 64, stages=3)),
    (128, Tile(2, 512, 32, warps=8, stages=3)),
    (256, Tile(4, 256, 64, warps=8, stages=3)),
    (1 << 30, Tile(4, 512, 32, warps=8, stages=3)),
)
# a slot a program; `columns` and `depth` count what is read at once of the hidden and of the message axis
SCORE_TILES = (
    (16, Tile(1, 256, 64, split=4, stages=1)),
    (64, Tile(1, 512, 64, split=2, stages=1)),
    (256, Tile(1, 128, 64, split=2, stages=1)),
    (1 << 30, Tile(1, 256, 64, stages=1)),
)


def _gathered_head_messages(candidates: torch.Tensor, tables: TransferTables) -> torch.Tensor:
    """Compute `G_d` of the candidates only, `[B * S * K, M]`, where there is no table of it."""
    write = tables.layers[tables.last].write
    rows, (width, size) = candidates.numel(), write.shape
    out = write.new_empty(rows, size, dtype=torch.float32)
    small = write.dtype == torch.float32
    tile = Tile(16, 32, 32, stages=2) if small else Tile(64, 128, 64)
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


def _scores_triton(state, candidates, anchor, projection, tables, backbone) -> torch.Tensor:
    batch, slots, width = state.shape
    count, size, dtype = candidates.shape[-1], tables.write_factor.shape[0], tables.write_factor.dtype
    # views are read as they come, so long as a row is in one piece
    state, receiver, write_projection = (x if x.stride(2) == 1 else x.contiguous() for x in (state, *projection))
    candidates = candidates.contiguous()
    from_logits = backbone is not None
    # a launch names all operands, also those it does not read
    logits, message, length = backbone if from_logits else (state, state, state[..., 0])
    if from_logits:
        logits, message = logits.contiguous(), message if message.stride(2) == 1 else message.contiguous()
    predecessors, bias = tables.predecessors, tables.layers[tables.last].bias
    out = state.new_empty(batch, slots, count, count, dtype=torch.float32)
    if tables.head_messages is not None:
        messages, messages_scale = tables.head_messages
    else:
        messages, messages_scale = _gathered_head_messages(candidates, tables), out
    # the tile of float32 counts rows, these count slots
    tile = pick_tile(LENGTH_TILES, batch * slots, dtype)
    tile = tile._replace(rows=1) if tile is FLOAT32_TILE else tile
    # parts of a length wait in a row of the scores, which holds as many as there are candidates
    columns = max(tile.columns, next_power_of_2(cdiv(size, count)))
    lengths = cdiv(size, columns)
    _length_kernel[(cdiv(batch * slots, tile.rows), lengths)](
        candidates,
        anchor,
        receiver,
        *predecessors,
        bias,
        tables.write_factor,
        out,
        batch * slots,
        *receiver.stride()[:2],
        S=slots,
        K=count,
        KP=max(16 // tile.rows, next_power_of_2(count)),
        M=size,
        BS=tile.rows,
        BN=columns,
        BK=tile.depth,
        PRECISION=dot_precision(state),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(state),
    )
    tile = pick_tile(SCORE_TILES, batch * slots, dtype)
    split = tile.split if batch * slots <= tables.arrivals.shape[0] else 1
    padded = max(16, next_power_of_2(count))
    _scores_kernel[(batch * slots, split)](
        state,
        candidates,
        anchor,
        receiver,
        write_projection,
        *predecessors,
        bias,
        tables.norm_weight,
        tables.head_weight,
        messages,
        messages_scale,
        logits,
        message,
        length,
        out,
        out if split == 1 else out.new_empty(batch * slots * split * ((padded + 2) * padded + 1)),
        tables.arrivals,
        *state.stride()[:2],
        *receiver.stride()[:2],
        *write_projection.stride()[:2],
        *message.stride()[:2],
        *length.stride(),
        tables.norm_eps,
        S=slots,
        K=count,
        KP=padded,
        H=width,
        M=size,
        BY_TOKEN=tables.head_messages is not None,
        FROM_LOGITS=from_logits,
        LENGTHS=lengths,
        BH=tile.columns,
        BK=tile.depth,
        SPLIT=split,
        PRECISION=dot_precision(state),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(state),
    )
    return out


def transition_scores(
    state: torch.Tensor,
    candidates: torch.Tensor,
    anchor: torch.Tensor,
    tables: TransferTables,
    projection: SlotProjection | None = None,
    backbone: BackboneLogits | None = None,
) -> torch.Tensor:
    """Score every candidate of every slot under every candidate predecessor; inference only.

    Args:
        state (`torch.Tensor` of shape `[B, S, H]`): Last-layer states of the proposal slots before the last injection.
        candidates (`torch.Tensor` of shape `[B, S, K]`, int64): Token ids of each slot's candidates.
        anchor (`torch.Tensor` of shape `[B]`, int64): Token ids of the anchors, the predecessors of slot 1.
        tables ([`TransferTables`]): Prepared weights.
        projection ([`SlotProjection`], *optional*): The slots of what the last layer's injection returned; computed
            when absent.
        backbone ([`BackboneLogits`], *optional*): Where the head's rows cannot be read; needs `tables.head_messages`.

    Returns:
        `torch.Tensor` of shape `[B, S, K, K]`, float32: `scores[b, s, c, d]`, logit of candidate `d` of slot `s` after
        candidate `c` of slot `s - 1`. The rows of the first slot are all equal: each is conditioned on the anchor.

    Raises:
        ValueError: When `candidates`, `anchor`, `projection` or `backbone` do not fit `state`, or tables lack a table.
    """
    if candidates.dim() != 3 or candidates.shape[:2] != state.shape[:2]:
        raise ValueError(
            f"`candidates` must have shape [B, S, K] with [B, S] = {list(state.shape[:2])}, "
            f"got {list(candidates.shape)}."
        )
    if anchor.shape != state.shape[:1]:
        raise ValueError(f"`anchor` must have shape [B] = {list(state.shape[:1])}, got {list(anchor.shape)}.")
    if projection is None:
        projection = slot_projection(state, tables)
    expected = (*state.shape[:2], tables.write_factor.shape[0])
    for name, tensor in zip(SlotProjection._fields, projection, strict=True):
        if tensor.shape != expected:
            raise ValueError(f"`{name}` must have shape [B, S, M] = {list(expected)}, got {list(tensor.shape)}.")
    if backbone is not None:
        if tables.head_messages is None:
            raise ValueError("`tables` must hold `head_messages` where the head's rows are not read, got none.")
        for name, shape in (("logits", candidates.shape), ("message", expected), ("length", state.shape[:2])):
            found = getattr(backbone, name).shape
            if found != shape:
                raise ValueError(f"`{name}` of the backbone must have shape {list(shape)}, got {list(found)}.")
    implementation = _scores_triton if use_triton(state) else _scores_torch
    return implementation(state, candidates, anchor, projection, tables, backbone)
