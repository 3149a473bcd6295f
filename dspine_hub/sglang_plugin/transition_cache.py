"""The candidate selector the DFLASH worker asks for proposals: transition scores and the walk through them."""

from typing import NamedTuple

import torch
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.runtime_context import get_parallel
from torch import nn

from dspine_hub.kernels_dspine import BackboneLogits, InjectedBlock, SlotProjection, candidate_walk
from dspine_hub.kernels_dspine.transfer_tables import CHUNK, TokenTable, fill_table, head_message_table, zero_table
from dspine_hub.sglang_plugin.transfer_space import TransferSpace

# columns sent through a quantised head at once while its table is made
COLUMNS = 64


def pack_selector_rows(
    normed: torch.Tensor, state: torch.Tensor, injected: InjectedBlock, readable: bool
) -> torch.Tensor:
    """Put side by side what the selector needs of every row of a block.

    Args:
        normed, state (`torch.Tensor` of shape `[B * N, H]`): Final states, and states before the last injection.
        injected ([`InjectedBlock`]): Of the last injection.
        readable (`bool`): Whether the selector reads the head's rows. If not, rows also hold the messages written and
            the length of the states after that.

    Returns:
        `torch.Tensor` of shape `[B * N, 2 H + P]` or `[B * N, 2 H + P + M + 8]`, in the dtype of the states; `P` is
        `2 M` in float32 and `4 M` in half precision.
    """
    # the projection is float32, and travels as bits
    parts = [normed, state, *(x.flatten(0, 1).float().view(state.dtype) for x in injected.projection)]
    if not readable:
        length = torch.linalg.vector_norm(injected.hidden, dim=-1, keepdim=True, dtype=torch.float32)
        # eight times, since a product of rows that are no multiple of 16 bytes is slow
        parts += [injected.message.flatten(0, 1), length.to(state.dtype).expand(-1, -1, 8).flatten(0, 1)]
    return torch.cat(parts, dim=-1)


class SelectorInputs(NamedTuple):
    """What [`pack_selector_rows`] put together, taken apart again.

    Args:
        state (`torch.Tensor` of shape `[B, S, H]`), projection ([`SlotProjection`], each `[B, S, M]`): Of the slots,
            before the last injection.
        message (`torch.Tensor` of shape `[B, S, M]`), length (`torch.Tensor` of shape `[B, S]`), both *optional*: Of
            its write, where the head's rows are not readable.
    """

    state: torch.Tensor
    projection: SlotProjection
    message: torch.Tensor | None = None
    length: torch.Tensor | None = None


def unpack_selector_rows(rows: torch.Tensor, width: int, size: int) -> SelectorInputs:
    """Take rows of slots `[B, S, 2 H + ...]` apart; `width` is `H`, `size` is `M`."""
    bits = size * torch.float32.itemsize // rows.itemsize
    _, state, receiver, write_projection, rest = rows.tensor_split(
        (width, 2 * width, 2 * width + bits, 2 * width + 2 * bits), -1
    )
    projection = SlotProjection(receiver.view(torch.float32), write_projection.view(torch.float32))
    if rest.shape[-1] == 0:
        return SelectorInputs(state, projection)
    return SelectorInputs(state, projection, rest[..., :size], rest[..., size])


class TransitionCache:
    """Scores and walks the candidates of a block; the worker calls its methods inside the draft's CUDA graph.

    No module: weights belong to the draft model, the head to the target.

    Args:
        space ([`TransferSpace`]): Weights of the injection.
        norm: The draft model's final RMSNorm.
        top_k (`int`): Candidates a slot.
    """

    def __init__(self, space: TransferSpace, norm: nn.Module, top_k: int):
        self.space, self.norm, self.top_k = space, norm, top_k
        self._head: nn.Module | None = None

    @torch.no_grad()
    def attach(self, head: nn.Module) -> None:
        """Take what is read of the target's LM head.

        The worker hands the head over after loading and runs the graph's content once before it captures it.
        """
        if head is self._head:
            return
        whole = get_parallel().tp_size == 1
        quantised = should_apply_lm_head_quant_method(head, getattr(head, "quant_method", None))
        messages = self._head_messages(head, whole, quantised)
        self.space.attach_head(messages, head.weight if whole and not quantised else None)
        self._head = head

    def _head_messages(self, head: nn.Module, whole: bool, quantised: bool) -> TokenTable:
        """Make the table `G` of shape `[V, M]`, whole on every rank."""
        if getattr(head, "num_added_embeddings", 0):
            raise ValueError("the target's LM head must have no added rows (LoRA vocabulary), got some.")
        norm, write = self.norm.weight, self.space.writes[-1].weight
        if quantised:
            # its rows cannot be read, but columns can be sent through it
            columns = (norm * write.T).contiguous()  # [M, H]
            rows = torch.cat([head.quant_method.apply(head, part, None).T for part in columns.split(COLUMNS)], dim=1)
            room = zero_table(*rows.shape, like=write)
            table = fill_table("head_messages", room, (chunk.float() for chunk in rows.split(CHUNK)))
        else:
            table = head_message_table(head.weight, write, norm)
        if whole:
            return table
        # ranks hold equal, ascending shards, so gathered rows stand at their token ids; fixed point travels as bits,
        # no backend knows integers of 16
        values, dtype = table.values, table.values.dtype
        values = values.view(torch.float16) if dtype == torch.int16 else values
        values, scale = (tensor_model_parallel_all_gather(x, dim=0) for x in (values, table.scale))
        return TokenTable(values.view(dtype), scale)

    def build_lattice(
        self,
        *,
        candidate_ids: torch.Tensor,
        unary_logits: torch.Tensor,
        hidden_states: torch.Tensor,
        anchor_token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Score all transitions of a block.

        Args:
            candidate_ids (`torch.Tensor` of shape `[B, S, K]`, int64): Candidates of every slot.
            unary_logits (`torch.Tensor` of shape `[B, S, K]`, float32): Their backbone logits.
            hidden_states (`torch.Tensor` of shape `[B, S, 2 H + ...]`): As [`pack_selector_rows`] puts them together.
            anchor_token_ids (`torch.Tensor` of shape `[B]`, int64): Last committed tokens.

        Returns:
            `torch.Tensor` of shape `[B, S, K, K]`, float32: predecessor before candidate.
        """
        rows = unpack_selector_rows(hidden_states, self.norm.weight.shape[0], self.space.bias.shape[0])
        backbone = None if self.space.rows_readable else BackboneLogits(unary_logits, rows.message, rows.length)
        # the worker passes a column of its blocks, kernels read anchors in one piece
        anchor = anchor_token_ids.contiguous()
        return self.space.scores(rows.state, rows.projection, candidate_ids, anchor, backbone)

    def sample_path(
        self,
        *,
        candidate_ids: torch.Tensor,
        scores: torch.Tensor,
        uniforms: torch.Tensor,
        temperatures: torch.Tensor,
        greedy_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Walk one path a row; greedy and sampled rows share a graph.

        Returns:
            `tuple` of tokens `[B, S]` and the rows of `K` probabilities they were drawn from, `[B, S, K]`.
        """
        temperatures = torch.where(greedy_mask, 0.0, temperatures)
        return candidate_walk(scores, candidate_ids, temperatures, uniforms)
