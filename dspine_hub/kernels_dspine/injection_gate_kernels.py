"""The Triton kernels of the injection's second launch: products become gated messages.

Few rows go tile by tile, [`launch_gate`]: `receiver_gate(x)`, `predecessor_gate(x)`, `message(x)` and `|x|` in one
pass over `x`, the latter three then taken from the row before; `|h|` beside it. Many rows go row by row,
[`gate_from_library_products`], behind plain products that are left to the library. Either way the anchor's message and
gate come from its row of the `[V, 2M]` table.

Names are those of `injection_kernels`; rows that are a program's `own` are those it stores, `.._before` is of the row
before.
"""

from __future__ import annotations

import math

import torch

from .injection_kernels import library_product, parts_of
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


@jit
def _feature_scale(square, scale):
    """Return what makes products a feature of length `scale`, from the sum of their squares; of any shape."""
    # a compiled graph hands numbers over in float64
    return (scale / tl.maximum(tl.sqrt(square), 1e-12)).to(tl.float32)


@jit
def _squares(hidden_ptr, r, own, part, H: tl.constexpr, BM: tl.constexpr, PARTS: tl.constexpr):
    """Square one of `PARTS` parts of the hidden axis of rows `r`; `[BM, WIDE]`, a row's sum is its part of `|h|^2`."""
    WIDE: tl.constexpr = 8192 // BM
    steps: tl.constexpr = (H + PARTS * WIDE - 1) // (PARTS * WIDE)
    total = tl.zeros((BM, WIDE), tl.float32)
    for step in range(steps):
        k = (part * steps + step) * WIDE + tl.arange(0, WIDE)
        at = r.to(tl.int64)[:, None] * H + k[None, :]
        h = tl.load(hidden_ptr + at, own[:, None] & (k < H)[None, :], 0.0).to(tl.float32)
        total += h * h
    return total


