"""Top candidates: the `K` largest logits of every slot, which the vocabulary's size makes a matter of reading fast.

Two launches. The first reads every logit once and keeps the largest of each group of neighbours. The `K` largest
logits lie in the `K` groups with the largest of these, so the second looks at no others. Both order logits by one
integer key, value first, lower id before higher; equal logits therefore give the same candidates every time.
"""

from __future__ import annotations

import torch

from .triton_support import cdiv, jit, next_power_of_2, overlap, tl, use_triton

# neighbours of which one is kept: what the second launch reads of a slot is `V / GROUP` keys and `K * GROUP` logits
GROUP = 128
# more candidates than anyone walks would not fit the registers of the second launch
MOST = 64


@jit
def _sortable(x):
    """Return int32 keys that ascend as the numbers do, of any shape: below zero all bits but the sign are turned."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        key = bits ^ ((bits >> 31) & 0x7FFF)
    else:
        bits = x.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return key


@jit
def _ranked(key, position, inside, NARROW: tl.constexpr):
    """Return keys of which no two are alike, of any shape: of equal ones that which stands first is the larger.

    The place is in the lower half, of int32 where keys are of 16 bits (`NARROW`), else of int64; outside is the least.
    """
    if NARROW:
        ranked = tl.where(inside, (key << 16) | (0xFFFF - position), -(1 << 31))
    else:
        wide = (key.to(tl.int64) << 32) | (0xFFFFFFFF - position.to(tl.int64))
        ranked = tl.where(inside, wide, -(1 << 63))
    return ranked


@jit
def _place_of(ranked, NARROW: tl.constexpr):
    """Read the place from what [`_ranked`] returned, int32."""
    return 0xFFFF - (ranked & 0xFFFF) if NARROW else (0xFFFFFFFF - (ranked & 0xFFFFFFFF)).to(tl.int32)


@jit
def _take_largest(ranked, K: tl.constexpr, KP: tl.constexpr, NARROW: tl.constexpr):
    """Take the `K` largest of a vector, falling, to `[KP]`; what is missing is the least there is."""
    place = tl.arange(0, KP)
    taken = tl.full((KP,), -(1 << 31) if NARROW else -(1 << 63), ranked.dtype)
    for step in range(K):
        largest = tl.max(ranked, 0)
        taken = tl.where(place == step, largest, taken)
        ranked = tl.where(ranked == largest, -(1 << 31) if NARROW else -(1 << 63), ranked)
    return taken


@jit
def _group_kernel(
    logits_ptr,  # [rows, V]
    largest_ptr,  # [rows, groups], int32
    groups,
    row_stride,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    BG: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Store the key of the largest logit of every group; grid `[ceil(groups / BG), rows]`."""
    row = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0) * BG + tl.arange(0, BG)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(logits_ptr + row * row_stride + at, at < V, float("-inf"))
    # numbers are compared cheaper than keys
    largest = tl.max(x.to(tl.float32), 1).to(x.dtype)
    tl.store(largest_ptr + row * groups + g, _sortable(largest), g < groups)


@jit
def _pick_kernel(
    logits_ptr,  # [rows, V]
    largest_ptr,  # [rows, groups], int32
    values_ptr,  # [rows, K]
    ids_ptr,  # [rows, K], int64
    groups,
    row_stride,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    GP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Choose `K` groups, then the `K` largest of their logits; grid `[rows]`."""
    NARROW: tl.constexpr = logits_ptr.dtype.element_ty.primitive_bitwidth == 16
    row = tl.program_id(0).to(tl.int64)
    g, place = tl.arange(0, GP), tl.arange(0, KP)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    key = tl.load(largest_ptr + row * groups + g, g < groups, 0)
    taken = _take_largest(_ranked(key, g, g < groups, NARROW), K, KP, NARROW)
    # a group that is not there sorts behind all that are
    group = _place_of(taken, NARROW)
    group = tl.where(place < tl.minimum(K, groups), group, groups + place)
    # by rising id, so that the place of a logit says which of two comes first
    rank = tl.sum((group[None, :] < group[:, None]).to(tl.int32), 1)
    group = tl.sum(tl.where(rank[None, :] == place[:, None], group[None, :], 0), 1)

    ids = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(logits_ptr + row * row_stride + ids, ids < V, 0.0)
    position = place[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    ranked = _ranked(_sortable(x), position, ids < V, NARROW)
    taken = _take_largest(tl.reshape(ranked, (KP * GROUP,)), K, KP, NARROW)
    position = _place_of(taken, NARROW)
    if NARROW:
        key = taken >> 16
        value = (key ^ ((key >> 31) & 0x7FFF)).to(tl.int16).to(x.dtype, bitcast=True)
    else:
        key = (taken >> 32).to(tl.int32)
        value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(x.dtype, bitcast=True)
    own = tl.sum(tl.where((position // GROUP)[:, None] == place[None, :], group[None, :], 0), 1)
    at = row * K + place
    tl.store(values_ptr + at, value, place < K)
    tl.store(ids_ptr + at, (own * GROUP + position % GROUP).to(tl.int64), place < K)


def _top_triton(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = logits.flatten(0, -2)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    number, width = rows.shape
    groups = cdiv(width, GROUP)
    largest = rows.new_empty(number, groups, dtype=torch.int32)
    values = rows.new_empty(number, count)
    ids = rows.new_empty(number, count, dtype=torch.int64)
    ahead = overlap(rows)
    _group_kernel[(cdiv(groups, 32), number)](
        rows, largest, groups, rows.stride(0), V=width, GROUP=GROUP, BG=32, num_warps=4, **ahead
    )
    _pick_kernel[(number,)](
        rows,
        largest,
        values,
        ids,
        groups,
        rows.stride(0),
        V=width,
        GROUP=GROUP,
        K=count,
        KP=next_power_of_2(count),
        GP=next_power_of_2(groups),
        num_warps=4,
        **ahead,
    )
    shape = (*logits.shape[:-1], count)
    return values.view(shape), ids.view(shape)


def top_candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the largest logits of every slot.

    Args:
        logits (`torch.Tensor` of shape `[..., V]`): Of any floating dtype.
        count (`int`): `K`.

    Returns:
        `tuple` of values `[..., K]`, falling, in the dtype of `logits`, and token ids `[..., K]`, int64. Of equal
        logits the kernel takes the lower id; without it PyTorch decides.

    Raises:
        ValueError: When `count` does not lie in `[1, V]`.
    """
    if not 1 <= count <= logits.shape[-1]:
        raise ValueError(f"`count` must lie in [1, {logits.shape[-1]}], got {count}.")
    # keys are of 32 bits; places of 16-bit logits have 16, and so do groups: a vocabulary of 8 million
    fits = logits.element_size() <= 4 and count <= MOST and logits.shape[-1] <= GROUP << 16
    if fits and use_triton(logits):
        return _top_triton(logits, count)
    return tuple(logits.topk(count, dim=-1))
