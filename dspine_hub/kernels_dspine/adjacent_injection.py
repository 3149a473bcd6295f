"""Adjacent injection: each slot of a block learns what its left neighbour is about to become.

    f_j  = sqrt(R) * normalize(readout(h_j))                    predicted feature, normalised in float32
    p_1  = sqrt(R) * codes[anchor];  p_j = f_{j-1} for j >= 2   all slots read the state before the write
    g_j  = sigmoid(receiver_gate(f_j) + predecessor_gate(p_j) + bias)
    h_j += rms(h_j) * write(g_j * message(p_j))                 rms in float32; row 0 (the anchor) is never written

The reference computes its matrix products in the dtype of its operands and every norm in float32; called with float32
operands it is the definition, and what training differentiates. `injection_kernels` and `injection_gate_kernels` hold
what a GPU runs. Source of the method: arXiv 2609.36173; weight names follow the public trainer's checkpoints.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional as F

from .injection_gate_kernels import gate_from_library_products, launch_gate
from .injection_kernels import launch_readout, launch_write, library_product, library_product_wins
from .transfer_tables import InjectionWeights, TransferTables
from .triton_support import use_triton


class SlotProjection(NamedTuple):
    """What the last layer's injection already knows of rows, for the transition.

    Args:
        receiver (`torch.Tensor` of shape `[B, n, M]`): Receiver gate before bias and sigmoid.
        write_projection (`torch.Tensor` of shape `[B, n, M]`): `W^T h` of the state before the write. Both are float32
            where a kernel computes them: scores are compared by small differences.
    """

    receiver: torch.Tensor
    write_projection: torch.Tensor

    def slots(self) -> SlotProjection:
        """Leave the anchors' rows of a block out: `[B, N, M]` to `[B, S, M]`."""
        return SlotProjection(self.receiver[:, 1:], self.write_projection[:, 1:])


class InjectedBlock(NamedTuple):
    """Block states after the write, and what a transition needs of it when the layer was the last.

    Args:
        hidden (`torch.Tensor` of shape `[B, N, H]`): States after the write.
        projection ([`SlotProjection`], *optional*): Of the last layer, each `[B, N, M]`; row 0 means nothing.
        message (`torch.Tensor` of shape `[B, N, M]`, *optional*): Gated messages the last layer wrote.
    """

    hidden: torch.Tensor
    projection: SlotProjection | None = None
    message: torch.Tensor | None = None


def predicted_feature(hidden: torch.Tensor, readout: torch.Tensor) -> torch.Tensor:
    """Read the transfer-space feature a state predicts.

    Args:
        hidden (`torch.Tensor` of shape `[..., H]`): Hidden states.
        readout (`torch.Tensor` of shape `[R, H]`): Readout of this layer.

    Returns:
        `torch.Tensor` of shape `[..., R]`: Features of length `sqrt(R)`, in the dtype of `hidden`.
    """
    projected = F.linear(hidden, readout).float()
    return (math.sqrt(readout.shape[0]) * F.normalize(projected, dim=-1)).to(hidden.dtype)


def _write_message(hidden: torch.Tensor, message: torch.Tensor, write: torch.Tensor) -> torch.Tensor:
    rms = torch.linalg.vector_norm(hidden.float(), dim=-1, keepdim=True) / math.sqrt(hidden.shape[-1])
    return hidden + rms.to(hidden.dtype) * F.linear(message, write)


def inject_message(
    hidden: torch.Tensor, receiver: torch.Tensor, predecessor: torch.Tensor, weights: InjectionWeights
) -> torch.Tensor:
    """Write a gated message of the predecessor into a state.

    Args:
        hidden (`torch.Tensor` of shape `[..., H]`): States to write to.
        receiver (`torch.Tensor` of shape `[..., R]`): Features of those states.
        predecessor (`torch.Tensor` of shape `[..., R]`): Features of their left neighbours, length `sqrt(R)`.
        weights ([`InjectionWeights`]): Of this layer.

    Returns:
        `torch.Tensor` of shape `[..., H]`: `hidden + rms(hidden) * write(gate * message)`.
    """
    gate = F.linear(receiver, weights.receiver_gate) + F.linear(predecessor, weights.predecessor_gate) + weights.bias
    return _write_message(hidden, torch.sigmoid(gate) * F.linear(predecessor, weights.message), weights.write)


