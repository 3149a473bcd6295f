"""Adjacent injection: each slot of a block learns what its left neighbour is about to become.

    f_j  = sqrt(R) * normalize(readout(h_j))                    predicted feature, normalised in float32
    p_1  = sqrt(R) * codes[anchor];  p_j = f_{j-1} for j >= 2   all slots read the state before the write
    g_j  = sigmoid(receiver_gate(f_j) + predecessor_gate(p_j) + bias)
    h_j += rms(h_j) * write(g_j * message(p_j))                 rms in float32; row 0 (the anchor) is never written

Three launches a layer. The norms are scalars of a row, so they are applied after the products they scale:

1. readout: `x = readout(h)` and `|h|^2`; the last layer reads `W^T h` in the same product, for the transition
2. gate: `receiver_gate(x_j)`, `predecessor_gate(x_{j-1})`, `message(x_{j-1})` and `|x|` in one pass over `x`; the
   anchor's two come from its row of the `[V, 2M]` table
3. write: `h + rms(h) * write(z)`, the anchor's row copied

Never in memory: features, gates. The reference computes its matrix products in the dtype of its operands and every
norm in float32; called with float32 operands it is the definition, and what training differentiates. Source of the
method: arXiv 2609.36173; weight names follow the public trainer's checkpoints.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional as F

from .transfer_tables import InjectionWeights, TransferTables
from .triton_support import Tile, cdiv, dot_precision, jit, overlap, pick_tile, tl, use_triton


class SlotProjection(NamedTuple):
    """What the last layer's injection already knows of its slots, for the transition.

    Args:
        receiver (`torch.Tensor` of shape `[B, S, M]`): Receiver gate before bias and sigmoid.
        update (`torch.Tensor` of shape `[B, S, M]`): `W^T h` of the state before the write.
    """

    receiver: torch.Tensor
    update: torch.Tensor


class InjectedBlock(NamedTuple):
    """Block states after the write, and their projection when the layer was the last.

    Args:
        hidden (`torch.Tensor` of shape `[B, N, H]`): States after the write.
        projection ([`SlotProjection`], *optional*): Of the last layer.
    """

    hidden: torch.Tensor
    projection: SlotProjection | None


def predicted_feature(hidden: torch.Tensor, readout: torch.Tensor) -> torch.Tensor:
    """Read the transfer-space feature a state predicts.

    Args:
        hidden (`torch.Tensor` of shape `[..., H]`): Hidden states.
        readout (`torch.Tensor` of shape `[R, H]`): Readout of this layer.

    Returns:
        `torch.Tensor` of shape `[..., R]`: Features of length `sqrt(R)`, in the dtype of `hidden`.
    """
    projected = F.linear(hidden, readout).float()
    return (math.sqrt(readout.shape[0]) * F.normalize(projected, dim=-1)).to(hidden.dtype)


def _write_message(hidden: torch.Tensor, message: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
    rms = torch.linalg.vector_norm(hidden.float(), dim=-1, keepdim=True) / math.sqrt(hidden.shape[-1])
    return hidden + rms.to(hidden.dtype) * F.linear(message, write)


def inject_message(
    hidden: torch.Tensor, receiver: torch.Tensor, predecessor: torch.Tensor, weights: InjectionWeights
) -> torch.Tensor:
    """Write a gated message of the predecessor into a state.

    Args:
        hidden (`torch.Tensor` of shape `[..., H]`): States to write to.
        receiver (`torch.Tensor` of shape `[..., R]`): Features of those states.
        predecessor (`torch.Tensor` of shape `[..., R]`): Features of their left neighbours, length `sqrt(R)`.
        weights ([`InjectionWeights`]): Of this layer.

    Returns:
        `torch.Tensor` of shape `[..., H]`: `hidden + rms(hidden) * write(gate * message)`.
    """
    gate = F.linear(receiver, weights.receiver_gate) + F.linear(predecessor, weights.predecessor_gate) + weights.bias
    return _write_message(hidden, torch.sigmoid(gate) * F.linear(predecessor, weights.message), weights.write)


def adjacent_injection_reference(
    hidden: torch.Tensor, anchor_code: torch.Tensor, weights: InjectionWeights
) -> torch.Tensor:
    """Define adjacent injection from the weights alone; differentiable.

    Args:
        hidden (`torch.Tensor` of shape `[B, N, H]`): Block states after a layer; row 0 is the anchor.
        anchor_code (`torch.Tensor` of shape `[B, R]`): Unit code of the anchor token.
        weights ([`InjectionWeights`]): Of this layer.

    Returns:
        `torch.Tensor` of shape `[B, N, H]`: The states after the write; row 0 is returned untouched.
    """
    feature = predicted_feature(hidden, weights.readout)
    anchor_feature = math.sqrt(weights.readout.shape[0]) * anchor_code.to(hidden.dtype)
    predecessor = torch.cat((anchor_feature[:, None], feature[:, 1:-1]), dim=1)
    return torch.cat((hidden[:, :1], inject_message(hidden[:, 1:], feature[:, 1:], predecessor, weights)), dim=1)


def _inject_torch(hidden: torch.Tensor, anchor: torch.Tensor, layer: int, tables: TransferTables) -> InjectedBlock:
    weights, state = tables.layers[layer], hidden[:, 1:]
    feature = predicted_feature(state, weights.readout)
    receiver = F.linear(feature, weights.receiver_gate)
    message, gate = F.embedding(anchor, tables.predecessors)[:, None].chunk(2, dim=-1)
    message = torch.cat((message, F.linear(feature[:, :-1], weights.message)), dim=1)
    gate = torch.cat((gate, F.linear(feature[:, :-1], weights.predecessor_gate)), dim=1)
    written = _write_message(state, torch.sigmoid(receiver + gate + weights.bias) * message, weights.write)
    projection = SlotProjection(receiver, torch.matmul(state, weights.write)) if layer == tables.last else None
    return InjectedBlock(torch.cat((hidden[:, :1], written), dim=1), projection)


@jit
def _readout_kernel(
    hidden_ptr,  # [B, N, H]
    weight_ptr,  # [C, H]
    out_ptr,  # [B * S, C]
    square_ptr,  # [SPLIT, B * S], float32
    partial_ptr,  # [SPLIT, B * S, C], float32
    ticket_ptr,  # [tiles], int32
    rows,
    S: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    columns: tl.constexpr = tl.cdiv(C, BN)
    tile, split = tl.program_id(0), tl.program_id(2)
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    # row 0 of every block is the anchor
    x_ptr = hidden_ptr + ((r // S) * (S + 1) + r % S + 1).to(tl.int64)[:, None] * H
    steps: tl.constexpr = tl.cdiv(tl.cdiv(H, SPLIT), BK)
    start = split * steps * BK
    if tile == columns:
        square = tl.zeros((BM,), tl.float32)
        for step in range(steps):
            k = start + step * BK + tl.arange(0, BK)
            x = tl.load(x_ptr + k[None, :], (r < rows)[:, None] & (k < H)[None, :], 0.0).to(tl.float32)
            square += tl.sum(x * x, 1)
        tl.store(square_ptr + split * rows + r, square, r < rows)
    else:
        n = tile * BN + tl.arange(0, BN)
        w_ptr = weight_ptr + n.to(tl.int64)[None, :] * H
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(steps):
            k = start + step * BK + tl.arange(0, BK)
            x = tl.load(x_ptr + k[None, :], (r < rows)[:, None] & (k < H)[None, :], 0.0)
            w = tl.load(w_ptr + k[:, None], (n < C)[None, :] & (k < H)[:, None], 0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
        at = r[:, None] * C + n[None, :]
        inside = (r < rows)[:, None] & (n < C)[None, :]
        if SPLIT == 1:
            tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), inside)
        else:
            tl.store(partial_ptr + split * rows * C + at, acc, inside)
            tl.debug_barrier()
            ticket_ptr += tl.program_id(1) * columns + tile
            if tl.atomic_add(ticket_ptr, 1) == SPLIT - 1:
                # the last to arrive adds all parts, always in the same order, and leaves the ticket as it was
                total = tl.zeros((BM, BN), tl.float32)
                for part in range(SPLIT):
                    total += tl.load(partial_ptr + part * rows * C + at, inside, 0.0, cache_modifier=".cg")
                tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), inside)
                tl.store(ticket_ptr, 0)


@jit
def _gate_kernel(
    x_ptr,  # [B * S, C], its first R columns
    anchor_ptr,  # [B], int64
    table_ptr,  # [V, 2M]
    message_ptr,  # [M, R]
    receiver_ptr,  # [M, R]
    predecessor_ptr,  # [M, R]
    bias_ptr,  # [M]
    z_ptr,  # [B * S, M]
    gate_ptr,  # [B * S, M]
    rows,
    scale,
    S: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    KEEP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    m = tl.program_id(0) * BN + tl.arange(0, BN)
    follows = (r % S > 0) & (r < rows)
    f_square = tl.zeros((BM,), tl.float32)
    p_square = tl.zeros((BM,), tl.float32)
    receiver = tl.zeros((BM, BN), tl.float32)
    gate = tl.zeros((BM, BN), tl.float32)
    message = tl.zeros((BM, BN), tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for step in range(tl.cdiv(R, BK)):
        k = step * BK + tl.arange(0, BK)
        f = tl.load(x_ptr + r[:, None] * C + k[None, :], (r < rows)[:, None] & (k < R)[None, :], 0.0)
        p = tl.load(x_ptr + (r - 1)[:, None] * C + k[None, :], follows[:, None] & (k < R)[None, :], 0.0)
        at, inside = m[None, :] * R + k[:, None], (m < M)[None, :] & (k < R)[:, None]
        receiver = tl.dot(f, tl.load(receiver_ptr + at, inside, 0.0), receiver, input_precision=PRECISION)
        gate = tl.dot(p, tl.load(predecessor_ptr + at, inside, 0.0), gate, input_precision=PRECISION)
        message = tl.dot(p, tl.load(message_ptr + at, inside, 0.0), message, input_precision=PRECISION)
        f_square += tl.sum(f.to(tl.float32) * f.to(tl.float32), 1)
        p_square += tl.sum(p.to(tl.float32) * p.to(tl.float32), 1)
    receiver *= (scale / tl.maximum(tl.sqrt(f_square), 1e-12))[:, None]
    p_scale = (scale / tl.maximum(tl.sqrt(p_square), 1e-12))[:, None]
    inside = (r < rows)[:, None] & (m < M)[None, :]
    anchor = tl.load(anchor_ptr + r // S, r < rows, 0)
    first = ((r % S == 0) & (r < rows))[:, None] & (m < M)[None, :]
    row_ptr = table_ptr + anchor[:, None] * (2 * M) + m[None, :]
    message = message * p_scale + tl.load(row_ptr, first, 0.0).to(tl.float32)
    gate = gate * p_scale + tl.load(row_ptr + M, first, 0.0).to(tl.float32)
    bias = tl.load(bias_ptr + m, m < M, 0.0).to(tl.float32)
    z = message * tl.sigmoid(receiver + gate + bias[None, :])
    at = r[:, None] * M + m[None, :]
    tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty), inside)
    if KEEP:
        tl.store(gate_ptr + at, receiver.to(gate_ptr.dtype.element_ty), inside)


@jit
def _write_kernel(
    hidden_ptr,  # [B, N, H]
    z_ptr,  # [B * S, M]
    square_ptr,  # [SPLIT, B * S], float32
    weight_ptr,  # [H, M]
    out_ptr,  # [B, N, H]
    count,
    N: tl.constexpr,
    H: tl.constexpr,
    M: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    q = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = count // N * (N - 1)
    slot = (q // N) * (N - 1) + q % N - 1
    written = (q % N > 0) & (q < count)
    at = q.to(tl.int64)[:, None] * H + n[None, :]
    inside = (q < count)[:, None] & (n < H)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    if BK >= M:
        # what does not depend on the kernel in front is on its way before that one ends
        k = tl.arange(0, BK)
        w = tl.load(weight_ptr + n[None, :] * M + k[:, None], (n < H)[None, :] & (k < M)[:, None], 0.0)
        h = tl.load(hidden_ptr + at, inside, 0.0).to(tl.float32)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        z = tl.load(z_ptr + slot[:, None] * M + k[None, :], written[:, None] & (k < M)[None, :], 0.0)
        acc = tl.dot(z, w, acc, input_precision=PRECISION)
    else:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        for step in range(tl.cdiv(M, BK)):
            k = step * BK + tl.arange(0, BK)
            z = tl.load(z_ptr + slot[:, None] * M + k[None, :], written[:, None] & (k < M)[None, :], 0.0)
            w = tl.load(weight_ptr + n[None, :] * M + k[:, None], (n < H)[None, :] & (k < M)[:, None], 0.0)
            acc = tl.dot(z, w, acc, input_precision=PRECISION)
        h = tl.load(hidden_ptr + at, inside, 0.0).to(tl.float32)
    square = tl.zeros((BM,), tl.float32)
    for part in range(SPLIT):
        square += tl.load(square_ptr + part * rows + slot, written, 0.0)
    h += tl.sqrt(square / H)[:, None] * acc
    tl.store(out_ptr + at, h.to(out_ptr.dtype.element_ty), inside)


# measured on an H200 at H 4096, R 1024, M 512; bounds are rows: 16 a request
READOUT_TILES = (
    (16, Tile(16, 64, 128, split=8)),
    (64, Tile(64, 64, 64, split=8)),
    (256, Tile(64, 64, 64, split=2)),
    (1 << 30, Tile(128, 64, 64)),
)
GATE_TILES = (
    (16, Tile(16, 16, 256, stages=3)),
    (64, Tile(16, 16, 256, stages=3)),
    (256, Tile(32, 32, 128)),
    (1 << 30, Tile(64, 64, 64)),
)
WRITE_TILES = (
    (16, Tile(16, 32, 512)),
    (64, Tile(64, 32, 512)),
    (256, Tile(64, 128, 64)),
    (1 << 30, Tile(128, 128, 64, warps=8)),
)


def _readout(hidden: torch.Tensor, weight: torch.Tensor, tickets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch 1: `[B, N, H]` and `[C, H]` to products `[B * S, C]` and squared lengths `[SPLIT, B * S]`."""
    batch, block, width = hidden.shape
    rows, columns = batch * (block - 1), weight.shape[0]
    tile = pick_tile(READOUT_TILES, rows, hidden.dtype)
    tiles = (cdiv(columns, tile.columns), cdiv(rows, tile.rows))
    split = tile.split if tiles[0] * tiles[1] <= tickets.shape[0] else 1
    out = hidden.new_empty(rows, columns)
    square = hidden.new_empty(split, rows, dtype=torch.float32)
    partial = hidden.new_empty(split, rows, columns, dtype=torch.float32) if split > 1 else square
    _readout_kernel[(tiles[0] + 1, tiles[1], split)](
        hidden,
        weight,
        out,
        square,
        partial,
        tickets,
        rows,
        S=block - 1,
        H=width,
        C=columns,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        SPLIT=split,
        PRECISION=dot_precision(hidden),
        OVERLAP=overlap(hidden)["OVERLAP"],
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out, square


def _gate(
    products: torch.Tensor,
    anchor: torch.Tensor,
    weights: InjectionWeights,
    table: torch.Tensor,
    slots: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch 2: products `[B * S, C]` to gated messages and, if kept, receiver gates, both `[B * S, M]`."""
    rows, (size, rank) = products.shape[0], weights.message.shape
    tile = pick_tile(GATE_TILES, rows, products.dtype)
    z = products.new_empty(rows, size)
    gate = products.new_empty(rows, size) if keep else z
    _gate_kernel[(cdiv(size, tile.columns), cdiv(rows, tile.rows))](
        products,
        anchor,
        table,
        weights.message,
        weights.receiver_gate,
        weights.predecessor_gate,
        weights.bias,
        z,
        gate,
        rows,
        math.sqrt(rank),
        S=slots,
        C=products.shape[1],
        R=rank,
        M=size,
        KEEP=keep,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        PRECISION=dot_precision(products),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(products),
    )
    return z, gate


def _write(hidden: torch.Tensor, z: torch.Tensor, square: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Launch 3: states `[B, N, H]` and messages `[B * S, M]` to written states."""
    batch, block, width = hidden.shape
    tile = pick_tile(WRITE_TILES, z.shape[0], hidden.dtype)
    out = torch.empty_like(hidden)
    _write_kernel[(cdiv(width, tile.columns), cdiv(batch * block, tile.rows))](
        hidden,
        z,
        square,
        weight,
        out,
        batch * block,
        N=block,
        H=width,
        M=z.shape[1],
        SPLIT=square.shape[0],
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        PRECISION=dot_precision(hidden),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(hidden),
    )
    return out


def _inject_triton(hidden: torch.Tensor, anchor: torch.Tensor, layer: int, tables: TransferTables) -> InjectedBlock:
    hidden, weights, last = hidden.contiguous(), tables.layers[layer], layer == tables.last
    batch, block, _ = hidden.shape
    products, square = _readout(hidden, tables.projection if last else weights.readout, tables.tickets)
    z, gate = _gate(products, anchor, weights, tables.predecessors, block - 1, keep=last)
    written = _write(hidden, z, square, weights.write)
    if not last:
        return InjectedBlock(written, None)
    update = products[:, weights.readout.shape[0] :].unflatten(0, (batch, block - 1))
    return InjectedBlock(written, SlotProjection(gate.unflatten(0, (batch, block - 1)), update))


def adjacent_injection(
    hidden: torch.Tensor, anchor: torch.Tensor, layer: int, tables: TransferTables
) -> InjectedBlock:
    """Inject each slot's left neighbour into it, in parallel over the block; inference only.

    Args:
        hidden (`torch.Tensor` of shape `[B, N, H]`): Block states after a layer; row 0 is the anchor.
        anchor (`torch.Tensor` of shape `[B]`, int64): Token ids of the anchors.
        layer (`int`): Drafter layer, 0-based.
        tables ([`TransferTables`]): Prepared weights.

    Returns:
        [`InjectedBlock`]: The states after the write, row 0 untouched, and the projection if the layer is the last.

    Raises:
        ValueError: When `hidden` is no `[B, N, H]` tensor of at least two rows or `anchor` does not fit it.
    """
    if hidden.dim() != 3 or hidden.shape[1] < 2:
        raise ValueError(f"`hidden` must have shape [B, N, H] with N >= 2, got {list(hidden.shape)}.")
    if anchor.shape != hidden.shape[:1]:
        raise ValueError(f"`anchor` must have shape [B] = {list(hidden.shape[:1])}, got {list(anchor.shape)}.")
    if use_triton(hidden):
        return _inject_triton(hidden, anchor, layer, tables)
    return _inject_torch(hidden, anchor, layer, tables)
