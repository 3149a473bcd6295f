"""Transition scores: for every slot, each candidate given each candidate of the slot before it.

The last write of the last layer is redone with a concrete predecessor token in place of the predicted feature, and the
refined state meets the LM-head rows of the slot's candidates:

    r = norm(h + rms(h) * write(sigmoid(receiver_gate(f) + predecessor_gate(p_c) + bias) * message(p_c)))
    scores[s, c, d] = <r, lm_head[d]>,   p_c = sqrt(R) * codes[c],   f = predicted feature of h

Two forms of the same numbers. *Hidden space* builds `r` for every pair of slot and predecessor, `[B, S, K, H]` values.
*Message space* expands the norm and the dot product around `z = gate * message(p_c)`, `M` values a row:

    <r, e_d> = (<h, w*e_d> + s z.G_d) / sqrt((|h|^2 + 2 s z.(W^T h) + s^2 z^T (W^T W) z) / H + eps)

with `s = rms(h)`, `W` the write, `w` the norm's weight, `G_d = W^T (w*e_d)`. Source of the method: arXiv 2609.36173.
"""

import math

import torch
from torch.nn import functional as F

from .adjacent_injection import inject_message, predicted_feature


def _predecessors(candidates: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Shift the candidates right by one slot; the anchor, repeated, precedes slot 1. Returns `[B, S, K]` token ids."""
    first = anchor[:, None, None].expand(-1, 1, candidates.shape[-1])
    return torch.cat((first, candidates[:, :-1]), dim=1)


def transition_scores_reference(
    state: torch.Tensor,
    candidates: torch.Tensor,
    anchor: torch.Tensor,
    codes: torch.Tensor,
    readout: torch.Tensor,
    write: torch.Tensor,
    message: torch.Tensor,
    receiver_gate: torch.Tensor,
    predecessor_gate: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    head_weight: torch.Tensor,
) -> torch.Tensor:
    """Define the scores in hidden space; see [`transition_scores`] for shapes."""
    receiver = predicted_feature(state, readout)[:, :, None]
    predecessor = math.sqrt(readout.shape[0]) * F.embedding(_predecessors(candidates, anchor), codes).to(state.dtype)
    refined = inject_message(
        state[:, :, None].expand(-1, -1, candidates.shape[-1], -1),
        receiver,
        predecessor,
        write,
        message,
        receiver_gate,
        predecessor_gate,
        bias,
    )
    wide = refined.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm_eps)).to(state.dtype) * norm_weight
    rows = F.embedding(candidates, head_weight).to(state.dtype)
    return torch.matmul(normed, rows.transpose(-1, -2)).float()


def transition_scores_message_reference(
    state: torch.Tensor,
    candidates: torch.Tensor,
    anchor: torch.Tensor,
    codes: torch.Tensor,
    readout: torch.Tensor,
    write: torch.Tensor,
    message: torch.Tensor,
    receiver_gate: torch.Tensor,
    predecessor_gate: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    head_weight: torch.Tensor,
) -> torch.Tensor:
    """Compute the scores in message space, in float32; see [`transition_scores`] for shapes."""
    receiver = F.linear(predicted_feature(state, readout), receiver_gate)[:, :, None]
    predecessor = math.sqrt(readout.shape[0]) * F.embedding(_predecessors(candidates, anchor), codes).to(state.dtype)
    gate = torch.sigmoid(receiver + F.linear(predecessor, predecessor_gate) + bias)
    z = (gate * F.linear(predecessor, message)).float()  # [B, S, K, M]

    h, w = state.float(), write.float()
    # vector_norm, whose gradient at a zero state is zero, where a square root's is infinite
    norm = torch.linalg.vector_norm(h, dim=-1, keepdim=True)  # [B, S, 1]
    s = norm / math.sqrt(h.shape[-1])
    rows = F.embedding(candidates, head_weight).float() * norm_weight.float()  # [B, S, K, H]
    dots = torch.matmul(rows, h[..., None]).squeeze(-1)  # <h, w*e_d>, [B, S, K]
    table = torch.matmul(rows, w)  # G_d, [B, S, K, M]
    numerator = dots[:, :, None, :] + s[..., None] * torch.matmul(z, table.transpose(-1, -2))
    cross = torch.matmul(z, torch.matmul(h, w)[..., None]).squeeze(-1)  # z.(W^T h), [B, S, K]
    quadratic = (torch.matmul(z, torch.matmul(w.T, w)) * z).sum(-1)  # z^T (W^T W) z, [B, S, K]
    mean_square = (norm.pow(2) + 2 * s * cross + s.pow(2) * quadratic) / h.shape[-1]
    return numerator * torch.rsqrt(mean_square + norm_eps)[..., None]


def transition_scores(
    state: torch.Tensor,
    candidates: torch.Tensor,
    anchor: torch.Tensor,
    codes: torch.Tensor,
    readout: torch.Tensor,
    write: torch.Tensor,
    message: torch.Tensor,
    receiver_gate: torch.Tensor,
    predecessor_gate: torch.Tensor,
    bias: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    head_weight: torch.Tensor,
) -> torch.Tensor:
    """Score every candidate of every slot under every candidate predecessor.

    Args:
        state (`torch.Tensor` of shape `[B, S, H]`): Last-layer states of the proposal slots before the last injection.
        candidates (`torch.Tensor` of shape `[B, S, K]`, int64): Token ids of each slot's candidates.
        anchor (`torch.Tensor` of shape `[B]`, int64): Token ids of the anchors, the predecessors of slot 1.
        codes (`torch.Tensor` of shape `[V, R]`): Unit code of every token.
        readout (`torch.Tensor` of shape `[R, H]`), write (`torch.Tensor` of shape `[H, M]`): Of the last layer.
        message, receiver_gate, predecessor_gate (`torch.Tensor` of shape `[M, R]`), bias (`torch.Tensor` of shape
            `[M]`): Shared injection weights.
        norm_weight (`torch.Tensor` of shape `[H]`), norm_eps (`float`): Final RMSNorm.
        head_weight (`torch.Tensor` of shape `[V, H]`): The target's LM head.

    Returns:
        `torch.Tensor` of shape `[B, S, K, K]`, float32: `scores[b, s, c, d]`, logit of candidate `d` of slot `s` after
        candidate `c` of slot `s - 1`. The rows of the first slot are all equal: each is conditioned on the anchor.

    Raises:
        ValueError: When `candidates` or `anchor` do not fit `state`.
    """
    if candidates.dim() != 3 or candidates.shape[:2] != state.shape[:2]:
        raise ValueError(
            f"`candidates` must have shape [B, S, K] with [B, S] = {list(state.shape[:2])}, "
            f"got {list(candidates.shape)}."
        )
    if anchor.shape != state.shape[:1]:
        raise ValueError(f"`anchor` must have shape [B] = {list(state.shape[:1])}, got {list(anchor.shape)}.")
    return transition_scores_message_reference(
        state,
        candidates,
        anchor,
        codes,
        readout,
        write,
        message,
        receiver_gate,
        predecessor_gate,
        bias,
        norm_weight,
        norm_eps,
        head_weight,
    )
