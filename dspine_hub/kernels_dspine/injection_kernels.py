"""The Triton kernels of adjacent injection and what launches them; the second launch is `injection_gate_kernels`.

Three launches a layer. The norms are scalars of a row, so they are applied after the products they scale:

1. [`launch_readout`]: `x = readout(h)`; the last layer reads `W^T h` in the same product, for the transition
2. `launch_gate`: `z = gate * message` of every row, from its `x` and that of the row before; `|h|` beside it
3. [`launch_write`]: `h + rms(h) * write(z)`

With few rows there is not enough work for a device, so sums are split and the last part to arrive adds them. On Hopper
a launch starts while the one in front ends: it may read weights before that, and writes nothing before. With many rows
torch's library has faster plain products: [`library_product`] takes the place of the first launch, and the second goes
row by row.

Features are never in memory. In the kernels `r` are rows, `n` columns of a result, `m` columns of a message, `k` the
axis summed over, `w` weights; `x` are products that become features once they are divided by their length, `z` gated
messages.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .triton_support import ProductTile, TileTable, cdiv, dot_precision, jit, overlap, pick_tile, tl

# whether torch returns float32 products of half precision: from 2.8 on
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
    """Multiply states by the transposed weight; grid `[ceil(C / BN), ceil(rows / BM), SPLIT]`."""
    steps: tl.constexpr = (H + SPLIT * BK - 1) // (SPLIT * BK)
    even: tl.constexpr = H % (SPLIT * BK) == 0
    split = tl.program_id(2)
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = split * steps * BK + tl.arange(0, BK)
    h_ptr = hidden_ptr + r.to(tl.int64)[:, None] * H + k[None, :]
    w_ptr = weight_ptr + n.to(tl.int64)[None, :] * H + k[:, None]
    h_inside, w_inside = (r < rows)[:, None], (n < C)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    if OVERLAP:
        # waits first: the launches behind this one then find the states complete
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for step in range(steps):
        if even:
            h = tl.load(h_ptr + step * BK, h_inside, 0.0)
            w = tl.load(w_ptr + step * BK, w_inside, 0.0)
        else:
            left = H - step * BK
            h = tl.load(h_ptr + step * BK, h_inside & (k < left)[None, :], 0.0)
            w = tl.load(w_ptr + step * BK, w_inside & (k < left)[:, None], 0.0)
        total = tl.dot(h, w, total, input_precision=PRECISION)

    at = r[:, None] * C + n[None, :]
    inside = h_inside & w_inside
    if SPLIT == 1:
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), inside)
    else:
        tl.store(partial_ptr + split * rows * C + at, total, inside)
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
    """Write gated messages into states, in proportion to their length; grid `[ceil(H / BN), ceil(rows / BM)]`."""
    steps: tl.constexpr = (M + BK - 1) // BK
    r = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    at = r.to(tl.int64)[:, None] * H + n[None, :]
    inside = (r < rows)[:, None] & (n < H)[None, :]
    w_at, z_at = n[None, :] * M + k[:, None], r[:, None] * M + k[None, :]
    written = tl.zeros((BM, BN), tl.float32)
    if steps == 1:
        # neither depends on the launch in front
        w = tl.load(weight_ptr + w_at, (n < H)[None, :] & (k < M)[:, None], 0.0)
        h = tl.load(hidden_ptr + at, inside, 0.0).to(tl.float32)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        z = tl.load(z_ptr + z_at, (r < rows)[:, None] & (k < M)[None, :], 0.0)
        written = tl.dot(z, w, written, input_precision=PRECISION)
    else:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        for step in range(steps):
            left = M - step * BK
            z = tl.load(z_ptr + z_at + step * BK, (r < rows)[:, None] & (k < left)[None, :], 0.0)
            w = tl.load(weight_ptr + w_at + step * BK, (n < H)[None, :] & (k < left)[:, None], 0.0)
            written = tl.dot(z, w, written, input_precision=PRECISION)
        h = tl.load(hidden_ptr + at, inside, 0.0).to(tl.float32)
    square = tl.zeros((BM,), tl.float32)
    for part in tl.static_range(PARTS):
        square += tl.load(square_ptr + part * rows + r, r < rows, 0.0)
    h += tl.sqrt(square / H)[:, None] * written
    tl.store(out_ptr + at, h.to(out_ptr.dtype.element_ty), inside)


# measured on an H200 at H 4096, R 1024, M 512; bounds are rows: 16 a request
READOUT_TILES = TileTable(
    half=(
        (16, ProductTile(16, 32, 128, split=8, warps=2)),
        (64, ProductTile(64, 32, 128, split=4)),
    ),
    float32=ProductTile(16, 32, 32, split=2, stages=2),
)
WRITE_TILES = TileTable(
    half=(
        (16, ProductTile(16, 32, 128)),
        (128, ProductTile(64, 32, 128)),
        (256, ProductTile(64, 64, 128, stages=3)),
        (512, ProductTile(128, 64, 64, warps=8)),
        (1 << 30, ProductTile(128, 128, 64, warps=8, stages=3)),
    ),
    float32=ProductTile(16, 32, 32, stages=2),
)


def library_product_wins(hidden: torch.Tensor, wide: bool) -> bool:
    """Tell whether plain products of states `[rows, H]` are faster, and possible, by the library.

    Args:
        hidden (`torch.Tensor` of shape `[rows, H]`): States.
        wide (`bool`): Whether products are kept in float32, as the last layer's are.
    """
    # torch compiles no such product
    able = not wide or not hidden.is_cuda or (WIDE_PRODUCTS and not torch.compiler.is_compiling())
    most_rows = READOUT_TILES.half[-1][0]
    return hidden.shape[0] > most_rows and hidden.dtype != torch.float32 and able


def library_product(x: torch.Tensor, weight: torch.Tensor, wide: bool) -> torch.Tensor:
    """Multiply `[rows, k]` by weights `[C, k]`, transposed, to `[rows, C]`, if `wide` in float32."""
    if not wide:
        return F.linear(x, weight)
    # sums of half precision are float32 before they are rounded
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def parts_of(tile: ProductTile, tiles: int, arrivals: torch.Tensor) -> int:
    """Return how many programs share a tile's sum.

    Every tile whose sum is split needs a counter; grids beyond those there are fill a device without splitting.
    """
    return tile.split if tiles <= arrivals.shape[0] else 1


def launch_readout(hidden: torch.Tensor, weight: torch.Tensor, arrivals: torch.Tensor, wide: bool) -> torch.Tensor:
    """Launch 1: states `[rows, H]` and weights `[C, H]` to products `[rows, C]`, if `wide` in float32."""
    (rows, width), columns = hidden.shape, weight.shape[0]
    tile = pick_tile(READOUT_TILES, rows, hidden.dtype)
    tiles = (cdiv(columns, tile.columns), cdiv(rows, tile.rows))
    split = parts_of(tile, tiles[0] * tiles[1], arrivals)
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


def launch_write(
    hidden: torch.Tensor, message: torch.Tensor, square: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Launch 3: states `[rows, H]`, messages `[rows, M]` and parts of `|h|^2`, `[parts, rows]`, to written states."""
    rows, width = hidden.shape
    tile = pick_tile(WRITE_TILES, rows, hidden.dtype)
    out = torch.empty_like(hidden)
    _write_kernel[(cdiv(width, tile.columns), cdiv(rows, tile.rows))](
        hidden,
        message,
        square,
        weight,
        out,
        rows,
        H=width,
        M=message.shape[1],
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
