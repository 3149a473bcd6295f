"""The candidate selector the DFLASH worker asks for proposals: transition scores and the walk through them."""

import torch
from sglang.srt.distributed.communication_op import tensor_model_parallel_all_gather
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.runtime_context import get_parallel
from torch import nn

from dspine_hub.kernels import candidate_walk
from dspine_hub.sglang_plugin.transfer_space import TransferSpace
from dspine_hub.sglang_plugin.unary_scores import unary_scores

# columns sent through the head at once while its table is made
CHUNK = 64


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
        self._table: torch.Tensor | None = None

    @torch.no_grad()
    def attach(self, head: nn.Module) -> None:
        """Take the target's LM head; a table is made of one whose rows cannot be read here.

        The worker hands the head over after loading and runs the graph's content once before it captures it.
        """
        if head is self._head:
            return
        whole = get_parallel().tp_size == 1
        quantised = should_apply_lm_head_quant_method(head, getattr(head, "quant_method", None))
        self._table = None if whole and not quantised else self._head_table(head, whole, quantised)
        self._head = head

    def _head_table(self, head: nn.Module, whole: bool, quantised: bool) -> torch.Tensor:
        """Send the columns of the last write through the head: `G` of shape `[V, M]`, whole on every rank."""
        if getattr(head, "num_added_embeddings", 0):
            raise ValueError("the target's LM head must have no added rows (LoRA vocabulary), got some.")
        columns = (self.norm.weight * self.space.writes[-1].weight.T).contiguous()  # [M, H]
        parts = []
        for chunk in columns.split(CHUNK):
            if quantised:
                logits = head.quant_method.apply(head, chunk, None)
            else:
                logits = torch.matmul(chunk.to(head.weight.dtype), head.weight.T)
            parts.append(logits.T.to(columns.dtype))
        table = torch.cat(parts, dim=1).contiguous()
        # ranks hold equal, ascending shards, so gathered rows stand at their token ids
        return table if whole else tensor_model_parallel_all_gather(table, dim=0)

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
            hidden_states (`torch.Tensor` of shape `[B, S, 2 H]`): Normed states and states before the last injection.
            anchor_token_ids (`torch.Tensor` of shape `[B]`, int64): Last committed tokens.

        Returns:
            `torch.Tensor` of shape `[B, S, K, K]`, float32: predecessor before candidate.
        """
        state = hidden_states[..., hidden_states.shape[-1] // 2 :].contiguous()
        if self._table is None:
            return self.space.scores(state, candidate_ids, anchor_token_ids, self.norm, self._head.weight)
        epsilon = self.norm.variance_epsilon
        return unary_scores(self.space, state, candidate_ids, anchor_token_ids, unary_logits, epsilon, self._table)

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
        temperatures = torch.where(greedy_mask, torch.zeros_like(temperatures), temperatures)
        return candidate_walk(scores, candidate_ids, temperatures, uniforms)