@jit
def _gate_products(
    products_ptr,
    weight_ptr,
    r,
    own,
    m,
    split,
    N: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply one of `SPLIT` parts of rows `x` by all three weights, and sum its squares.

    Returns receiver gate, predecessor gate and message, each `[BM, BN]`, and `|x|^2`, `[BM]`.
    """
    steps: tl.constexpr = (R + SPLIT * BK - 1) // (SPLIT * BK)
    even: tl.constexpr = R % (SPLIT * BK) == 0
    k = split * steps * BK + tl.arange(0, BK)
    # an anchor predicts nothing: its products are zero, and so is what slot 1 takes from them
    predicts = own & (r % N > 0)
    x_ptr = products_ptr + r[:, None] * C + k[None, :]
    receiver_ptr = weight_ptr + m[None, :] * R + k[:, None]
    gate_ptr, message_ptr = receiver_ptr + M * R, receiver_ptr + 2 * M * R
    receiver = tl.zeros((BM, BN), tl.float32)
    gate = tl.zeros((BM, BN), tl.float32)
    message = tl.zeros((BM, BN), tl.float32)
    square = tl.zeros((BM, BK), tl.float32)
    if steps == 1:
        # weights do not depend on the launch in front: they are on their way before it ends
        inside = (m < M)[None, :] & (k < R)[:, None]
        w_receiver = tl.load(receiver_ptr, inside, 0.0)
        w_gate = tl.load(gate_ptr, inside, 0.0)
        w_message = tl.load(message_ptr, inside, 0.0)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        x = tl.load(x_ptr, predicts[:, None] & (k < R)[None, :], 0.0)
        # scores depend on the receiver gates
        receiver = dot_of_halves(x, w_receiver, receiver, PRECISION)
        gate = tl.dot(x.to(w_gate.dtype), w_gate, gate, input_precision=PRECISION)
        message = tl.dot(x.to(w_message.dtype), w_message, message, input_precision=PRECISION)
        square += x.to(tl.float32) * x.to(tl.float32)
    else:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        for step in range(steps):
            # no bound where the parts are even: nothing then depends on the step but the address
            deep = k < (BK * SPLIT * steps if even else R - step * BK)
            inside = (m < M)[None, :] & deep[:, None]
            x = tl.load(x_ptr + step * BK, predicts[:, None] & deep[None, :], 0.0)
            w = tl.load(receiver_ptr + step * BK, inside, 0.0)
            receiver = dot_of_halves(x, w, receiver, PRECISION)
            w = tl.load(gate_ptr + step * BK, inside, 0.0)
            gate = tl.dot(x.to(w.dtype), w, gate, input_precision=PRECISION)
            w = tl.load(message_ptr + step * BK, inside, 0.0)
            message = tl.dot(x.to(w.dtype), w, message, input_precision=PRECISION)
            square += x.to(tl.float32) * x.to(tl.float32)
    return receiver, gate, message, tl.sum(square, 1)


@jit
def _leave_products(tile_ptr, split, row, receiver, gate, message, square, BM: tl.constexpr, BN: tl.constexpr):
    """Store a part, as [`_gate_products`] returned it, where the last of its tile finds it: `3 * BN + 1` by `BM`."""
    at = row[:, None] * BN + tl.arange(0, BN)[None, :]
    part_ptr = tile_ptr + split * ((3 * BN + 1) * BM)
    tl.store(part_ptr + at, receiver)
    tl.store(part_ptr + BM * BN + at, gate)
    tl.store(part_ptr + 2 * BM * BN + at, message)
    tl.store(part_ptr + 3 * BM * BN + row, square)


@jit
def _add_products(tile_ptr, row, before, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr):
    """Add all parts of a tile, always in the same order.

    Returns the receiver gate of every row, gate and message of the row before it, each `[BM, BN]`, and `|x|^2` of both
    rows, each `[BM]`.
    """
    at = row[:, None] * BN + tl.arange(0, BN)[None, :]
    at_before = before[:, None] * BN + tl.arange(0, BN)[None, :]
    receiver = tl.zeros((BM, BN), tl.float32)
    gate = tl.zeros((BM, BN), tl.float32)
    message = tl.zeros((BM, BN), tl.float32)
    square = tl.zeros((BM,), tl.float32)
    square_before = tl.zeros((BM,), tl.float32)
    for part in tl.static_range(SPLIT):
        part_ptr = tile_ptr + part * ((3 * BN + 1) * BM)
        receiver += tl.load(part_ptr + at, cache_modifier=".cg")
        gate += tl.load(part_ptr + BM * BN + at_before, cache_modifier=".cg")
        message += tl.load(part_ptr + 2 * BM * BN + at_before, cache_modifier=".cg")
        square += tl.load(part_ptr + 3 * BM * BN + row, cache_modifier=".cg")
        square_before += tl.load(part_ptr + 3 * BM * BN + before, cache_modifier=".cg")
    return receiver, gate, message, square, square_before


@jit
def _from_before(
    message, gate, scale, anchor_ptr, table_ptr, table_scale_ptr, r, m, own, inside, N: tl.constexpr, M: tl.constexpr
):
    """Scale message and gate of the row before, `[BM, BN]`; slot 1 has the anchor before it, a row of the table."""
    first = inside & (r % N == 1)[:, None]
    anchor = tl.load(anchor_ptr + r // N, own, 0)
    row_ptr = table_ptr + anchor[:, None] * (2 * M) + m[None, :]
    table_scale = tl.load(table_scale_ptr + anchor, own, 0.0)[:, None]
    message = message * scale + tl.load(row_ptr, first, 0).to(tl.float32) * table_scale
    gate = gate * scale + tl.load(row_ptr + M, first, 0).to(tl.float32) * table_scale
    return message, gate


@jit
def _gate_kernel(
    hidden_ptr,  # [rows, H]
    products_ptr,  # [rows, C], its first R columns; float32 with KEEP
    anchor_ptr,  # [B], int64
    table_ptr,  # [V, 2M]
    table_scale_ptr,  # [V]
    weight_ptr,  # [3M, R]: receiver gate, predecessor gate, message
    bias_ptr,  # [M]
    z_ptr,  # [rows, M]
    receiver_ptr,  # [rows, M], float32; written with KEEP
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
    """Turn products `x` into gated messages, and sum the squares of the states beside it, for the write.

    Grid `[ceil(M / BN) + SQUARES, tiles of whole blocks, SPLIT]`: of the first axis, the first programs share columns
    of the message, the others the hidden axis. With `KEEP` receiver gates are stored too, for the transition.
    """
    columns: tl.constexpr = (M + BN - 1) // BN
    # a tile holds whole blocks, so that a row's predecessor is in it
    OWN: tl.constexpr = BM // N * N
    split = tl.program_id(2)
    row = tl.arange(0, BM)
    r = tl.program_id(1) * OWN + row
    own = (row < OWN) & (r < rows)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(0) >= columns:
        part = (tl.program_id(0) - columns) * SPLIT + split
        squares = _squares(hidden_ptr, r, own, part, H, BM, SQUARES * SPLIT)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        tl.store(square_ptr + part * rows + r, tl.sum(squares, 1), own)
    else:
        m = tl.program_id(0) * BN + tl.arange(0, BN)
        receiver, gate, message, square = _gate_products(
            products_ptr, weight_ptr, r, own, m, split, N, C, R, M, BM, BN, BK, SPLIT, PRECISION, OVERLAP
        )
        # gate and message are those of the row before: all products pass through memory, also when none is split
        before = tl.maximum(row - 1, 0)
        tile = tl.program_id(1) * columns + tl.program_id(0)
        tile_ptr = partial_ptr + tile * SPLIT * ((3 * BN + 1) * BM)
        _leave_products(tile_ptr, split, row, receiver, gate, message, square, BM, BN)
        tl.debug_barrier()
        if SPLIT == 1 or tl.atomic_add(arrivals_ptr + tile, 1) == SPLIT - 1:
            # the last to arrive has all parts, and leaves the counter as it was
            receiver, gate, message, square, square_before = _add_products(tile_ptr, row, before, BM, BN, SPLIT)
            receiver *= _feature_scale(square, scale)[:, None]
            scale_before = _feature_scale(square_before, scale)[:, None]
            inside = own[:, None] & (m < M)[None, :]
            message, gate = _from_before(
                message, gate, scale_before, anchor_ptr, table_ptr, table_scale_ptr, r, m, own, inside, N, M
            )
            gate += receiver + tl.load(bias_ptr + m, m < M, 0.0).to(tl.float32)[None, :]
            at = r[:, None] * M + m[None, :]
            # an anchor receives nothing: the row before it is another block's
            z = tl.where((r % N > 0)[:, None], message * tl.sigmoid(gate), 0.0)
            tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty), inside)
            if KEEP:
                tl.store(receiver_ptr + at, receiver, inside)
            if SPLIT > 1:
                tl.store(arrivals_ptr + tile, 0)


# measured on an H200 at H 4096, R 1024, M 512; bounds are rows: 16 a request
GATE_TILES = TileTable(
    half=(
        (16, ProductTile(16, 16, 256, split=4, warps=2)),
        (64, ProductTile(32, 16, 256, split=4)),
    ),
    float32=ProductTile(16, 32, 32, split=2, stages=2),
)


def launch_gate(
    hidden: torch.Tensor, products: torch.Tensor, anchor: torch.Tensor, layer: int, tables: TransferTables
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch 2: states `[rows, H]` and products `[rows, C]` to gated messages.

    Returns:
        `tuple` of messages `[rows, M]`, receiver gates `[rows, M]` in float32 (of the last layer, else the messages
        again) and parts of `|h|^2`, `[parts, rows]` in float32.
    """
    weights, rows = tables.layers[layer], hidden.shape[0]
    size, rank = weights.message.shape
    tile, block = pick_tile(GATE_TILES, rows, hidden.dtype), rows // anchor.shape[0]
    tile = tile._replace(rows=max(tile.rows, next_power_of_2(block)))
    tiles = (cdiv(size, tile.columns), cdiv(anchor.shape[0], tile.rows // block))
    split = parts_of(tile, tiles[0] * tiles[1], tables.arrivals)
    z = hidden.new_empty(rows, size)
    receiver = hidden.new_empty(rows, size, dtype=torch.float32) if layer == tables.last else z
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
        receiver,
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
    return z, receiver, square


@jit
def _halves_kernel(
    products_ptr,  # [rows, C], float32, its first R columns
    halves_ptr,  # [2, rows, R], half precision
    C: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
):
    """Split float32 numbers into their rounded values and what these lack; grid `[rows]`."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, RP)
    x = tl.load(products_ptr + row * C + n, n < R, 0.0)
    high = x.to(halves_ptr.dtype.element_ty)
    halves_ptr += row * R + n
    tl.store(halves_ptr, high, n < R)
    tl.store(halves_ptr + tl.num_programs(0) * R, (x - high.to(tl.float32)).to(high.dtype), n < R)


@jit
def _message_kernel(
    hidden_ptr,  # [rows, H]
    products_ptr,  # [rows, C], its first R columns
    gates_ptr,  # [rows, 3M]: receiver gate, predecessor gate, message
    rest_ptr,  # [rows, M]: receiver gate of what the products lost when they were rounded; read with KEEP
    anchor_ptr,  # [B], int64
    table_ptr,  # [V, 2M]
    table_scale_ptr,  # [V]
    bias_ptr,  # [M]
    z_ptr,  # [rows, M]
    receiver_ptr,  # [rows, M], float32; written with KEEP
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
    """Turn products of a row and of the row before into a gated message, and sum the squares of its state.

    Grid `[rows]`. With `KEEP` receiver gates are stored too, for the transition.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = row % N
    k, n, m = tl.arange(0, HP), tl.arange(0, RP), tl.arange(0, MP)
    h = tl.load(hidden_ptr + row * H + k, k < H, 0.0).to(tl.float32)
    tl.store(square_ptr + row, tl.sum(h * h, 0))

    # the anchor receives nothing; slot 1 follows it, and takes from the table what others take from the row before
    x_end, x_before_end = tl.where(slot > 0, R, 0), tl.where(slot > 1, R, 0)
    x = tl.load(products_ptr + row * C + n, n < x_end, 0.0).to(tl.float32)
    x_before = tl.load(products_ptr + (row - 1) * C + n, n < x_before_end, 0.0).to(tl.float32)
    scale_own = _feature_scale(tl.sum(x * x, 0), scale)
    scale_before = _feature_scale(tl.sum(x_before * x_before, 0), scale)
    own_end, before_end = tl.where(slot > 0, M, 0), tl.where(slot > 1, M, 0)
    first_end = own_end - before_end
    receiver = tl.load(gates_ptr + row * (3 * M) + m, m < own_end, 0.0).to(tl.float32)
    if KEEP:
        receiver += tl.load(rest_ptr + row * M + m, m < own_end, 0.0)
    receiver *= scale_own
    before_ptr = gates_ptr + (row - 1) * (3 * M) + M + m
    gate = scale_before * tl.load(before_ptr, m < before_end, 0.0).to(tl.float32)
    message = scale_before * tl.load(before_ptr + M, m < before_end, 0.0).to(tl.float32)
    anchor = tl.load(anchor_ptr + row // N)
    table_row, table_scale = table_ptr + anchor * (2 * M) + m, tl.load(table_scale_ptr + anchor)
    message += tl.load(table_row, m < first_end, 0).to(tl.float32) * table_scale
    gate += tl.load(table_row + M, m < first_end, 0).to(tl.float32) * table_scale

    gate += receiver + tl.load(bias_ptr + m, m < M, 0.0).to(tl.float32)
    tl.store(z_ptr + row * M + m, (message * tl.sigmoid(gate)).to(z_ptr.dtype.element_ty), m < M)
    if KEEP:
        tl.store(receiver_ptr + row * M + m, receiver, m < M)


def gate_from_library_products(
    hidden: torch.Tensor, products: torch.Tensor, anchor: torch.Tensor, layer: int, tables: TransferTables
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch 2 for many rows: operands and results are those of [`launch_gate`]."""
    rows, (size, rank) = hidden.shape[0], tables.layers[layer].message.shape
    last = layer == tables.last
    if last:
        halves = hidden.new_empty(2, rows, rank)
        _halves_kernel[(rows,)](products, halves, C=products.shape[1], R=rank, RP=next_power_of_2(rank))
        gates = library_product(halves[0], tables.gates, wide=True)
        rest = library_product(halves[1], tables.gates[:size], wide=True)
    else:
        gates = rest = library_product(products, tables.gates, wide=False)
    z = hidden.new_empty(rows, size)
    receiver = hidden.new_empty(rows, size, dtype=torch.float32) if last else z
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
        receiver,
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
    return z, receiver, square
