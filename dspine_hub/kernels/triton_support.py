"""What all kernels share: which implementation runs, asked per call and never at import; tiles; launch arguments."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


def use_triton(x) -> bool:
    """Tell whether a Triton kernel can run on `x`.

    Installed is not the same as able to run: without a GPU driver a launch fails, so the tensor's device decides,
    or the interpreter when `TRITON_INTERPRET=1` asks for it.

    Args:
        x (`torch.Tensor` of any shape): The operand that would be handed to the kernel.

    Returns:
        `bool`: `True` when Triton is importable and `x` lives on a CUDA device or the interpreter is switched on.
    """
    if triton is None:
        return False
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def jit(function):
    """Compile a kernel with Triton, or leave it as it is where there is none to launch it."""
    return function if triton is None else triton.jit(function)


def cdiv(a: int, b: int) -> int:
    """Divide, rounding up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Round up to the sizes Triton's ranges come in."""
    return 1 << (n - 1).bit_length()


def dot_precision(x: torch.Tensor) -> str:
    """Name the matrix precision of a kernel: float32 operands must not be rounded to TF32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


@jit
def dot_of_halves(x, y, acc, PRECISION: tl.constexpr):
    """Add the product of a float32 tile and one of half precision, to which `x` is not rounded but split in two."""
    high = x.to(y.dtype)
    acc = tl.dot(high, y, acc, input_precision=PRECISION)
    if x.dtype != y.dtype:
        acc = tl.dot((x - high.to(tl.float32)).to(y.dtype), y, acc, input_precision=PRECISION)
    return acc


def overlap(x: torch.Tensor) -> dict:
    """Return the launch arguments that let a kernel start before the one in front of it has ended.

    Its weights then travel while its neighbour computes (Hopper's programmatic dependent launch). Dynamo knows no such
    argument, so compiled graphs launch without.
    """
    able = x.is_cuda and torch.version.hip is None and not torch.compiler.is_compiling()
    able = able and torch.cuda.get_device_capability(x.device)[0] >= 9 and hasattr(tl.extra.cuda, "gdc_wait")
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}


class Tile(NamedTuple):
    """How a kernel cuts its product: rows, columns and depth of a tile, parts of a split sum, warps, stages."""

    rows: int
    columns: int
    depth: int
    split: int = 1
    warps: int = 4
    stages: int = 4


# float32 is for checking, not for speed: one small tile
FLOAT32_TILE = Tile(16, 32, 32, split=2, stages=2)


def pick_tile(tiles: tuple[tuple[int, Tile], ...], rows: int, dtype: torch.dtype) -> Tile:
    """Return the tile of the first entry whose bound holds `rows`, the last one's beyond all bounds.

    Args:
        tiles (`tuple` of bound and [`Tile`]): Measured best, by rising bound.
        rows (`int`): Rows of the product.
        dtype (`torch.dtype`): Of the operands; the tiles listed are for half precision.
    """
    if dtype == torch.float32:
        return FLOAT32_TILE
    return next((tile for bound, tile in tiles if rows <= bound), tiles[-1][1])
