"""Transition scores: for every slot, each candidate given each candidate of the slot before it.

The last write of the last layer is redone with a concrete predecessor token in place of the predicted feature, and the
refined state meets the LM-head rows of the slot's candidates:

    r = norm(h + rms(h) * write(sigmoid(receiver_gate(f) + predecessor_gate(p_c) + bias) * message(p_c)))
    scores[s, c, d] = <r, lm_head[d]>,   p_c = sqrt(R) * codes[c],   f = predicted feature of h

The reference says it in *hidden space*: `r` for every pair of slot and predecessor, `[B, S, K, H]` values. The rest of
this file says the same in *message space*, around `z = gate * message(p_c)`, `M` values a row:

    <r, e_d> = (<h, w*e_d> + s z.G_d) / sqrt((|h|^2 + 2 s z.(W^T h) + s^2 |F z|^2) / H + eps)

with `s = rms(h)`, `W` the write, `F` its triangular factor (`F^T F = W^T W`), `w` the norm's weight and
`G_d = W^T (w*e_d)`. What depends on a token alone comes from the tables of `transfer_tables`, what the last injection
has already computed from its projection. A GPU makes two launches of it, with nothing larger than the scores in
memory: the lengths `|F z|^2`, in `transition_length_kernels`, then all the rest, in `transition_kernels`.

A head that is split over ranks, or quantised, has no rows to read. The backbone's own logit `u_d` went through it, and
gives the product with the message `z_0` the slot was written:

    <h, w*e_d> = u_d sqrt(|h + s W z_0|^2 / H + eps) - s z_0.G_d

Source of the method: arXiv 2609.36173.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional as F

from .adjacent_injection import SlotProjection, inject_message, predicted_feature
from .transfer_tables import InjectionWeights, TransferTables
from .transition_kernels import launch_scores
from .transition_length_kernels import gathered_head_messages, launch_lengths, slot_operands
from .triton_support import use_triton


class BackboneLogits(NamedTuple):
    """The backbone's own logits of the candidates, and the states they are of; in place of the head's rows.

    Args:
        logits (`torch.Tensor` of shape `[B, S, K]`, float32): Of the candidates.
        message (`torch.Tensor` of shape `[B, S, M]`): Gated messages the last injection wrote.
        length (`torch.Tensor` of shape `[B, S]`): Of the states after that write.
    """

    logits: torch.Tensor
    message: torch.Tensor
    length: torch.Tensor


def predecessors_of(candidates: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Shift the candidates right by one slot; the anchor, repeated, precedes slot 1. Returns `[B, S, K]` token ids."""
    first = anchor[:, None, None].expand(-1, 1, candidates.shape[-1])
    return torch.cat((first, candidates[:, :-1]), dim=1)


def transition_scores_reference(
    state: torch.Tensor,
    candidates: torch.Tensor,
    anchor: torch.Tensor,
    codes: torch.Tensor,
    weights: InjectionWeights,
    norm_weight: torch.Tensor,
    norm_eps: float,
    head_weight: torch.Tensor,
) -> torch.Tensor:
    """Define the scores in hidden space, from the weights alone; differentiable.

    Args:
        state (`torch.Tensor` of shape `[B, S, H]`): Last-layer states of the proposal slots before the last injection.
        candidates (`torch.Tensor` of shape `[B, S, K]`, int64): Token ids of each slot's candidates.
        anchor (`torch.Tensor` of shape `[B]`, int64): Token ids of the anchors, the predecessors of slot 1.
        codes (`torch.Tensor` of shape `[V, R]`): Unit code of every token.
        weights ([`InjectionWeights`]): Of the last layer.
        norm_weight (`torch.Tensor` of shape `[H]`), norm_eps (`float`): Final RMSNorm.
        head_weight (`torch.Tensor` of shape `[V, H]`): The target's LM head.

    Returns:
        `torch.Tensor` of shape `[B, S, K, K]`, float32: As of [`transition_scores`].
    """
    receiver = predicted_feature(state, weights.readout)[:, :, None]
    scale = math.sqrt(weights.readout.shape[0])
    predecessor = scale * F.embedding(predecessors_of(candidates, anchor), codes).to(state.dtype)
    wide = state[:, :, None].expand(-1, -1, candidates.shape[-1], -1)
    refined = inject_message(wide, receiver, predecessor, weights).float()
    normed = (refined * torch.rsqrt(refined.pow(2).mean(-1, keepdim=True) + norm_eps)).to(state.dtype) * norm_weight
    rows = F.embedding(candidates, head_weight).to(state.dtype)
    return torch.matmul(normed, rows.transpose(-1, -2)).float()


def slot_projection(state: torch.Tensor, tables: TransferTables) -> SlotProjection:
    """Compute the projection of states `[B, S, H]` whose injection did not keep it."""
    weights = tables.layers[tables.last]
    receiver = F.linear(predicted_feature(state, weights.readout), weights.receiver_gate)
    return SlotProjection(receiver, torch.matmul(state, weights.write))


