"""Candidate walk: from the anchor, follow the row of the token just chosen through the transition scores.

`S` steps over `K` numbers each; no model runs. Greedy rows take the arg-max; sampled rows draw from
`softmax(row / temperature)` by inverting its distribution function at a uniform number given by the caller, so that
every implementation of this file picks the same token from the same numbers.

One launch serves a batch of greedy and sampled rows. The kernel chooses for every predecessor of every slot at once,
which leaves one selection a slot to the walk itself. Source of the method: arXiv 2609.36173.
"""

from __future__ import annotations

import torch

from .triton_support import jit, next_power_of_2, overlap, tl, use_triton


def candidate_walk_reference(
    scores: torch.Tensor,
    candidates: torch.Tensor,
    temperature: torch.Tensor,
    uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Define the walk; see [`candidate_walk`] for shapes."""
    batch, slots, width = candidates.shape
    greedy = (temperature == 0)[:, None]
    scale = torch.where(temperature == 0, torch.ones_like(temperature), temperature)[:, None]
    index = torch.zeros(batch, 1, dtype=torch.long, device=scores.device)
    chosen, rows = [], []
    for slot in range(slots):
        row = scores[:, slot].gather(1, index[..., None].expand(-1, 1, width)).squeeze(1)  # [B, K]
        best = row.argmax(dim=-1, keepdim=True)
        q = torch.softmax(row / scale, dim=-1)
        cumulative = q.cumsum(dim=-1)
        drawn = (cumulative <= uniforms[:, slot, None] * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
        index = torch.where(greedy, best, drawn.clamp_(max=width - 1))
        rows.append(torch.where(greedy, torch.zeros_like(q).scatter_(1, best, 1.0), q))
        chosen.append(candidates[:, slot].gather(1, index))
    return torch.cat(chosen, dim=1), torch.stack(rows, dim=1)


@jit
def _walk_kernel(
    scores_ptr,  # [B, S, K, K], float32
    candidates_ptr,  # [B, S, K], int64
    temperature_ptr,  # [B], float32
    uniforms_ptr,  # [B, S], float32
    tokens_ptr,  # [B, S], int64
    q_ptr,  # [B, S, K], float32
    next_ptr,  # [B, SP * KP], int32
    S: tl.constexpr,
    SP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Walk one request: choose in every row of its scores, then follow what was chosen; grid `[B]`."""
    b = tl.program_id(0)
    row, d = tl.arange(0, SP * KP), tl.arange(0, KP)
    slot, c = row // KP, row % KP
    inside = ((slot < S) & (c < K))[:, None] & (d < K)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    temperature = tl.load(temperature_ptr + b)
    greedy = temperature == 0

    # the choice of every predecessor of every slot
    scores = tl.load(
        scores_ptr + ((b * S + slot) * K + c)[:, None] * K + d[None, :], inside, tl.where(d < K, 0.0, -1e30)[None, :]
    )
    if greedy:
        choice = tl.argmax(scores, 1).to(tl.int32)
    else:
        q = tl.exp((scores - tl.max(scores, 1)[:, None]) / temperature)
        cumulative = tl.cumsum(q / tl.sum(q, 1)[:, None], 1)
        # a scan may round a later sum below an earlier one: the total is the largest
        uniform = tl.load(uniforms_ptr + b * S + slot, slot < S, 0.0)
        below = (cumulative <= (uniform * tl.max(cumulative, 1))[:, None]) & (d < K)[None, :]
        choice = tl.minimum(tl.sum(below.to(tl.int32), 1), K - 1)
    next_ptr += b * SP * KP
    tl.store(next_ptr + row, choice)
    tl.debug_barrier()

    # the walk: one number a slot, from lines this read leaves in the first cache
    warm = tl.load(next_ptr + row)
    chosen = tl.minimum(tl.sum(warm, 0), 0)
    s = tl.arange(0, SP)
    before = tl.zeros((SP,), tl.int32)
    path = tl.zeros((SP,), tl.int32)
    for step in tl.static_range(S):
        before = tl.where(s == step, chosen, before)
        chosen = tl.load(next_ptr + step * KP + chosen)
        path = tl.where(s == step, chosen, path)

    # tokens, and the rows they were drawn from
    place = b * S + s
    inside = (s < S)[:, None] & (d < K)[None, :]
    row = tl.load(scores_ptr + (place * K + before)[:, None] * K + d[None, :], inside, -1e30)
    q = tl.exp((row - tl.max(row, 1)[:, None]) / tl.where(greedy, 1.0, temperature))
    q = tl.where(greedy, (d[None, :] == path[:, None]).to(tl.float32), q / tl.sum(q, 1)[:, None])
    tl.store(q_ptr + place[:, None] * K + d[None, :], q, inside)
    tl.store(tokens_ptr + place, tl.load(candidates_ptr + place * K + path, s < S, 0), s < S)


def _walk_triton(scores, candidates, temperature, uniforms) -> tuple[torch.Tensor, torch.Tensor]:
    batch, slots, width = candidates.shape
    padded = next_power_of_2(slots), next_power_of_2(width)
    tokens = candidates.new_empty(batch, slots)
    q = scores.new_empty(batch, slots, width)
    _walk_kernel[(batch,)](
        scores.contiguous(),
        candidates.contiguous(),
        temperature.contiguous(),
        uniforms.contiguous(),
        tokens,
        q,
        tokens.new_empty(batch, padded[0] * padded[1], dtype=torch.int32),
        S=slots,
        SP=padded[0],
        K=width,
        KP=padded[1],
        num_warps=8,
        **overlap(scores),
    )
    return tokens, q


def candidate_walk(
    scores: torch.Tensor,
    candidates: torch.Tensor,
    temperature: torch.Tensor,
    uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token a slot.

    Args:
        scores (`torch.Tensor` of shape `[B, S, K, K]`, float32): Transition scores, predecessor before candidate.
        candidates (`torch.Tensor` of shape `[B, S, K]`, int64): Token ids of each slot's candidates.
        temperature (`torch.Tensor` of shape `[B]`, float32): Per row; `0` walks greedily.
        uniforms (`torch.Tensor` of shape `[B, S]`, float32): Uniform numbers in `[0, 1)`; unread by greedy rows.

    Returns:
        `tuple` of tokens (`torch.Tensor` of shape `[B, S]`, int64) and the rows of `K` probabilities each token was
        drawn from (`torch.Tensor` of shape `[B, S, K]`, float32; one-hot for greedy rows), `q` of lossless
        verification.

    Raises:
        ValueError: When the shapes do not fit each other.
    """
    batch, slots, width = candidates.shape
    if scores.shape != (batch, slots, width, width):
        expected = [batch, slots, width, width]
        raise ValueError(f"`scores` must have shape [B, S, K, K] = {expected}, got {list(scores.shape)}.")
    if temperature.shape != (batch,) or uniforms.shape != (batch, slots):
        raise ValueError(
            f"`temperature` must have shape [{batch}] and `uniforms` [{batch}, {slots}], "
            f"got {list(temperature.shape)} and {list(uniforms.shape)}."
        )
    implementation = _walk_triton if use_triton(scores) else candidate_walk_reference
    return implementation(scores, candidates, temperature, uniforms)
