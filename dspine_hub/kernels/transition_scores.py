"""Transition scores: for every slot, each candidate given each candidate of the slot before it.

The last write of the last layer is redone with a concrete predecessor token in place of the predicted feature, and the
refined state meets the LM-head rows of the slot's candidates:

    r = norm(h + rms(h) * write(sigmoid(receiver_gate(f) + predecessor_gate(p_c) + bias) * message(p_c)))
    scores[s, c, d] = <r, lm_head[d]>,   p_c = sqrt(R) * codes[c],   f = predicted feature of h

The reference says it in *hidden space*: `r` for every pair of slot and predecessor, `[B, S, K, H]` values. The rest of
this file says the same in *message space*, around `z = gate * message(p_c)`, `M` values a row:

    <r, e_d> = (<h, w*e_d> + s z.G_d) / sqrt((|h|^2 + 2 s z.(W^T h) + s^2 z^T (W^T W) z) / H + eps)

with `s = rms(h)`, `W` the write, `w` the norm's weight, `G_d = W^T (w*e_d)`. What depends on a token alone comes from
the tables of `transfer_tables`, what the last injection has already computed from its projection. One launch; nothing
larger than the scores is written to memory.

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
    cross = torch.matmul(z, projection.update.float()[..., None]).squeeze(-1)  # z.(W^T h), [B, S, K]
    quadratic = torch.matmul(z, tables.root.float().T).pow(2).sum(-1)  # z^T (W^T W) z, [B, S, K]
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
def _store_scores(
    out_ptr, numerator, dots, square, cross, quadratic, slot, c, inside, eps, H: tl.constexpr, K: tl.constexpr
):
    s = tl.sqrt(square / H)
    mean_square = tl.maximum(square + 2 * s * cross + s * s * quadratic, 0.0) / H
    scores = (dots[None, :] + s[:, None] * numerator) / tl.sqrt(mean_square + eps)[:, None]
    # rows and columns hold several slots; a predecessor scores the candidates of its own slot only
    inside = inside[:, None] & inside[None, :] & (slot[:, None] == slot[None, :])
    tl.store(out_ptr + (slot * K + c).to(tl.int64)[:, None] * K + c[None, :], scores, inside)


@jit
def _scores_kernel(
    state_ptr,  # [B, S, H]
    candidates_ptr,  # [B, S, K], int64
    anchor_ptr,  # [B], int64
    receiver_ptr,  # [B, S, M]
    update_ptr,  # [B, S, M]
    table_ptr,  # [V, 2M]
    table_scale_ptr,  # [V]
    bias_ptr,  # [M]
    root_ptr,  # [M, M]
    norm_ptr,  # [H]
    head_ptr,  # [V, H]
    messages_ptr,  # [V, M], or [B * S * K, M] in the order of the candidates
    messages_scale_ptr,  # [V], or not read
    logits_ptr,  # [B, S, K], float32
    own_ptr,  # [B, S, M]
    length_ptr,  # [B, S]
    out_ptr,  # [B, S, K, K], float32
    partial_ptr,  # [tiles, SPLIT, 3, RP], float32
    ticket_ptr,  # [tiles], int32
    slots,
    state_batch,
    state_slot,
    receiver_batch,
    receiver_slot,
    update_batch,
    update_slot,
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
    BS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BH: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    RP: tl.constexpr = BS * KP
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, RP)
    slot, c = tile * BS + row // KP, row % KP
    inside = (slot < slots) & (c < K)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    own = tl.load(candidates_ptr + slot * K + c, inside, 0)
    before = tl.load(candidates_ptr + (slot - 1) * K + c, inside & (slot % S > 0), 0)
    token = tl.where(slot % S > 0, before, tl.load(anchor_ptr + slot // S, inside, 0))
    b, s = (slot // S).to(tl.int64), slot % S

    source = own if BY_TOKEN else (slot * K + c).to(tl.int64)
    table_row = table_ptr + token[:, None] * (2 * M)
    message_row = messages_ptr + source[:, None] * M
    receiver_row = receiver_ptr + (b * receiver_batch + s * receiver_slot)[:, None]
    update_row = update_ptr + (b * update_batch + s * update_slot)[:, None]
    own_row = own_ptr + (b * own_batch + s * own_slot)[:, None]
    # rows of the tables lie anywhere in memory: each is asked for one step before it is used
    m = tl.arange(0, BK)
    mask = inside[:, None] & (m < M)[None, :]
    message = tl.load(table_row + m[None, :], mask, 0)
    gate = tl.load(table_row + M + m[None, :], mask, 0)
    table_scale = tl.load(table_scale_ptr + token, inside, 0.0)[:, None]

    # this part of the hidden axis: <h, w*e_d> and |h|^2
    state_row = (state_ptr + b * state_batch + s * state_slot)[:, None]
    head_row = head_ptr + own[:, None] * H
    dots = tl.zeros((RP, BH), tl.float32)
    square = tl.zeros((RP, BH), tl.float32)
    h_steps: tl.constexpr = (H + SPLIT * BH - 1) // (SPLIT * BH)
    k = split * h_steps * BH + tl.arange(0, BH)
    if FROM_LOGITS:
        for _ in range(h_steps):
            h = tl.load(state_row + k[None, :], inside[:, None] & (k < H)[None, :], 0.0).to(tl.float32)
            k += BH
            square += h * h
    else:
        e = tl.load(head_row + k[None, :], inside[:, None] & (k < H)[None, :], 0.0)
        for _ in range(h_steps):
            weighted = e.to(tl.float32) * tl.load(norm_ptr + k, k < H, 0.0).to(tl.float32)[None, :]
            h = tl.load(state_row + k[None, :], inside[:, None] & (k < H)[None, :], 0.0).to(tl.float32)
            k += BH
            e = tl.load(head_row + k[None, :], inside[:, None] & (k < H)[None, :], 0.0)
            dots += h * weighted
            square += h * h
    dots, square = tl.sum(dots, 1), tl.sum(square, 1)

    # the message axis: z, its product with the candidates' G_d, z.(W^T h), and this part of |W z|^2 = |root z|^2
    n = split * BN + tl.arange(0, BN)
    image = tl.zeros((RP, BN), tl.float32)
    numerator = tl.zeros((RP, RP), tl.float32)
    cross = tl.zeros((RP, BK), tl.float32)
    written = tl.zeros((RP, BK), tl.float32)
    for _ in range((M + BK - 1) // BK):
        mask = inside[:, None] & (m < M)[None, :]
        g = tl.load(message_row + m[None, :], mask, 0).to(tl.float32)
        root = tl.load(root_ptr + n[None, :] * M + m[:, None], (m < M)[:, None] & (n < M)[None, :], 0.0)
        wide = gate.to(tl.float32) * table_scale + tl.load(receiver_row + m[None, :], mask, 0.0).to(tl.float32)
        wide += tl.load(bias_ptr + m, m < M, 0.0).to(tl.float32)[None, :]
        z = message.to(tl.float32) * table_scale * tl.sigmoid(wide)
        cross += z * tl.load(update_row + m[None, :], mask, 0.0).to(tl.float32)
        if FROM_LOGITS:
            written += g * tl.load(own_row + m[None, :], mask, 0.0).to(tl.float32)
        m += BK
        mask = inside[:, None] & (m < M)[None, :]
        message = tl.load(table_row + m[None, :], mask, 0)
        gate = tl.load(table_row + M + m[None, :], mask, 0)
        # the length is the same for all candidates of a row and may be rounded; what tells them apart may not
        high, near = z.to(root.dtype), g.to(root.dtype)
        numerator = dot_of_halves(z, tl.trans(near), numerator, PRECISION)
        if g.dtype != root.dtype:
            rest = (g - near.to(tl.float32)).to(root.dtype)
            numerator = tl.dot(high, tl.trans(rest), numerator, input_precision=PRECISION)
        image = tl.dot(high, root, image, input_precision=PRECISION)
    cross, quadratic = tl.sum(cross, 1), tl.sum(image * image, 1)
    if FROM_LOGITS:
        # every part knows all of the message axis, so one of them takes the logits and all take z_0.G_d off
        numerator -= tl.sum(written, 1)[None, :]
        length = tl.load(length_ptr + b * length_batch + s * length_slot, inside, 0.0).to(tl.float32)
        logits = tl.load(logits_ptr + slot * K + c, inside, 0.0)
        dots = tl.where(split == 0, 1.0, 0.0) * logits * tl.sqrt(length * length / H + eps)
    if BY_TOKEN:
        numerator *= tl.load(messages_scale_ptr + own, inside, 0.0)[None, :]

    if SPLIT == 1:
        _store_scores(out_ptr, numerator, dots, square, cross, quadratic, slot, c, inside, eps, H, K)
    else:
        part_ptr = partial_ptr + tile * SPLIT * 3 * RP + row
        tl.store(part_ptr + (3 * split) * RP, dots)
        tl.store(part_ptr + (3 * split + 1) * RP, square)
        tl.store(part_ptr + (3 * split + 2) * RP, quadratic)
        tl.debug_barrier()
        if tl.atomic_add(ticket_ptr + tile, 1) == SPLIT - 1:
            # the last to arrive adds all parts, always in the same order, and leaves the ticket as it was
            dots = tl.zeros((RP,), tl.float32)
            square = tl.zeros((RP,), tl.float32)
            quadratic = tl.zeros((RP,), tl.float32)
            for part in tl.static_range(SPLIT):
                dots += tl.load(part_ptr + (3 * part) * RP, cache_modifier=".cg")
                square += tl.load(part_ptr + (3 * part + 1) * RP, cache_modifier=".cg")
                quadratic += tl.load(part_ptr + (3 * part + 2) * RP, cache_modifier=".cg")
            _store_scores(out_ptr, numerator, dots, square, cross, quadratic, slot, c, inside, eps, H, K)
            tl.store(ticket_ptr + tile, 0)


# measured on an H200 at H 4096, M 512, K 16; bounds are slots: 15 a request. `rows` counts slots of a program,
# `columns` and `depth` what is read at once of the hidden and of the message axis
SCORE_TILES = (
    (16, Tile(1, 256, 64, split=8, stages=2)),
    (64, Tile(1, 512, 64, split=2, warps=8, stages=3)),
    (128, Tile(1, 256, 128, warps=8, stages=2)),
    (256, Tile(4, 128, 64, split=2, warps=8, stages=3)),
    (1 << 30, Tile(4, 128, 64, warps=8, stages=2)),
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
    count, size, dtype = candidates.shape[-1], tables.root.shape[0], tables.root.dtype
    # views are read as they come, so long as a row is in one piece
    state, receiver, update = (x if x.stride(2) == 1 else x.contiguous() for x in (state, *projection))
    candidates = candidates.contiguous()
    from_logits = backbone is not None
    # a launch names all operands, also those it does not read
    logits, message, length = backbone if from_logits else (state, state, state[..., 0])
    if from_logits:
        logits, message = logits.contiguous(), message if message.stride(2) == 1 else message.contiguous()
    tile = pick_tile(SCORE_TILES, batch * slots, dtype)
    # the tile of float32 counts rows, these count slots
    tile = tile._replace(rows=1) if tile is FLOAT32_TILE else tile
    tiles, padded = cdiv(batch * slots, tile.rows), max(16 // tile.rows, next_power_of_2(count))
    split = tile.split if tiles <= tables.tickets.shape[0] else 1
    out = state.new_empty(batch, slots, count, count, dtype=torch.float32)
    by_token = tables.head_messages is not None
    if by_token:
        messages, messages_scale = tables.head_messages
    else:
        messages, messages_scale = _gathered_head_messages(candidates, tables), out
    _scores_kernel[(tiles, split)](
        state,
        candidates,
        anchor,
        receiver,
        update,
        *tables.predecessors,
        tables.layers[tables.last].bias,
        tables.root,
        tables.norm_weight,
        tables.head_weight,
        messages,
        messages_scale,
        logits,
        message,
        length,
        out,
        out if split == 1 else out.new_empty(tiles * split * 3 * tile.rows * padded),
        tables.tickets,
        batch * slots,
        *state.stride()[:2],
        *receiver.stride()[:2],
        *update.stride()[:2],
        *message.stride()[:2],
        *length.stride(),
        tables.norm_eps,
        S=slots,
        K=count,
        KP=padded,
        H=width,
        M=size,
        BY_TOKEN=by_token,
        FROM_LOGITS=from_logits,
        BS=tile.rows,
        BN=max(16, next_power_of_2(cdiv(size, split))),
        BK=tile.depth,
        BH=tile.columns,
        SPLIT=split,
        PRECISION=dot_precision(tables.root),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(state, batch * slots),
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
    expected = (*state.shape[:2], tables.root.shape[0])
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
