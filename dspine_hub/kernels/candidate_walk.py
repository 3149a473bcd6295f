"""Candidate walk: from the anchor, follow the row of the token just chosen through the transition scores.

`S` steps over `K` numbers each; no model runs. Greedy rows take the arg-max; sampled rows draw from
`softmax(row / temperature)` by inverting its distribution function at a uniform number given by the caller, so that
every implementation of this file picks the same token from the same numbers. Source of the method: arXiv 2609.36173.
"""

import torch


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
    return candidate_walk_reference(scores, candidates, temperature, uniforms)
