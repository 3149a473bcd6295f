"""Transition scores for a head whose rows cannot be read: split over ranks, or quantised.

The backbone's own logit of a candidate, `u_d = <norm(h + s W z_0), e_d>`, already went through the head. With the
table `G_d = W^T (w*e_d)`, `[V, M]`, made once by running `M` columns through the same head, every transition score
follows from it in message space; the head's rows are never read, and no rank asks another during a round:

    <r_c, e_d> = (u_d n_0 + s (z_c - z_0).G_d) / n_c
    n_i^2 = (|h|^2 + 2 s z_i.(W^T h) + s^2 z_i^T (W^T W) z_i) / H + eps

`z_c = gate * message` of predecessor token `c`, `z_0` of the feature the backbone predicted, `s = rms(h)`, `W` the
last write, `w` the final norm's weight. Source of the method: arXiv 2609.36173.
"""

import torch
from torch.nn import functional as F

from dspine_hub.kernels import SlotProjection, TransferTables, predecessors_of, predicted_feature


def unary_scores(
    state: torch.Tensor,
    candidates: torch.Tensor,
    anchor: torch.Tensor,
    unary: torch.Tensor,
    tables: TransferTables,
    projection: SlotProjection,
) -> torch.Tensor:
    """Score every candidate of every slot under every candidate predecessor.

    Args:
        state (`torch.Tensor` of shape `[B, S, H]`): Last-layer states before the last injection.
        candidates (`torch.Tensor` of shape `[B, S, K]`, int64): Token ids.
        anchor (`torch.Tensor` of shape `[B]`, int64): Anchors.
        unary (`torch.Tensor` of shape `[B, S, K]`, float32): The backbone's logits of the candidates.
        tables ([`TransferTables`]): Prepared weights; `head_messages` is `G`, `head_weight` is not read.
        projection ([`SlotProjection`]): Receiver gates and `W^T h`, each `[B, S, M]`.

    Returns:
        `torch.Tensor` of shape `[B, S, K, K]`, float32.
    """
    z = _messages(state, candidates, anchor, tables, projection)  # [B, S, 1 + K, M], row 0 is what the backbone wrote
    square = state.float().pow(2).sum(-1, keepdim=True)  # |h|^2, [B, S, 1]
    s = (square / state.shape[-1]).sqrt()
    cross = torch.matmul(z, projection.update.float()[..., None]).squeeze(-1)  # z.(W^T h), [B, S, 1 + K]
    quadratic = torch.matmul(z, tables.root.float().T).pow(2).sum(-1)
    mean = (square + 2 * s * cross + s.pow(2) * quadratic).clamp_min(0) / state.shape[-1]
    scale = (mean + tables.norm_eps).sqrt()
    rows = F.embedding(candidates, tables.head_messages).float()  # [B, S, K, M]
    change = torch.matmul(z[:, :, 1:] - z[:, :, :1], rows.transpose(-1, -2))  # [B, S, K, K]
    before = (unary * scale[:, :, :1])[:, :, None]
    return (before + s[..., None] * change) / scale[:, :, 1:, None]


def _messages(state, candidates, anchor, tables, projection) -> torch.Tensor:
    """Gated messages of the predicted predecessor, then of every candidate predecessor, `[B, S, 1 + K, M]`."""
    weights = tables.layers[tables.last]
    rows = F.embedding(predecessors_of(candidates, anchor), tables.predecessors)  # [B, S, K, 2M]
    message, gate = rows.chunk(2, dim=-1)
    # slot 1 follows the anchor itself, later slots the feature predicted one slot to the left
    feature = predicted_feature(state[:, :-1], weights.readout)[:, :, None]
    own = torch.cat((message[:, :1, :1], F.linear(feature, weights.message)), dim=1)
    own_gate = torch.cat((gate[:, :1, :1], F.linear(feature, weights.predecessor_gate)), dim=1)
    message, gate = torch.cat((own, message), dim=2).float(), torch.cat((own_gate, gate), dim=2).float()
    return torch.sigmoid(projection.receiver.float()[:, :, None] + gate + weights.bias.float()) * message
