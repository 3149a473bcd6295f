"""The Triton kernels of adjacent injection and what launches them.

Three launches a layer. The norms are scalars of a row, so they are applied after the products they scale:

1. [`readout`]: `x = readout(h)`; the last layer reads `W^T h` in the same product, for the transition
2. [`gate`]: `receiver_gate(x)`, `predecessor_gate(x)`, `message(x)` and `|x|` in one pass over `x`, the latter three
   then taken from the row before; `|h|` beside it; the anchor's two come from its row of the `[V, 2M]` table
3. [`write`]: `h + rms(h) * write(z)`

With few rows there is not enough work for a device, so sums are split and the last part to arrive adds them. On Hopper
a launch starts while the one in front ends: it may read weights before that, and writes nothing before. With many rows
the vendor's plain products are faster: the first launch is one, and [`gate_of_many`] is another and what follows it.

Features are never in memory.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from .transfer_tables import TransferTables
from .triton_support import Tile, cdiv, dot_of_halves, dot_precision, jit, next_power_of_2, overlap, pick_tile, tl

WIDE_PRODUCTS = "dtype" in torch.ops.aten.mm.overloads()


@jit
def _readout_kernel(
    hidden_ptr,  # [rows, H]
    weight_ptr,  # [C, H]
    out_ptr,  # [rows, C]
    partial_ptr,  # [SPLIT, rows, C], float32
    arrivals_ptr,  # [tiles], int32
    rows,
    H: tl.constexpr,
    C: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    steps: tl.constexpr = (H + SPLIT * BK - 1) // (SPLIT * BK)
    even: tl.constexpr = H % (SPLIT * BK) == 0
    split = tl.program_id(2)
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = split * steps * BK + tl.arange(0, BK)
    x_ptr = hidden_ptr + r.to(tl.int64)[:, None] * H + k[None, :]
    w_ptr = weight_ptr + n.to(tl.int64)[None, :] * H + k[:, None]
    x_inside, w_inside = (r < rows)[:, None], (n < C)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    if OVERLAP:
        # waits first: the launches behind this one then find the states complete
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for step in range(steps):
        if even:
            x = tl.load(x_ptr + step * BK, x_inside, 0.0)
            w = tl.load(w_ptr + step * BK, w_inside, 0.0)
        else:
            left = H - step * BK
            x = tl.load(x_ptr + step * BK, x_inside & (k < left)[None, :], 0.0)
            w = tl.load(w_ptr + step * BK, w_inside & (k < left)[:, None], 0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    at = r[:, None] * C + n[None, :]
    inside = x_inside & w_inside
    if SPLIT == 1:
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), inside)
    else:
        tl.store(partial_ptr + split * rows * C + at, acc, inside)
        tl.debug_barrier()
        arrivals_ptr += tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrivals_ptr, 1) == SPLIT - 1:
            # the last to arrive adds all parts, always in the same order, and leaves the counter as it was
            total = tl.zeros((BM, BN), tl.float32)
            for part in tl.static_range(SPLIT):
                total += tl.load(partial_ptr + part * rows * C + at, inside, 0.0, cache_modifier=".cg")
            tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), inside)
            tl.store(arrivals_ptr, 0)


@jit
def _store_messages(
    anchor_ptr,
    table_ptr,
    table_scale_ptr,
    bias_ptr,
    z_ptr,
    gate_ptr,
    receiver,
    gate,
    message,
    f_square,
    p_square,
    r,
    m,
    own,
    scale,
    N: tl.constexpr,
    M: tl.constexpr,
    KEEP: tl.constexpr,
):
    receiver *= (scale / tl.maximum(tl.sqrt(f_square), 1e-12))[:, None]
    p_scale = (scale / tl.maximum(tl.sqrt(p_square), 1e-12))[:, None]
    inside = own[:, None] & (m < M)[None, :]
    # slot 1 follows the anchor, whose message and gate are a row of the table; the anchor itself receives nothing
    first = inside & (r % N == 1)[:, None]
    anchor = tl.load(anchor_ptr + r // N, own, 0)
    row_ptr = table_ptr + anchor[:, None] * (2 * M) + m[None, :]
    table_scale = tl.load(table_scale_ptr + anchor, own, 0.0)[:, None]
    message = message * p_scale + tl.load(row_ptr, first, 0).to(tl.float32) * table_scale
    gate = gate * p_scale + tl.load(row_ptr + M, first, 0).to(tl.float32) * table_scale
    gate += receiver + tl.load(bias_ptr + m, m < M, 0.0).to(tl.float32)[None, :]
    at = r[:, None] * M + m[None, :]
    # the row before an anchor is another block's
    z = tl.where((r % N > 0)[:, None], message * tl.sigmoid(gate), 0.0)
    tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty), inside)
    if KEEP:
        tl.store(gate_ptr + at, receiver, inside)


@jit
def _gate_kernel(
    hidden_ptr,  # [rows, H]
    x_ptr,  # [rows, C], its first R columns; float32 with KEEP
    anchor_ptr,  # [B], int64
    table_ptr,  # [V, 2M]
    table_scale_ptr,  # [V]
    weight_ptr,  # [3M, R]: receiver gate, predecessor gate, message
    bias_ptr,  # [M]
    z_ptr,  # [rows, M]
    gate_ptr,  # [rows, M], float32
    square_ptr,  # [SQUARES * SPLIT, rows], float32
    partial_ptr,  # [tiles, SPLIT, 3 * BN + 1, BM], float32
    arrivals_ptr,  # [tiles], int32
    rows,
    scale,
    N: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    KEEP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    SQUARES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    columns: tl.constexpr = (M + BN - 1) // BN
    steps: tl.constexpr = (R + SPLIT * BK - 1) // (SPLIT * BK)
    even: tl.constexpr = R % (SPLIT * BK) == 0
    # a tile holds whole blocks, so that a row's predecessor is in it
    OWN: tl.constexpr = BM // N * N
    split = tl.program_id(2)
    row = tl.arange(0, BM)
    r = tl.program_id(1) * OWN + row
    own = (row < OWN) & (r < rows)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(0) >= columns:
        # |h|^2, beside the gates: the write needs it
        part = (tl.program_id(0) - columns) * SPLIT + split
        parts: tl.constexpr = SQUARES * SPLIT
        WIDE: tl.constexpr = 8192 // BM
        h_steps: tl.constexpr = (H + parts * WIDE - 1) // (parts * WIDE)
        total = tl.zeros((BM, WIDE), tl.float32)
        for step in range(h_steps):
            k = (part * h_steps + step) * WIDE + tl.arange(0, WIDE)
            at = r.to(tl.int64)[:, None] * H + k[None, :]
            h = tl.load(hidden_ptr + at, own[:, None] & (k < H)[None, :], 0.0).to(tl.float32)
            total += h * h
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        tl.store(square_ptr + part * rows + r, tl.sum(total, 1), own)
    else:
        m = tl.program_id(0) * BN + tl.arange(0, BN)
        k = split * steps * BK + tl.arange(0, BK)
        # an anchor predicts nothing: its products are zero, and so is what slot 1 takes from them
        predicts = own & (r % N > 0)
        f_ptr = x_ptr + r[:, None] * C + k[None, :]
        receiver_ptr = weight_ptr + m[None, :] * R + k[:, None]
        predecessor_ptr, message_ptr = receiver_ptr + M * R, receiver_ptr + 2 * M * R
        receiver = tl.zeros((BM, BN), tl.float32)
        gate = tl.zeros((BM, BN), tl.float32)
        message = tl.zeros((BM, BN), tl.float32)
        square = tl.zeros((BM, BK), tl.float32)
        if steps == 1:
            # weights do not depend on the launch in front: they are on their way before it ends
            inside = (m < M)[None, :] & (k < R)[:, None]
            w_receiver = tl.load(receiver_ptr, inside, 0.0)
            w_gate = tl.load(predecessor_ptr, inside, 0.0)
            w_message = tl.load(message_ptr, inside, 0.0)
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
            f = tl.load(f_ptr, predicts[:, None] & (k < R)[None, :], 0.0)
            # scores depend on the receiver gates
            receiver = dot_of_halves(f, w_receiver, receiver, PRECISION)
            gate = tl.dot(f.to(w_gate.dtype), w_gate, gate, input_precision=PRECISION)
            message = tl.dot(f.to(w_message.dtype), w_message, message, input_precision=PRECISION)
            square += f.to(tl.float32) * f.to(tl.float32)
        else:
            if OVERLAP:
                tl.extra.cuda.gdc_wait()
            for step in range(steps):
                # no bound where the parts are even: nothing then depends on the step but the address
                deep = k < (BK * SPLIT * steps if even else R - step * BK)
                inside = (m < M)[None, :] & deep[:, None]
                f = tl.load(f_ptr + step * BK, predicts[:, None] & deep[None, :], 0.0)
                w = tl.load(receiver_ptr + step * BK, inside, 0.0)
                receiver = dot_of_halves(f, w, receiver, PRECISION)
                w = tl.load(predecessor_ptr + step * BK, inside, 0.0)
                gate = tl.dot(f.to(w.dtype), w, gate, input_precision=PRECISION)
                w = tl.load(message_ptr + step * BK, inside, 0.0)
                message = tl.dot(f.to(w.dtype), w, message, input_precision=PRECISION)
                square += f.to(tl.float32) * f.to(tl.float32)
        f_square = tl.sum(square, 1)
        # gate and message are those of the row before: all products pass through memory, also when none is split
        before = tl.maximum(row - 1, 0)
        size: tl.constexpr = (3 * BN + 1) * BM
        tile = tl.program_id(1) * columns + tl.program_id(0)
        part_ptr = partial_ptr + tile * SPLIT * size
        at = row[:, None] * BN + tl.arange(0, BN)[None, :]
        mine = part_ptr + split * size
        tl.store(mine + at, receiver)
        tl.store(mine + BM * BN + at, gate)
        tl.store(mine + 2 * BM * BN + at, message)
        tl.store(mine + 3 * BM * BN + row, f_square)
        tl.debug_barrier()
        if SPLIT == 1 or tl.atomic_add(arrivals_ptr + tile, 1) == SPLIT - 1:
            at_before = before[:, None] * BN + tl.arange(0, BN)[None, :]
            receiver = tl.zeros((BM, BN), tl.float32)
            gate = tl.zeros((BM, BN), tl.float32)
            message = tl.zeros((BM, BN), tl.float32)
            f_square = tl.zeros((BM,), tl.float32)
            p_square = tl.zeros((BM,), tl.float32)
            for part in tl.static_range(SPLIT):
                theirs = part_ptr + part * size
                receiver += tl.load(theirs + at, cache_modifier=".cg")
                gate += tl.load(theirs + BM * BN + at_before, cache_modifier=".cg")
                message += tl.load(theirs + 2 * BM * BN + at_before, cache_modifier=".cg")
                f_square += tl.load(theirs + 3 * BM * BN + row, cache_modifier=".cg")
                p_square += tl.load(theirs + 3 * BM * BN + before, cache_modifier=".cg")
            _store_messages(
                anchor_ptr, table_ptr, table_scale_ptr, bias_ptr, z_ptr, gate_ptr, receiver, gate, message, f_square,
                p_square, r, m, own, scale, N, M, KEEP,
            )  # fmt: skip
            if SPLIT > 1:
                tl.store(arrivals_ptr + tile, 0)


@jit
def _halves_kernel(
    x_ptr,  # [rows, C], float32, its first R columns
    halves_ptr,  # [2, rows, R], half precision
    C: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, RP)
    x = tl.load(x_ptr + row * C + n, n < R, 0.0)
    high = x.to(halves_ptr.dtype.element_ty)
    halves_ptr += row * R + n
    tl.store(halves_ptr, high, n < R)
    tl.store(halves_ptr + tl.num_programs(0) * R, (x - high.to(tl.float32)).to(high.dtype), n < R)


@jit
def _message_kernel(
    hidden_ptr,  # [rows, H]
    x_ptr,  # [rows, C], its first R columns
    products_ptr,  # [rows, 3M]: receiver gate, predecessor gate, message
    rest_ptr,  # [rows, M]: receiver gate of what x lost when it was rounded; read with KEEP
    anchor_ptr,  # [B], int64
    table_ptr,  # [V, 2M]
    table_scale_ptr,  # [V]
    bias_ptr,  # [M]
    z_ptr,  # [rows, M]
    gate_ptr,  # [rows, M], float32
    square_ptr,  # [rows], float32
    scale,
    N: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    HP: tl.constexpr,
    RP: tl.constexpr,
    MP: tl.constexpr,
    KEEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = row % N
    k, n, m = tl.arange(0, HP), tl.arange(0, RP), tl.arange(0, MP)
    h = tl.load(hidden_ptr + row * H + k, k < H, 0.0).to(tl.float32)
    tl.store(square_ptr + row, tl.sum(h * h, 0))
    # the anchor receives nothing; slot 1 follows it, and takes from the table what others take from the row before
    f_end, p_end = tl.where(slot > 0, R, 0), tl.where(slot > 1, R, 0)
    f = tl.load(x_ptr + row * C + n, n < f_end, 0.0).to(tl.float32)
    p = tl.load(x_ptr + (row - 1) * C + n, n < p_end, 0.0).to(tl.float32)
    f_scale = scale / tl.maximum(tl.sqrt(tl.sum(f * f, 0)), 1e-12)
    p_scale = scale / tl.maximum(tl.sqrt(tl.sum(p * p, 0)), 1e-12)
    own_end, before_end = tl.where(slot > 0, M, 0), tl.where(slot > 1, M, 0)
    first_end = own_end - before_end
    receiver = tl.load(products_ptr + row * (3 * M) + m, m < own_end, 0.0).to(tl.float32)
    if KEEP:
        receiver += tl.load(rest_ptr + row * M + m, m < own_end, 0.0)
    receiver *= f_scale
    before_ptr = products_ptr + (row - 1) * (3 * M) + M + m
    gate = p_scale * tl.load(before_ptr, m < before_end, 0.0).to(tl.float32)
    message = p_scale * tl.load(before_ptr + M, m < before_end, 0.0).to(tl.float32)
    anchor = tl.load(anchor_ptr + row // N)
    row_ptr, table_scale = table_ptr + anchor * (2 * M) + m, tl.load(table_scale_ptr + anchor)
    message += tl.load(row_ptr, m < first_end, 0).to(tl.float32) * table_scale
    gate += tl.load(row_ptr + M, m < first_end, 0).to(tl.float32) * table_scale
    gate += receiver + tl.load(bias_ptr + m, m < M, 0.0).to(tl.float32)
    tl.store(z_ptr + row * M + m, (message * tl.sigmoid(gate)).to(z_ptr.dtype.element_ty), m < M)
    if KEEP:
        tl.store(gate_ptr + row * M + m, receiver, m < M)


@jit
def _write_kernel(
    hidden_ptr,  # [rows, H]
    z_ptr,  # [rows, M], zero in the anchors' rows
    square_ptr,  # [PARTS, rows], float32
    weight_ptr,  # [H, M]
    out_ptr,  # [rows, H]
    rows,
    H: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    steps: tl.constexpr = (M + BK - 1) // BK
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    at = r.to(tl.int64)[:, None] * H + n[None, :]
    inside = (r < rows)[:, None] & (n < H)[None, :]
    w_at, z_at = n[None, :] * M + k[:, None], r[:, None] * M + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    if steps == 1:
        # neither depends on the launch in front
        w = tl.load(weight_ptr + w_at, (n < H)[None, :] & (k < M)[:, None], 0.0)
        h = tl.load(hidden_ptr + at, inside, 0.0).to(tl.float32)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        z = tl.load(z_ptr + z_at, (r < rows)[:, None] & (k < M)[None, :], 0.0)
        acc = tl.dot(z, w, acc, input_precision=PRECISION)
    else:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        for step in range(steps):
            left = M - step * BK
            z = tl.load(z_ptr + z_at + step * BK, (r < rows)[:, None] & (k < left)[None, :], 0.0)
            w = tl.load(weight_ptr + w_at + step * BK, (n < H)[None, :] & (k < left)[:, None], 0.0)
            acc = tl.dot(z, w, acc, input_precision=PRECISION)
        h = tl.load(hidden_ptr + at, inside, 0.0).to(tl.float32)
    square = tl.zeros((BM,), tl.float32)
    for part in tl.static_range(PARTS):
        square += tl.load(square_ptr + part * rows + r, r < rows, 0.0)
    h += tl.sqrt(square / H)[:, None] * acc
    tl.store(out_ptr + at, h.to(out_ptr.dtype.element_ty), inside)


# measured on an H200 at H 4096, R 1024, M 512; bounds are rows: 16 a request
READOUT_TILES = (
    (16, Tile(16, 32, 128, split=8, warps=2)),
    (64, Tile(64, 32, 128, split=4)),
)
GATE_TILES = (
    (16, Tile(16, 16, 256, split=4, warps=2)),
    (64, Tile(32, 16, 256, split=4)),
)
WRITE_TILES = (
    (16, Tile(16, 32, 128)),
    (128, Tile(64, 32, 128)),
    (256, Tile(64, 64, 128, stages=3)),
    (512, Tile(128, 64, 64, warps=8)),
    (1 << 30, Tile(128, 128, 64, warps=8, stages=3)),
)


def vendors(hidden: torch.Tensor, wide: bool) -> bool:
    """Tell whether plain products of rows are left to the vendor's kernel: for many it is faster than any here.

    Args:
        hidden (`torch.Tensor` of shape `[rows, H]`): States.
        wide (`bool`): Whether products are kept in float32, as the last layer's are.
    """
    # torch returns such products from 2.8 on, and compiles none
    able = not wide or not hidden.is_cuda or (WIDE_PRODUCTS and not torch.compiler.is_compiling())
    return hidden.shape[0] > READOUT_TILES[-1][0] and hidden.dtype != torch.float32 and able


def _split(tile: Tile, tiles: int, arrivals: torch.Tensor) -> int:
    # every tile whose sum is split needs a counter; grids beyond them fill a device without splitting
    return tile.split if tiles <= arrivals.shape[0] else 1


def _wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # sums of half precision are float32 before they are rounded
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def readout(hidden: torch.Tensor, weight: torch.Tensor, arrivals: torch.Tensor, wide: bool) -> torch.Tensor:
    """Launch 1: states `[rows, H]` and weights `[C, H]` to products `[rows, C]`, if `wide` in float32."""
    (rows, width), columns = hidden.shape, weight.shape[0]
    if vendors(hidden, wide):
        return _wide_product(hidden, weight) if wide else F.linear(hidden, weight)
    tile = pick_tile(READOUT_TILES, rows, hidden.dtype)
    tiles = (cdiv(columns, tile.columns), cdiv(rows, tile.rows))
    split = _split(tile, tiles[0] * tiles[1], arrivals)
    out = hidden.new_empty(rows, columns, dtype=torch.float32 if wide else hidden.dtype)
    _readout_kernel[(*tiles, split)](
        hidden,
        weight,
        out,
        out if split == 1 else hidden.new_empty(split, rows, columns, dtype=torch.float32),
        arrivals,
        rows,
        H=width,
        C=columns,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        SPLIT=split,
        PRECISION=dot_precision(hidden),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(hidden),
    )
    return out


def gate(
    hidden: torch.Tensor, products: torch.Tensor, anchor: torch.Tensor, layer: int, tables: TransferTables
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch 2: states `[rows, H]` and products `[rows, C]` to messages and gates `[rows, M]`, and `|h|^2`."""
    weights, rows = tables.layers[layer], hidden.shape[0]
    size, rank = weights.message.shape
    tile, block = pick_tile(GATE_TILES, rows, hidden.dtype), rows // anchor.shape[0]
    tile = tile._replace(rows=max(tile.rows, next_power_of_2(block)))
    tiles = (cdiv(size, tile.columns), cdiv(anchor.shape[0], tile.rows // block))
    split = _split(tile, tiles[0] * tiles[1], tables.arrivals)
    z = hidden.new_empty(rows, size)
    gate = hidden.new_empty(rows, size, dtype=torch.float32) if layer == tables.last else z
    # about four steps for every program that sums squares
    squares = max(1, tile.rows // (8 * split))
    square = hidden.new_empty(squares * split, rows, dtype=torch.float32)
    parts = tiles[0] * tiles[1] * split * (3 * tile.columns + 1) * tile.rows
    _gate_kernel[(tiles[0] + squares, tiles[1], split)](
        hidden,
        products,
        anchor,
        *tables.predecessors,
        tables.gates,
        weights.bias,
        z,
        gate,
        square,
        hidden.new_empty(parts, dtype=torch.float32),
        tables.arrivals,
        rows,
        math.sqrt(rank),
        N=block,
        H=hidden.shape[1],
        C=products.shape[1],
        R=rank,
        M=size,
        KEEP=layer == tables.last,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        SPLIT=split,
        SQUARES=squares,
        PRECISION=dot_precision(hidden),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(hidden),
    )
    return z, gate, square


def gate_of_many(
    hidden: torch.Tensor, products: torch.Tensor, anchor: torch.Tensor, layer: int, tables: TransferTables
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch 2 for many rows: its products by the vendor's kernel, what follows them row by row."""
    rows, (size, rank) = hidden.shape[0], tables.layers[layer].message.shape
    last = layer == tables.last
    if last:
        halves = hidden.new_empty(2, rows, rank)
        _halves_kernel[(rows,)](products, halves, C=products.shape[1], R=rank, RP=next_power_of_2(rank))
        gates = _wide_product(halves[0], tables.gates)
        rest = _wide_product(halves[1], tables.gates[:size])
    else:
        gates = rest = F.linear(products, tables.gates)
    z = hidden.new_empty(rows, size)
    gate = hidden.new_empty(rows, size, dtype=torch.float32) if last else z
    square = hidden.new_empty(1, rows, dtype=torch.float32)
    _message_kernel[(rows,)](
        hidden,
        products,
        gates,
        rest,
        anchor,
        *tables.predecessors,
        tables.layers[layer].bias,
        z,
        gate,
        square,
        math.sqrt(rank),
        N=rows // anchor.shape[0],
        H=hidden.shape[1],
        C=products.shape[1],
        R=rank,
        M=size,
        HP=next_power_of_2(hidden.shape[1]),
        RP=next_power_of_2(rank),
        MP=next_power_of_2(size),
        KEEP=last,
    )
    return z, gate, square


def write(hidden: torch.Tensor, z: torch.Tensor, square: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Launch 3: states `[rows, H]` and messages `[rows, M]` to written states."""
    rows, width = hidden.shape
    tile = pick_tile(WRITE_TILES, rows, hidden.dtype)
    out = torch.empty_like(hidden)
    _write_kernel[(cdiv(width, tile.columns), cdiv(rows, tile.rows))](
        hidden,
        z,
        square,
        weight,
        out,
        rows,
        H=width,
        M=z.shape[1],
        PARTS=square.shape[0],
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        PRECISION=dot_precision(hidden),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(hidden),
    )
    return out
