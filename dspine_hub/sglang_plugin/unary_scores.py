"""Transition scores for a head whose rows cannot be read: split over ranks, or quantised.

The backbone's own logit of a candidate, `u_d = <norm(h + s W z_0), e_d>`, already went through the head. With the
table `G_d = W^T (w*e_d)`, `[V, M]`, made once by running `M` columns through the same head, every transition score
follows from it in message space; the head's rows are never read, and no rank asks another during a round:

    <r_c, e_d> = (u_d n_0 + s (z_c - z_0).G_d) / n_c
    n_i^2 = (|h|^2 + 2 s z_i.(W^T h) + s^2 z_i^T (W^T W) z_i) / H + eps

`z_c = gate * message` of predecessor token `c`, `z_0` of the feature the backbone predicted, `s = rms(h)`, `W` the
last write, `w` the final norm's weight. Source of the method: arXiv 2609.36173.
"""

import math

import torch
from torch.nn import functional as F

from dspine_hub.kernels import predicted_feature


def unary_scores(space, state, candidates, anchor, unary, norm_eps: float, table: torch.Tensor) -> torch.Tensor:
    """Score every candidate of every slot under every candidate predecessor.

    Args:
        space ([`TransferSpace`]): Weights of the injection.
        state (`torch.Tensor` of shape `[B, S, H]`): Last-layer states before the last injection.
        candidates (`torch.Tensor` of shape `[B, S, K]`, int64): Token ids.
        anchor (`torch.Tensor` of shape `[B]`, int64): Anchors.
        unary (`torch.Tensor` of shape `[B, S, K]`, float32): The backbone's logits of the candidates.
        norm_eps (`float`): Of the final RMSNorm.
        table (`torch.Tensor` of shape `[V, M]`): `G`.

    Returns:
        `torch.Tensor` of shape `[B, S, K, K]`, float32.
    """
    z = _messages(space, state, candidates, anchor).float()  # [B, S, 1 + K, M], row 0 is what the backbone wrote
    h, write = state.float(), space.writes[-1].weight.float()
    norm = torch.linalg.vector_norm(h, dim=-1, keepdim=True)  # [B, S, 1]
    s = norm / math.sqrt(h.shape[-1])
    cross = torch.matmul(z, torch.matmul(h, write)[..., None]).squeeze(-1)  # z.(W^T h), [B, S, 1 + K]
    quadratic = (torch.matmul(z, torch.matmul(write.T, write)) * z).sum(-1)
    scale = torch.sqrt((norm.pow(2) + 2 * s * cross + s.pow(2) * quadratic) / h.shape[-1] + norm_eps)
    rows = F.embedding(candidates, table).float()  # [B, S, K, M]
    change = torch.matmul(z[:, :, 1:] - z[:, :, :1], rows.transpose(-1, -2))  # [B, S, K, K]
    before = (unary * scale[:, :, :1])[:, :, None]
    return (before + s[..., None] * change) / scale[:, :, 1:, None]


def _messages(space, state, candidates, anchor) -> torch.Tensor:
    """Gated messages of the predicted predecessor, then of every candidate predecessor, `[B, S, 1 + K, M]`."""
    feature = predicted_feature(state, space.readouts[-1].weight)
    receiver = (space.receiver_gate(feature) + space.bias)[:, :, None]
    first = anchor[:, None, None].expand(-1, 1, candidates.shape[-1])
    message, gate = space.predecessor_terms(torch.cat((first, candidates[:, :-1]), dim=1))  # [B, S, K, M]
    # slot 1 follows the anchor itself, later slots the feature predicted one slot to the left
    predicted = torch.cat((message[:, :1, :1], space.message(feature[:, :-1, None])), dim=1)
    predicted_gate = torch.cat((gate[:, :1, :1], space.predecessor_gate(feature[:, :-1, None])), dim=1)
    message, gate = torch.cat((predicted, message), dim=2), torch.cat((predicted_gate, gate), dim=2)
    return torch.sigmoid(receiver + gate) * message
