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
    S: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    b = tl.program_id(0)
    c, d = tl.arange(0, KP), tl.arange(0, KP)
    inside = (c < K)[:, None] & (d < K)[None, :]
    at = c[:, None] * K + d[None, :]
    temperature = tl.load(temperature_ptr + b)
    greedy = temperature == 0
    scale = tl.where(greedy, 1.0, temperature)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    chosen = 0
    for slot in tl.static_range(S):
        place = b * S + slot
        row = tl.load(scores_ptr + place * K * K + at, inside, -float("inf"))
        best = tl.argmax(row, 1)
        shifted = tl.where(inside, tl.exp((row - tl.max(row, 1)[:, None]) / scale), 0.0)
        q = shifted / tl.sum(shifted, 1)[:, None]
        # a scan may round a later sum below an earlier one: the total is the largest
        cumulative = tl.cumsum(q, 1)
        total = tl.max(cumulative, 1)
        below = (cumulative <= tl.load(uniforms_ptr + place) * total[:, None]) & inside
        drawn = tl.minimum(tl.sum(below.to(tl.int32), 1), K - 1)
        index = tl.where(greedy, best, drawn)  # of every predecessor, [KP]
        mine = c == chosen
        chosen = tl.sum(tl.where(mine, index, 0), 0)
        q = tl.where(greedy, (d == chosen).to(tl.float32), tl.sum(tl.where(mine[:, None], q, 0.0), 0))
        tl.store(q_ptr + place * K + d, q, d < K)
        tl.store(tokens_ptr + place, tl.load(candidates_ptr + place * K + chosen))


def _walk_triton(scores, candidates, temperature, uniforms) -> tuple[torch.Tensor, torch.Tensor]:
    batch, slots, width = candidates.shape
    tokens = candidates.new_empty(batch, slots)
    q = scores.new_empty(batch, slots, width)
    _walk_kernel[(batch,)](
        scores.contiguous(),
        candidates.contiguous(),
        temperature.contiguous(),
        uniforms.contiguous(),
        tokens,
        q,
        S=slots,
        K=width,
        KP=next_power_of_2(width),
        num_warps=1,
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