def _scores_torch(state, candidates, anchor, projection, tables, backbone) -> torch.Tensor:
    weights = tables.layers[tables.last]
    message, gate = tables.predecessors.rows(predecessors_of(candidates, anchor)).float().chunk(2, dim=-1)
    z = message * torch.sigmoid(projection.receiver.float()[:, :, None] + gate + weights.bias.float())  # [B, S, K, M]
    h = state.float()
    square = h.pow(2).sum(dim=-1, keepdim=True)  # [B, S, 1]
    s = (square / h.shape[-1]).sqrt()
    if tables.head_messages is not None:
        head = tables.head_messages.rows(candidates).float()  # G_d, [B, S, K, M]
    if backbone is None:
        rows = F.embedding(candidates, tables.head_weight).float() * tables.norm_weight.float()
        dots = torch.matmul(rows, h[..., None]).squeeze(-1)  # <h, w*e_d>, [B, S, K]
        if tables.head_messages is None:
            head = torch.matmul(rows, weights.write.float())
    else:
        scale = (backbone.length.float().pow(2) / h.shape[-1] + tables.norm_eps).sqrt()[..., None]
        own = torch.matmul(head, backbone.message.float()[..., None]).squeeze(-1)  # z_0.G_d, [B, S, K]
        dots = backbone.logits * scale - s * own
    numerator = dots[:, :, None, :] + s[..., None] * torch.matmul(z, head.transpose(-1, -2))
    cross = torch.matmul(z, projection.write_projection.float()[..., None]).squeeze(-1)  # z.(W^T h), [B, S, K]
    quadratic = torch.matmul(z, tables.write_factor.float().T).pow(2).sum(-1)  # |F z|^2, [B, S, K]
    mean_square = (square + 2 * s * cross + s.pow(2) * quadratic).clamp_min(0) / h.shape[-1]
    return numerator * torch.rsqrt(mean_square + tables.norm_eps)[..., None]


def _scores_triton(state, candidates, anchor, projection, tables, backbone) -> torch.Tensor:
    slots = slot_operands(state, candidates, anchor, *projection)
    # in front of the lengths: the launch of the scores reads them before it waits for the launch before it
    gathered = gathered_head_messages(slots.candidates, tables) if tables.head_messages is None else None
    out = state.new_empty(*candidates.shape, candidates.shape[-1], dtype=torch.float32)
    lengths = launch_lengths(slots, tables, out)
    launch_scores(slots, gathered, backbone, lengths, tables, out)
    return out


def transition_scores(
    state: torch.Tensor,
    candidates: torch.Tensor,
    anchor: torch.Tensor,
    tables: TransferTables,
    projection: SlotProjection | None = None,
    backbone: BackboneLogits | None = None,
) -> torch.Tensor:
    """Score every candidate of every slot under every candidate predecessor; inference only.

    Args:
        state (`torch.Tensor` of shape `[B, S, H]`): Last-layer states of the proposal slots before the last injection.
        candidates (`torch.Tensor` of shape `[B, S, K]`, int64): Token ids of each slot's candidates.
        anchor (`torch.Tensor` of shape `[B]`, int64): Token ids of the anchors, the predecessors of slot 1.
        tables ([`TransferTables`]): Prepared weights.
        projection ([`SlotProjection`], *optional*): The slots of what the last layer's injection returned; computed
            when absent.
        backbone ([`BackboneLogits`], *optional*): Where the head's rows cannot be read; needs `tables.head_messages`.

    Returns:
        `torch.Tensor` of shape `[B, S, K, K]`, float32: `scores[b, s, c, d]`, logit of candidate `d` of slot `s` after
        candidate `c` of slot `s - 1`. The rows of the first slot are all equal: each is conditioned on the anchor.

    Raises:
        ValueError: When `candidates`, `anchor`, `projection` or `backbone` do not fit `state`, or tables lack a table.
    """
    if candidates.dim() != 3 or candidates.shape[:2] != state.shape[:2]:
        raise ValueError(
            f"`candidates` must have shape [B, S, K] with [B, S] = {list(state.shape[:2])}, "
            f"got {list(candidates.shape)}."
        )
    if anchor.shape != state.shape[:1]:
        raise ValueError(f"`anchor` must have shape [B] = {list(state.shape[:1])}, got {list(anchor.shape)}.")
    if projection is None:
        projection = slot_projection(state, tables)
    expected = (*state.shape[:2], tables.write_factor.shape[0])
    for name, tensor in zip(SlotProjection._fields, projection, strict=True):
        if tensor.shape != expected:
            raise ValueError(f"`{name}` must have shape [B, S, M] = {list(expected)}, got {list(tensor.shape)}.")
    if backbone is not None:
        if tables.head_messages is None:
            raise ValueError("`tables` must hold `head_messages` where the head's rows are not read, got none.")
        for name, shape in (("logits", candidates.shape), ("message", expected), ("length", state.shape[:2])):
            found = getattr(backbone, name).shape
            if found != shape:
                raise ValueError(f"`{name}` of the backbone must have shape {list(shape)}, got {list(found)}.")
    implementation = _scores_triton if use_triton(state) else _scores_torch
    return implementation(state, candidates, anchor, projection, tables, backbone)
