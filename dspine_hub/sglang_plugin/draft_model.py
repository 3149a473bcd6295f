"""DSpine's drafter on SGLang's layers, driven by the DFLASH worker.

What differs from SGLang's DFlash draft model, in the order of the file:
- attention inside the block is causal; every block row still sees the whole context
- after every layer each slot receives a message from its left neighbour
- a row of the output also holds the state before the last injection, and what that injection knew, for the selector
- a load accounts for every tensor

Context keys and values come from one projection of the target's features, as in DFlash, so fused kernels are kept.
"""

import logging
from collections.abc import Iterable

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.models.dflash import DFlash2DraftModel, DFlashDraftModel
from sglang.srt.runtime_context import get_parallel, get_server_args

from dspine_hub.checkpoints.expected import START_NAMES, expected_tensors
from dspine_hub.errors import DSpineHubError
from dspine_hub.kernels_dspine import top_candidates
from dspine_hub.sglang_plugin.startup import check_pair_of, drafter_config
from dspine_hub.sglang_plugin.target_head import rebuild_codes
from dspine_hub.sglang_plugin.tensors import TensorAccount
from dspine_hub.sglang_plugin.transfer_space import TransferSpace
from dspine_hub.sglang_plugin.transition_cache import TransitionCache, pack_selector_rows

logger = logging.getLogger(__name__)


class DSpineDraftModel(DFlash2DraftModel):
    """Drafter with a transition cache in place of DFlash2's selector."""

    def __init__(self, config, quant_config=None, prefix: str = ""):
        config = drafter_config(config.to_dict())
        _check_engine(quant_config)
        # DFlash2's own constructor insists on the tables of its selector
        DFlashDraftModel.__init__(self, config, quant_config=None, prefix=prefix)
        for layer in self.layers:
            if layer.self_attn.attn.attn_type != AttentionType.DECODER or layer.self_attn.sliding_window_size > 0:
                raise ValueError(
                    f"attention of the drafter must be causal and full, got {layer.self_attn.attn.attn_type} with "
                    f"window {layer.self_attn.sliding_window_size}."
                )
        self.injection = TransferSpace(config)
        self.candidate_selector = TransitionCache(self.injection, self.norm, config.num_candidates)
        self.lm_head = None

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch,
        input_embeds: torch.Tensor | None = None,
        get_embedding: bool = False,
        pp_proxy_tensors=None,
    ) -> LogitsProcessorOutput:
        """Run blocks through all layers.

        Args:
            input_ids (`torch.Tensor` of shape `[B * N]`, int64): Blocks one after another, each from its anchor on.
            positions (`torch.Tensor` of shape `[B * N]`, int64): Absolute positions.
            forward_batch: SGLang's batch.
            input_embeds (`torch.Tensor` of shape `[B * N, H]`): The target's embeddings of `input_ids`.

        Returns:
            `LogitsProcessorOutput`: `hidden_states` as [`pack_selector_rows`] puts them together.
        """
        if input_embeds is None:
            raise ValueError("`input_embeds` must hold the target's embeddings, got none: a drafter owns no table.")
        # the eager runner hands over bfloat16 whatever the engine's dtype is
        hidden = input_embeds.to(self.norm.weight.dtype)
        if hidden.numel() == 0:
            return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)
        blocks = (-1, self.block_size, hidden.shape[-1])
        anchor = input_ids.view(-1, self.block_size)[:, 0].contiguous()
        for index, layer in enumerate(self.layers):
            # without a residual a layer starts from the whole state, which is what an injection writes to
            hidden, residual = layer(positions, hidden, forward_batch, None)
            state = hidden + residual
            injected = self.injection.inject(state.view(blocks), anchor, index)
            hidden = injected.hidden.view(state.shape)
        rows = pack_selector_rows(self.norm(hidden), state, injected, self.injection.rows_readable)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=rows)

    def compute_candidates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the top `K` of the backbone's logits.

        Args:
            hidden (`torch.Tensor` of shape `[n, 2 H + ...]`): As [`pack_selector_rows`] puts them together.

        Returns:
            `tuple` of token ids and logits, each `[n, K]`.
        """
        self.candidate_selector.attach(self.lm_head)
        hidden = hidden[:, : self.norm.weight.shape[0]]
        if not self.injection.rows_readable:
            # SGLang knows quantised heads, and joins the candidates of all ranks
            return super().compute_candidates(hidden.contiguous())
        # rows beyond the vocabulary are padding
        weight = self.lm_head.weight[: self.lm_head.org_vocab_size]
        logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight)
        values, ids = top_candidates(logits, self.candidate_selector.top_k)
        return ids, self._transform_unary_logits(values)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint, refusing tensors that are unknown, missing or of another shape."""
        account = TensorAccount(expected_tensors(self.config))
        aside: dict[str, torch.Tensor] = {}
        super().load_weights(self._backbone(weights, account, aside))
        account.close()
        self._load_transfer_space(aside)

    def _backbone(self, weights, account: TensorAccount, aside: dict):
        """Yield what SGLang's loader knows; put the rest aside."""
        for name, tensor in weights:
            name = account.take(name, tensor)
            if name.startswith(START_NAMES):
                aside[name] = tensor
            else:
                yield name, tensor

    @torch.no_grad()
    def _load_transfer_space(self, tensors: dict[str, torch.Tensor]) -> None:
        if not bool(tensors["transfer_ready"]):
            raise ValueError("`transfer_ready` must be true, got false: this drafter was never trained.")
        for name, parameter in self.injection.named_parameters():
            parameter.copy_(tensors[f"injection.{name}"])
        codes = tensors["transfer_codes"] if "transfer_codes" in tensors else self._rebuilt_codes(tensors)
        norms = codes[:64].float().norm(dim=-1)
        if not bool((norms < 1.1).all() & (norms.max() > 0.9)):
            raise ValueError(
                f"`transfer_codes` must hold unit rows, got lengths from {float(norms.min()):.3g} to "
                f"{float(norms.max()):.3g}: the checkpoint is damaged. Run `dspine-hub verify` on it."
            )
        self.injection.prepare(codes, self.norm)

    @torch.no_grad()
    def post_load_weights(self) -> None:
        """Make tables of random codes when SGLang loaded no checkpoint (`--load-format dummy`)."""
        if self.injection.tables is None:
            codes = torch.randn(self.config.vocab_size, self.config.transfer_rank, device=self.norm.weight.device)
            self.injection.prepare(torch.nn.functional.normalize(codes, dim=-1), self.norm)

    def _rebuilt_codes(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        parts = {name.removeprefix("transfer_basis."): tensor for name, tensor in tensors.items()}
        arguments = get_server_args()
        return rebuild_codes(arguments.model_path, arguments.revision, parts, self.norm.weight.device)


def _check_engine(quant_config) -> None:
    """Refuse what would be silently wrong or slow; by the name DFLASH no check of ours ran before this one."""
    if quant_config is not None:
        raise DSpineHubError(
            f"the drafter must be served unquantised, got `{quant_config.get_name()}` inherited from the target: add "
            "`--speculative-draft-model-quantization unquant`."
        )
    arguments = get_server_args()
    if arguments.enable_dp_attention:
        raise DSpineHubError("`--enable-dp-attention` must be off for a DSpine drafter, got on: it was never tested.")
    if get_parallel().tp_rank == 0:
        check_pair_of(arguments)
