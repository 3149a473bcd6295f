"""What the three operations read at inference, prepared once from a drafter's weights and its target's LM head.

    predecessors[v] = (message(p_v) | predecessor_gate(p_v)),  p_v = sqrt(R) * codes[v]     [V, 2M], replaces the codes
    projection      = (readout of the last layer | W^T),       W = write of the last layer  [R + M, H]
    write_factor    = F of W = QF, F triangular, Q orthonormal: |W z| = |F z|               [M, M]
    head_messages[v] = W^T (w * lm_head[v]),                   w = weight of the final norm [V, M], optional

Sums run in float32. The two tables of tokens are [`TokenTable`]s, the rest has the dtype of the weights. Source of the
algebra: the module docstring of `transition_scores`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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


class TokenTable(NamedTuple):
    """A row of numbers for every token: `values[v] * scale[v]`.

    Candidates are compared by small differences of scores, so weights of half precision get rows in fixed point: as
    large as in bfloat16, and rounded to 2^-16 of their largest number, where bfloat16 rounds each to 2^-9 of itself.

    Args:
        values (`torch.Tensor` of shape `[V, C]`): int16, or float32 as the weights are.
        scale (`torch.Tensor` of shape `[V]`, float32): 1 where values are not int16.
    """

    values: torch.Tensor
    scale: torch.Tensor

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the numbers of tokens `[...]`, `[..., C]`, in float32."""
        return self.values[ids] * self.scale[ids][..., None]

    def copy_(self, other: TokenTable) -> None:
        """Take the numbers of the first `V` rows of another table, in place."""
        for mine, theirs in zip(self, other, strict=True):
            mine.copy_(theirs[: mine.shape[0]])


@dataclass(frozen=True)
class TransferTables:
    """Prepared operands of all layers; see [`transfer_tables`] for how they come about.

    One object serves one CUDA stream at a time: kernels that split a sum count their parts in `arrivals`.

    Args:
        layers (`tuple[InjectionWeights]` of `L`): The weights themselves, by reference.
        predecessors ([`TokenTable`] of shape `[V, 2M]`): Message and predecessor gate of every token.
        projection (`torch.Tensor` of shape `[R + M, H]`): Readout of the last layer over its transposed write.
        gates (`torch.Tensor` of shape `[3M, R]`): Receiver gate, predecessor gate and message of all layers.
        write_factor (`torch.Tensor` of shape `[M, M]`): Upper triangle `F` whose `F^T F` is `W^T W` of the last write:
            a length read through it is never negative, whatever is rounded.
        norm_weight (`torch.Tensor` of shape `[H]`), norm_eps (`float`): Final RMSNorm.
        head_weight (`torch.Tensor` of shape `[V, H]`): The target's LM head, by reference.
        head_messages ([`TokenTable`] of shape `[V, M]`, *optional*): What every token's head row reads of a message.
        arrivals (`torch.Tensor` of shape `[n]`, int32): Counts the parts of split sums; zeros between launches.
    """

    layers: tuple[InjectionWeights, ...]
    predecessors: TokenTable
    projection: torch.Tensor
    gates: torch.Tensor
    write_factor: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    head_weight: torch.Tensor
    head_messages: TokenTable | None
    arrivals: torch.Tensor

    @property
    def last(self) -> int:
        """Index of the layer whose write the transition redoes."""
        return len(self.layers) - 1


def zero_table(tokens: int, columns: int, like: torch.Tensor) -> TokenTable:
    """Make room for a table of `tokens` rows beside weights `like`."""
    fixed = like.dtype in (torch.bfloat16, torch.float16)
    values = like.new_zeros(tokens, columns, dtype=torch.int16 if fixed else like.dtype)
    return TokenTable(values, like.new_ones(tokens, dtype=torch.float32 if fixed else like.dtype))


def fill_table(name: str, table: TokenTable, rows: Iterable[torch.Tensor]) -> TokenTable:
    """Write a table from chunks of at most [`CHUNK`] rows, in order.

    Raises:
        ValueError: When a number is not finite.
    """
    for values, scale, chunk in zip(table.values.split(CHUNK), table.scale.split(CHUNK), rows, strict=True):
        largest = chunk.abs().amax(dim=-1)
        if not bool(largest.isfinite().all()):
            raise ValueError(
                f"`{name}` must hold finite numbers, got {int((~largest.isfinite()).sum())} rows that do not."
                " -> dspine-hub verify DRAFTER"
            )
        if values.dtype == torch.int16:
            scale.copy_(largest / 32767)
            # a row of zeros has no scale
            chunk = (chunk / scale.clamp_min(torch.finfo(scale.dtype).tiny)[:, None]).round()
        values.copy_(chunk)
    return table


def _table(name: str, rows: torch.Tensor, weight: torch.Tensor, scale) -> TokenTable:
    """Compute `scale * rows @ weight.T` in float32, a chunk of rows at a time."""
    wide = weight.float()
    chunks = (F.linear(chunk.to(weight.device, torch.float32) * scale, wide) for chunk in rows.split(CHUNK))
    return fill_table(name, zero_table(rows.shape[0], weight.shape[0], weight), chunks)


@torch.no_grad()
def head_message_table(head_weight: torch.Tensor, write: torch.Tensor, norm_weight: torch.Tensor) -> TokenTable:
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
        ValueError: When codes and head have another number of rows or columns than the weights say, or a number is
            not finite.
    """
    last = layers[-1]
    rank, hidden = last.readout.shape
    if codes.shape[1] != rank:
        raise ValueError(f"`codes` must have shape [V, R] with R = {rank}, got {list(codes.shape)}.")
    if tuple(head_weight.shape) != (codes.shape[0], hidden):
        expected = [codes.shape[0], hidden]
        raise ValueError(f"`head_weight` must have shape [V, H] = {expected}, got {list(head_weight.shape)}.")
    factor = torch.linalg.qr(last.write.double(), mode="r").R
    # a write with more columns than rows has a flat triangle
    factor = F.pad(factor, (0, 0, 0, factor.shape[1] - factor.shape[0]))
    predecessor = torch.cat((last.message, last.predecessor_gate))
    return TransferTables(
        layers=tuple(layers),
        predecessors=_table("predecessors", codes, predecessor, math.sqrt(rank)),
        projection=torch.cat((last.readout, last.write.T)).contiguous(),
        gates=torch.cat((last.receiver_gate, last.predecessor_gate, last.message)),
        # a factorisation returns columns
        write_factor=factor.to(last.write.dtype).contiguous(),
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        head_weight=head_weight,
        head_messages=head_message_table(head_weight, last.write, norm_weight) if head_messages else None,
        # one a tile whose sum is split: splitting stops long before a grid has as many tiles
        arrivals=torch.zeros(4096, dtype=torch.int32, device=last.write.device),
    )
