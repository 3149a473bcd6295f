"""Adjacent injection: each slot of a block learns what its left neighbour is about to become.

    f_j  = sqrt(R) * normalize(readout(h_j))                    predicted feature, normalised in float32
    p_1  = sqrt(R) * codes[anchor];  p_j = f_{j-1} for j >= 2   all slots read the state before the write
    g_j  = sigmoid(receiver_gate(f_j) + predecessor_gate(p_j) + bias)
    h_j += rms(h_j) * write(g_j * message(p_j))                 rms in float32; row 0 (the anchor) is never written

The reference computes its matrix products in the dtype of its operands and every norm in float32; called with float32
operands it is the definition. Source of the method: arXiv 2609.36173; weight names follow the public trainer's
checkpoints.
"""

import math

import torch
from torch.nn import functional as F


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


def inject_message(
    hidden: torch.Tensor,
    receiver: torch.Tensor,
    predecessor: torch.Tensor,
    write: torch.Tensor,
    message: torch.Tensor,
    receiver_gate: torch.Tensor,
    predecessor_gate: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Write a gated message of the predecessor into a state.

    Args:
        hidden (`torch.Tensor` of shape `[..., H]`): States to write to.
        receiver (`torch.Tensor` of shape `[..., R]`): Features of those states.
        predecessor (`torch.Tensor` of shape `[..., R]`): Features of their left neighbours, length `sqrt(R)`.
        write (`torch.Tensor` of shape `[H, M]`): Write of this layer.
        message, receiver_gate, predecessor_gate (`torch.Tensor` of shape `[M, R]`): Projections shared by all layers.
        bias (`torch.Tensor` of shape `[M]`): Gate bias.

    Returns:
        `torch.Tensor` of shape `[..., H]`: `hidden + rms(hidden) * write(gate * message)`.
    """
    gate = torch.sigmoid(F.linear(receiver, receiver_gate) + F.linear(predecessor, predecessor_gate) + bias)
    delta = F.linear(gate * F.linear(predecessor, message), write)
    rms = torch.linalg.vector_norm(hidden.float(), dim=-1, keepdim=True) / math.sqrt(hidden.shape[-1])
    return hidden + rms.to(hidden.dtype) * delta


def adjacent_injection_reference(
    hidden: torch.Tensor,
    anchor_code: torch.Tensor,
    readout: torch.Tensor,
    write: torch.Tensor,
    message: torch.Tensor,
    receiver_gate: torch.Tensor,
    predecessor_gate: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Define adjacent injection; see [`adjacent_injection`] for shapes."""
    feature = predicted_feature(hidden, readout)
    anchor_feature = math.sqrt(readout.shape[0]) * anchor_code.to(hidden.dtype)
    predecessor = torch.cat((anchor_feature[:, None], feature[:, 1:-1]), dim=1)
    written = inject_message(
        hidden[:, 1:], feature[:, 1:], predecessor, write, message, receiver_gate, predecessor_gate, bias
    )
    return torch.cat((hidden[:, :1], written), dim=1)


def adjacent_injection(
    hidden: torch.Tensor,
    anchor_code: torch.Tensor,
    readout: torch.Tensor,
    write: torch.Tensor,
    message: torch.Tensor,
    receiver_gate: torch.Tensor,
    predecessor_gate: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    """Inject each slot's left neighbour into it, in parallel over the block.

    Args:
        hidden (`torch.Tensor` of shape `[B, N, H]`): Block states after a layer; row 0 is the anchor.
        anchor_code (`torch.Tensor` of shape `[B, R]`): Unit code of the anchor token.
        readout (`torch.Tensor` of shape `[R, H]`): Readout of this layer.
        write (`torch.Tensor` of shape `[H, M]`): Write of this layer.
        message, receiver_gate, predecessor_gate (`torch.Tensor` of shape `[M, R]`): Projections shared by all layers.
        bias (`torch.Tensor` of shape `[M]`): Gate bias.

    Returns:
        `torch.Tensor` of shape `[B, N, H]`: The states after the write; row 0 is returned untouched.

    Raises:
        ValueError: When `hidden` is no `[B, N, H]` tensor of at least two rows or `anchor_code` does not fit it.
    """
    if hidden.dim() != 3 or hidden.shape[1] < 2:
        raise ValueError(f"`hidden` must have shape [B, N, H] with N >= 2, got {list(hidden.shape)}.")
    if anchor_code.shape != (hidden.shape[0], readout.shape[0]):
        expected = [hidden.shape[0], readout.shape[0]]
        raise ValueError(f"`anchor_code` must have shape [B, R] = {expected}, got {list(anchor_code.shape)}.")
    return adjacent_injection_reference(
        hidden, anchor_code, readout, write, message, receiver_gate, predecessor_gate, bias
    )
