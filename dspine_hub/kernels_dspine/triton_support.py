"""What all kernels share: which implementation runs, asked per call and never at import; tiles; launch arguments.

Kernel files shorten sizes alike, beside the alphabet of shapes: `BM`, `BN` and `BK` are rows, columns and depth of a
tile of a product, another `B` in front says how much a program holds of that axis, a `P` behind that a size is rounded
up to a power of two, since Triton's ranges come in no other; `SPLIT` programs share a sum. `.._ptr` points to a
tensor, `.._row` to rows of it; `inside` says which places of a tile exist.
"""

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
    return triton is not None and can_launch(x)


def can_launch(x: torch.Tensor) -> bool:
    """Tell whether an installed Triton has something to launch on: the device of `x`, or its interpreter."""
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

    Its weights then travel while its neighbour computes (Hopper's programmatic dependent launch).
    """
    return {"OVERLAP": True, "launch_pdl": True} if can_overlap(x) else {"OVERLAP": False}


def can_overlap(x: torch.Tensor) -> bool:
    """Tell whether launches overlap on the device of `x`: the one switch of all kernels.

    Dynamo knows no such launch argument, so compiled graphs launch without.
    """
    able = x.is_cuda and torch.version.hip is None and not torch.compiler.is_compiling()
    return able and torch.cuda.get_device_capability(x.device)[0] >= 9 and hasattr(tl.extra.cuda, "gdc_wait")


class ProductTile(NamedTuple):
    """How a kernel cuts a matrix product.

    Args:
        rows, columns (`int`): Of the result, a program computes so many.
        depth (`int`): What is read at once of the axis summed over.
        split (`int`): Programs that share that axis.
        warps, stages (`int`): Of a program.
    """

    rows: int
    columns: int
    depth: int
    split: int = 1
    warps: int = 4
    stages: int = 4


class TileTable(NamedTuple):
    """The tiles of one kernel.

    Args:
        half (`tuple` of bound and tile): Measured best for half precision, by rising bound on the rows or slots.
        float32 (a tile): For checking, not for speed: one small tile whatever the size.
    """

    half: tuple
    float32: NamedTuple


def pick_tile(tiles: TileTable, count: int, dtype: torch.dtype):
    """Return the tile for `count` rows or slots in `dtype`: the first whose bound holds them, or else the last."""
    if dtype == torch.float32:
        return tiles.float32
    return next((tile for bound, tile in tiles.half if count <= bound), tiles.half[-1][1])
