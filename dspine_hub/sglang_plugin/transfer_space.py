"""The injection weights of a drafter inside an engine, and the only calls into this package's kernels.

Every rank holds all of them: a block's candidates come from the whole vocabulary, so any rank may need any token's
code. Everything here can be captured in a CUDA graph: shapes are static and no value is read back.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from dspine_hub.configuration_dspine import DSpineConfig
from dspine_hub.kernels import adjacent_injection, transition_scores


class TransferSpace(nn.Module):
    """Readouts, writes, gates and codes; parameter names are the checkpoint's below `injection.`."""

    def __init__(self, config: DSpineConfig):
        super().__init__()
        hidden, rank, size = config.hidden_size, config.transfer_rank, config.message_size
        layers = range(config.num_hidden_layers)
        self.readouts = nn.ModuleList(nn.Linear(hidden, rank, bias=False) for _ in layers)
        self.writes = nn.ModuleList(nn.Linear(size, hidden, bias=False) for _ in layers)
        self.message = nn.Linear(rank, size, bias=False)
        self.receiver_gate = nn.Linear(rank, size, bias=False)
        self.predecessor_gate = nn.Linear(rank, size, bias=False)
        self.bias = nn.Parameter(torch.zeros(size), requires_grad=False)
        # allocated before the engine sizes its KV pool, so that the table is counted
        codes = torch.empty(config.vocab_size, rank, dtype=torch.bfloat16)
        self.register_buffer("codes", codes, persistent=False)

    def shared(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return message, receiver gate, predecessor gate (each `[M, R]`) and bias (`[M]`)."""
        return self.message.weight, self.receiver_gate.weight, self.predecessor_gate.weight, self.bias

    def inject(self, hidden: torch.Tensor, anchor: torch.Tensor, layer: int) -> torch.Tensor:
        """Inject into blocks `[B, N, H]` after a layer; `anchor` is `[B]`, int64."""
        code = F.embedding(anchor, self.codes)
        return adjacent_injection(hidden, code, self.readouts[layer].weight, self.writes[layer].weight, *self.shared())

    def scores(
        self, state: torch.Tensor, candidates: torch.Tensor, anchor: torch.Tensor, norm, head_weight: torch.Tensor
    ) -> torch.Tensor:
        """Score transitions `[B, S, K, K]` with the rows of a head that is whole and dense.

        Args:
            state (`torch.Tensor` of shape `[B, S, H]`): Last-layer states before the last injection.
            candidates (`torch.Tensor` of shape `[B, S, K]`, int64): Token ids.
            anchor (`torch.Tensor` of shape `[B]`, int64): Anchors.
            norm: The final RMSNorm, with `weight` and `variance_epsilon`.
            head_weight (`torch.Tensor` of shape `[>= V, H]`): LM-head rows.
        """
        return transition_scores(
            state,
            candidates,
            anchor,
            self.codes,
            self.readouts[-1].weight,
            self.writes[-1].weight,
            *self.shared(),
            norm.weight,
            norm.variance_epsilon,
            head_weight,
        )

    def predecessor_terms(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what tokens `[...]` contribute as predecessors: messages and gate terms, each `[..., M]`."""
        feature = math.sqrt(self.codes.shape[1]) * F.embedding(tokens, self.codes).to(self.bias.dtype)
        return self.message(feature), self.predecessor_gate(feature)
