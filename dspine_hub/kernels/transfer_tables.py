"""What the three operations read at inference, prepared once from a drafter's weights and its target's LM head.

    predecessors[v] = (message(p_v) | predecessor_gate(p_v)),  p_v = sqrt(R) * codes[v]     [V, 2M], replaces the codes
    projection      = (readout of the last layer | W^T),       W = write of the last layer  [R + M, H]
    root            = R of W = QR, so that |W z| = |root z|                                 [M, M]
    head_messages[v] = W^T (w * lm_head[v]),                   w = weight of the final norm [V, M], optional

Sums run in float32. The projection has the dtype of the weights, the rest that of [`table_dtype`]. Source of the
algebra: the module docstring of `transition_scores`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

# rows of a table built at once: bounds the float32 copy of the operand to 8192 * H values
CHUNK = 8192


class InjectionWeights(NamedTuple):
    """Weights of one layer's injection, as a checkpoint holds them.

    Args:
        readout (`torch.Tensor` of shape `[R, H]`), write (`torch.Tensor` of shape `[H, M]`): Of the layer.
        message, receiver_gate, predecessor_gate (`torch.Tensor` of shape `[M, R]`), bias (`torch.Tensor` of shape
            `[M]`): Shared by all layers.
    """

    readout: torch.Tensor
    write: torch.Tensor
    message: torch.Tensor
    receiver_gate: torch.Tensor
    predecessor_gate: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class TransferTables:
    """Prepared operands of all layers; see [`transfer_tables`] for how they come about.

    One object serves one CUDA stream at a time: kernels that split a sum count their parts in `tickets`.

    Args:
        layers (`tuple[InjectionWeights]` of `L`): The weights themselves, by reference.
        predecessors (`torch.Tensor` of shape `[V, 2M]`): Message and predecessor gate of every token; as `root` and
            `head_messages`, of [`table_dtype`].
        projection (`torch.Tensor` of shape `[R + M, H]`): Readout of the last layer over its transposed write.
        gates (`torch.Tensor` of shape `[3M, R]`): Receiver gate, predecessor gate and message of all layers.
        root (`torch.Tensor` of shape `[M, M]`): Upper triangle whose `root^T root` is `W^T W` of the last write: a
            length read through it is never negative, whatever is rounded.
        norm_weight (`torch.Tensor` of shape `[H]`), norm_eps (`float`): Final RMSNorm.
        head_weight (`torch.Tensor` of shape `[V, H]`): The target's LM head, by reference.
        head_messages (`torch.Tensor` of shape `[V, M]`, *optional*): What every token's head row reads of a message.
        tickets (`torch.Tensor` of shape `[n]`, int32): Zeros between launches.
    """

    layers: tuple[InjectionWeights, ...]
    predecessors: torch.Tensor
    projection: torch.Tensor
    gates: torch.Tensor
    root: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    head_weight: torch.Tensor
    head_messages: torch.Tensor | None
    tickets: torch.Tensor

    @property
    def last(self) -> int:
        """Index of the layer whose write the transition redoes."""
        return len(self.layers) - 1


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of tables for weights of `dtype`: float16 for bfloat16, which is as large and 8 times as fine.

    Candidates are compared by small differences of scores, and products of weights need none of bfloat16's range.
    """
    return torch.float16 if dtype == torch.bfloat16 else dtype


def stored(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round values to what a table of that name holds.

    Raises:
        ValueError: When a value is beyond the range of the table's dtype.
    """
    rounded = values.to(dtype)
    if not bool(rounded.isfinite().all()):
        largest = float(values.abs().max())
        raise ValueError(
            f"`{name}` must be finite in {dtype}, got values up to {largest:.3g}. -> load the drafter with "
            '`dtype="float32"` (SGLang: `--dtype float32`)'
        )
    return rounded


def _table(name: str, rows: torch.Tensor, weight: torch.Tensor, scale) -> torch.Tensor:
    """Compute `scale * rows @ weight.T` in float32, a chunk of rows at a time."""
    dtype = table_dtype(weight.dtype)
    table = torch.empty(rows.shape[0], weight.shape[0], dtype=dtype, device=weight.device)
    wide = weight.float()
    for out, chunk in zip(table.split(CHUNK), rows.split(CHUNK), strict=True):
        out.copy_(stored(name, F.linear(chunk.to(weight.device, torch.float32) * scale, wide), dtype))
    return table


@torch.no_grad()
def head_message_table(head_weight: torch.Tensor, write: torch.Tensor, norm_weight: torch.Tensor) -> torch.Tensor:
    """Compute what rows of an LM head read of a message: `W^T (w * e)` of each, `[V, M]`.

    Args:
        head_weight (`torch.Tensor` of shape `[V, H]`): Rows of the head, all or some.
        write (`torch.Tensor` of shape `[H, M]`): Of the last layer.
        norm_weight (`torch.Tensor` of shape `[H]`): Of the final RMSNorm.
    """
    return _table("head_messages", head_weight, write.T, norm_weight.float())


@torch.no_grad()
def transfer_tables(
    layers: list[InjectionWeights],
    codes: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    head_weight: torch.Tensor,
    head_messages: bool = True,
) -> TransferTables:
    """Prepare the tables.

    Args:
        layers (`list[InjectionWeights]`): Weights of every layer's injection, first to last.
        codes (`torch.Tensor` of shape `[V, R]`): Unit code of every token; not kept.
        norm_weight (`torch.Tensor` of shape `[H]`), norm_eps (`float`): Final RMSNorm.
        head_weight (`torch.Tensor` of shape `[V, H]`): The target's LM head.
        head_messages (`bool`): Keep the `[V, M]` table that spares a round `2 * S * K * H * M` operations a request.
            It costs `V * M` values: 156 MB in half precision for Qwen3-8B and `M = 512`.

    Returns:
        [`TransferTables`] on the device of the weights.

    Raises:
        ValueError: When codes and head have another number of rows or columns than the weights say, or a table holds
            a value beyond the range of its dtype.
    """
    last = layers[-1]
    rank, hidden = last.readout.shape
    if codes.shape[1] != rank:
        raise ValueError(f"`codes` must have shape [V, R] with R = {rank}, got {list(codes.shape)}.")
    if tuple(head_weight.shape) != (codes.shape[0], hidden):
        expected = [codes.shape[0], hidden]
        raise ValueError(f"`head_weight` must have shape [V, H] = {expected}, got {list(head_weight.shape)}.")
    root = torch.linalg.qr(last.write.double(), mode="r").R
    # a write with more columns than rows has a flat triangle
    root = F.pad(root, (0, 0, 0, root.shape[1] - root.shape[0]))
    predecessor = torch.cat((last.message, last.predecessor_gate))
    return TransferTables(
        layers=tuple(layers),
        predecessors=_table("predecessors", codes, predecessor, math.sqrt(rank)),
        projection=torch.cat((last.readout, last.write.T)).contiguous(),
        gates=torch.cat((last.receiver_gate, last.predecessor_gate, last.message)),
        # a factorisation returns columns
        root=stored("root", root, table_dtype(last.write.dtype)).contiguous(),
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        head_weight=head_weight,
        head_messages=head_message_table(head_weight, last.write, norm_weight) if head_messages else None,
        # one a tile whose sum is split: splitting stops long before a grid has as many tiles
        tickets=torch.zeros(4096, dtype=torch.int32, device=last.write.device),
    )
