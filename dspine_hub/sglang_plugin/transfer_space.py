"""The injection weights of a drafter inside an engine, and the calls into this package's kernels.

Every rank holds all of them: a block's candidates come from the whole vocabulary, so any rank may need any token's
row. Everything a round calls here can be captured in a CUDA graph: shapes are static and no value is read back.
"""

import dataclasses

import torch

from dspine_hub.configuration_dspine import DSpineConfig
from dspine_hub.kernels_dspine import (
    BackboneLogits,
    InjectedBlock,
    SlotProjection,
    TransferTables,
    adjacent_injection,
    transfer_tables,
    transition_scores,
)
from dspine_hub.kernels_dspine.transfer_tables import TokenTable, zero_table
from dspine_hub.modeling_dspine import AdjacentInjection


class TransferSpace(AdjacentInjection):
    """The model's own injection, its weights named as in a checkpoint below `injection.`, and tables made of them."""

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        self.requires_grad_(False)
        self.tables: TransferTables | None = None
        # whether the head's rows are whole and dense, once it is attached
        self.rows_readable = False

    def prepare(self, codes: torch.Tensor, norm) -> None:
        """Make the tables once all weights are loaded; the codes `[V, R]` are not kept.

        All memory is taken here, before the engine sizes its KV pool. Tables that exist are written over, since
        captured graphs read them.

        Args:
            codes (`torch.Tensor` of shape `[V, R]`): Unit code of every token.
            norm: The final RMSNorm, with `weight` and `variance_epsilon`.
        """
        layers = [self.weights(layer) for layer in range(len(self.writes))]
        # the head comes later, when the worker hands it over
        no_head = norm.weight.new_zeros(1, 1).expand(codes.shape[0], norm.weight.shape[0])
        tables = transfer_tables(layers, codes, norm.weight, norm.variance_epsilon, no_head, head_messages=False)
        if self.tables is None:
            room = zero_table(codes.shape[0], self.bias.shape[0], like=self.bias)
            self.tables = dataclasses.replace(tables, head_messages=room)
            return
        for name in ("predecessors", "projection", "gates", "write_factor"):
            getattr(self.tables, name).copy_(getattr(tables, name))

    def attach_head(self, messages: TokenTable, weight: torch.Tensor | None) -> None:
        """Take what is read of the target's LM head.

        Args:
            messages ([`TokenTable`] of shape `[>= V, M]`): What every token's head row reads of a message.
            weight (`torch.Tensor` of shape `[>= V, H]`, *optional*): Its rows, where they are whole and dense.
        """
        self.tables.head_messages.copy_(messages)
        self.rows_readable = weight is not None
        if weight is not None:
            self.tables = dataclasses.replace(self.tables, head_weight=weight)

    def inject(self, hidden: torch.Tensor, anchor: torch.Tensor, layer: int) -> InjectedBlock:
        """Inject into blocks `[B, N, H]` after a layer; `anchor` is `[B]`, int64."""
        return adjacent_injection(hidden, anchor, layer, self.tables)

    def scores(
        self,
        state: torch.Tensor,
        projection: SlotProjection,
        candidates: torch.Tensor,
        anchor: torch.Tensor,
        backbone: BackboneLogits | None,
    ) -> torch.Tensor:
        """Score transitions.

        Args:
            state (`torch.Tensor` of shape `[B, S, H]`): Last-layer states before the last injection.
            projection ([`SlotProjection`]): What that injection knew of its slots, each `[B, S, M]`.
            candidates (`torch.Tensor` of shape `[B, S, K]`, int64): Token ids.
            anchor (`torch.Tensor` of shape `[B]`, int64): Last committed tokens.
            backbone ([`BackboneLogits`], *optional*): Where the head's rows are not readable.

        Returns:
            `torch.Tensor` of shape `[B, S, K, K]`, float32.
        """
        return transition_scores(state, candidates, anchor, self.tables, projection, backbone)