def adjacent_injection_reference(
    hidden: torch.Tensor,
    anchor_code: torch.Tensor,
    weights: InjectionWeights,
    true_codes: torch.Tensor | None = None,
    replaced: torch.Tensor | None = None,
) -> torch.Tensor:
    """Define adjacent injection from the weights alone; differentiable.

    Args:
        hidden (`torch.Tensor` of shape `[B, N, H]`): Block states after a layer; row 0 is the anchor.
        anchor_code (`torch.Tensor` of shape `[B, R]`): Unit code of the anchor token.
        weights ([`InjectionWeights`]): Of this layer.
        true_codes (`torch.Tensor` of shape `[B, S, R]`, *optional*): Unit codes of the tokens that truly precede the
            slots, for training.
        replaced (`torch.Tensor` of shape `[B]`, bool, *optional*): Blocks whose predecessors are those, and not
            predicted; comes with `true_codes`.

    Returns:
        `torch.Tensor` of shape `[B, N, H]`: The states after the write; row 0 is returned untouched.
    """
    feature = predicted_feature(hidden, weights.readout)
    scale = math.sqrt(weights.readout.shape[0])
    predecessor = torch.cat((scale * anchor_code.to(hidden.dtype)[:, None], feature[:, 1:-1]), dim=1)
    if true_codes is not None:
        predecessor = torch.where(replaced[:, None, None], scale * true_codes.to(hidden.dtype), predecessor)
    return torch.cat((hidden[:, :1], inject_message(hidden[:, 1:], feature[:, 1:], predecessor, weights)), dim=1)


def _inject_torch(hidden: torch.Tensor, anchor: torch.Tensor, layer: int, tables: TransferTables) -> InjectedBlock:
    """Do what the reference does from tables that hold no code.

    The formula stands here once more because what the reference starts from, the codes `[V, R]`, is gone at inference:
    tables keep what they were multiplied to, message and gate of every token. It also keeps what the transition needs.
    """
    weights = tables.layers[layer]
    feature = predicted_feature(hidden, weights.readout)
    receiver = F.linear(feature, weights.receiver_gate)
    message, gate = tables.predecessors.rows(anchor).to(hidden.dtype)[:, None].chunk(2, dim=-1)
    message = torch.cat((message, F.linear(feature[:, 1:-1], weights.message)), dim=1)
    gate = torch.cat((gate, F.linear(feature[:, 1:-1], weights.predecessor_gate)), dim=1)
    message = torch.sigmoid(receiver[:, 1:] + gate + weights.bias) * message
    written = torch.cat((hidden[:, :1], _write_message(hidden[:, 1:], message, weights.write)), dim=1)
    if layer < tables.last:
        return InjectedBlock(written)
    projection = SlotProjection(receiver, torch.matmul(hidden, weights.write))
    return InjectedBlock(written, projection, F.pad(message, (0, 0, 1, 0)))


def _inject_triton(hidden: torch.Tensor, anchor: torch.Tensor, layer: int, tables: TransferTables) -> InjectedBlock:
    weights, last = tables.layers[layer], layer == tables.last
    rows, weight = hidden.contiguous().flatten(0, 1), tables.projection if last else weights.readout
    if library_product_wins(rows, wide=last):
        products = library_product(rows, weight, wide=last)
        message, receiver, square = gate_from_library_products(rows, products, anchor, layer, tables)
    else:
        products = launch_readout(rows, weight, tables.arrivals, wide=last)
        message, receiver, square = launch_gate(rows, products, anchor, layer, tables)
    written = launch_write(rows, message, square, weights.write).view(hidden.shape)
    if not last:
        return InjectedBlock(written)
    write_projection = products[:, weights.readout.shape[0] :]
    receiver, write_projection, message = (
        x.unflatten(0, hidden.shape[:2]) for x in (receiver, write_projection, message)
    )
    return InjectedBlock(written, SlotProjection(receiver, write_projection), message)


def adjacent_injection(
    hidden: torch.Tensor, anchor: torch.Tensor, layer: int, tables: TransferTables
) -> InjectedBlock:
    """Inject each slot's left neighbour into it, in parallel over the block; inference only.

    Args:
        hidden (`torch.Tensor` of shape `[B, N, H]`): Block states after a layer; row 0 is the anchor.
        anchor (`torch.Tensor` of shape `[B]`, int64): Token ids of the anchors.
        layer (`int`): Drafter layer, 0-based.
        tables ([`TransferTables`]): Prepared weights.

    Returns:
        [`InjectedBlock`]: The states after the write, row 0 untouched; if the layer is the last, also the rest.

    Raises:
        ValueError: When `hidden` is no `[B, N, H]` tensor of at least two rows or `anchor` does not fit it.
    """
    if hidden.dim() != 3 or hidden.shape[1] < 2:
        raise ValueError(f"`hidden` must have shape [B, N, H] with N >= 2, got {list(hidden.shape)}.")
    if anchor.shape != hidden.shape[:1]:
        raise ValueError(f"`anchor` must have shape [B] = {list(hidden.shape[:1])}, got {list(anchor.shape)}.")
    if use_triton(hidden):
        return _inject_triton(hidden, anchor, layer, tables)
    return _inject_torch(hidden, anchor, layer, tables)
