"""DSpine drafter: a causal block backbone on the target's features, adjacent injection and a transition cache.

What differs from a Qwen3 model, in the order of the file:
- queries come from the block, keys and values from `[context ; block]`; context rows are the target's own features
- the cache holds context rows only; block rows are appended for one pass and cropped after it
- after every layer each slot receives a gated message from its left neighbour
- no embedding and no LM head: both belong to the target and are bound at run time

Source of the method: arXiv 2609.36173. Weight names are those of the public trainer's checkpoints.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils import ModelOutput, logging

from .cache_dspine import DSpineContextCache
from .configuration_dspine import DSpineConfig, head_fingerprint, tokenizer_fingerprint
from .draft_graph_dspine import CompiledDraft, GraphContextCache
from .generation_dspine import spec_generate
from .kernels_dspine import (
    InjectedBlock,
    InjectionWeights,
    SlotProjection,
    TransferTables,
    adjacent_injection,
    adjacent_injection_reference,
    candidate_walk,
    predicted_feature,
    top_candidates,
    transfer_tables,
    transition_scores,
)

logger = logging.get_logger(__name__)


@dataclass
class DSpineModelOutput(ModelOutput):
    """One pass of the backbone over a block.

    Args:
        last_hidden_state (`torch.Tensor` of shape `[B, Q, H]`): Normed states; the target's LM head reads them.
        pre_injection_state (`torch.Tensor` of shape `[B, Q, H]`): States of the last layer before its injection.
        layer_features (`tuple[torch.Tensor]` of `L` tensors of shape `[B, Q, R]`, *optional*): Predicted features
            after each layer's write, when `output_features=True`.
        projection ([`SlotProjection`], *optional*): What the last injection knows of its rows, each `[B, N, M]`, when
            it ran from prepared tables.
    """

    last_hidden_state: torch.FloatTensor | None = None
    pre_injection_state: torch.FloatTensor | None = None
    layer_features: tuple[torch.FloatTensor, ...] | None = None
    projection: SlotProjection | None = None


@dataclass
class DSpineDraft:
    """A drafted block, with what lossless verification needs.

    Args:
        tokens (`torch.Tensor` of shape `[B, S]`, int64): The drafts.
        candidates (`torch.Tensor` of shape `[B, S, K]`, int64): Candidate token ids of every slot.
        q (`torch.Tensor` of shape `[B, S, K]`, float32): Probabilities over the candidates each draft was drawn from.
        scores (`torch.Tensor` of shape `[B, S, K, K]`, float32): Transition scores.
    """

    tokens: torch.LongTensor
    candidates: torch.LongTensor
    q: torch.FloatTensor
    scores: torch.FloatTensor


@dataclass
class BoundTarget:
    """The target's modules a drafter reads: never saved, never counted as the drafter's own."""

    embedding: nn.Module
    head: nn.Module


class DSpineRMSNorm(nn.Module):
    """RMSNorm with float32 statistics, as in Qwen3."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


def rotary_tables(
    position_ids: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute cosines and sines of plain RoPE, each `[B, 1, n, head_dim]`.

    Computed per call: a buffer of inverse frequencies would be left uninitialised by a load from `meta`.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
    angles = position_ids[:, None, :, None].float() * theta**-exponent
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to `x` of shape `[B, heads, n, head_dim]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class DSpineAttention(nn.Module):
    """Attention of block rows over `[context ; block]`, with per-head norms of queries and keys."""

    def __init__(self, config: DSpineConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = DSpineRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = DSpineRMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, source, rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """Project context or block rows `[B, n, H]` to rotated keys and values `[B, kv_heads, n, head_dim]`."""
        key = self.k_norm(self.k_proj(source).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return rotate(key, *rotary), self.v_proj(source).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, hidden, context, rotary, mask, cache=None):
        batch, rows = hidden.shape[:2]
        query = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        key, value = self.keys_values(torch.cat((context, hidden), dim=1), rotary)
        cos, sin = rotary
        query = rotate(query, cos[:, :, -rows:], sin[:, :, -rows:])
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        if self.groups > 1:
            key = key.repeat_interleave(self.groups, dim=1)
            value = value.repeat_interleave(self.groups, dim=1)
        dropout = self.config.attention_dropout if self.training else 0.0
        if self.config._attn_implementation == "eager":
            weights = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.head_dim)
            weights = weights.float().masked_fill(~mask, torch.finfo(torch.float32).min).softmax(dim=-1)
            output = torch.matmul(F.dropout(weights.to(query.dtype), p=dropout, training=self.training), value)
        else:
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        return self.o_proj(output.transpose(1, 2).reshape(batch, rows, -1))


class DSpineMLP(nn.Module):
    """SwiGLU, as in Qwen3."""

    def __init__(self, config: DSpineConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden):
        return self.down_proj(self.act(self.gate_proj(hidden)) * self.up_proj(hidden))


class DSpineDecoderLayer(nn.Module):
    """Qwen3 layer whose attention also reads the context; the context itself is never normed again or updated."""

    def __init__(self, config: DSpineConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DSpineAttention(config, layer_idx)
        self.mlp = DSpineMLP(config)
        self.input_layernorm = DSpineRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DSpineRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden, context, rotary, mask, cache=None):
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), context, rotary, mask, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class AdjacentInjection(nn.Module):
    """Weights of the injection: a readout and a write a layer, gates and message shared by all layers."""

    def __init__(self, config: DSpineConfig):
        super().__init__()
        hidden, rank, size = config.hidden_size, config.transfer_rank, config.message_size
        layers = range(config.num_hidden_layers)
        self.readouts = nn.ModuleList(nn.Linear(hidden, rank, bias=False) for _ in layers)
        self.writes = nn.ModuleList(nn.Linear(size, hidden, bias=False) for _ in layers)
        self.message = nn.Linear(rank, size, bias=False)
        self.receiver_gate = nn.Linear(rank, size, bias=False)
        self.predecessor_gate = nn.Linear(rank, size, bias=False)
        self.bias = nn.Parameter(torch.zeros(size))

    def weights(self, layer: int) -> InjectionWeights:
        """Return the weights of a layer, the shared ones among them."""
        shared = self.message.weight, self.receiver_gate.weight, self.predecessor_gate.weight, self.bias
        return InjectionWeights(self.readouts[layer].weight, self.writes[layer].weight, *shared)

    def from_weights(self, anchor_code: torch.Tensor, **teaching) -> "InjectFromWeights":
        """Return the injection a training pass runs, see [`InjectFromWeights`]."""
        return InjectFromWeights(self, anchor_code, **teaching)

    def from_tables(self, tables: TransferTables, anchor: torch.LongTensor) -> "InjectFromTables":
        """Return the injection a drafting pass runs, see [`InjectFromTables`]."""
        return InjectFromTables(tables, anchor)

    def feature(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        """Read predicted features, `[..., H]` to `[..., R]`."""
        return predicted_feature(hidden, self.readouts[layer].weight)

    def forward(self, hidden, anchor_code, layer, true_codes=None, replaced=None):
        """Inject into blocks `[B, N, H]` by definition, differentiably; see [`adjacent_injection_reference`]."""
        return adjacent_injection_reference(hidden, anchor_code, self.weights(layer), true_codes, replaced)


@dataclass(frozen=True)
class InjectFromWeights:
    """The injection of a pass over blocks that is differentiated: by its definition, from the weights themselves.

    Args:
        injection ([`AdjacentInjection`]): The weights.
        anchor_code (`torch.Tensor` of shape `[B, R]`): Unit code of every block's anchor.
        true_codes (`torch.Tensor` of shape `[B, S, R]`, *optional*): Codes of the true predecessors, for training.
        replaced (`torch.Tensor` of shape `[B]`, bool, *optional*): Blocks that read them, in place of predictions.
        replaced_layers (`int`): First layers in which they do.
    """

    injection: AdjacentInjection
    anchor_code: torch.Tensor
    true_codes: torch.Tensor | None = None
    replaced: torch.Tensor | None = None
    replaced_layers: int = 0

    def __call__(self, state: torch.Tensor, layer: int) -> InjectedBlock:
        """Inject into blocks `[B, N, H]` after a layer."""
        taught = (self.true_codes, self.replaced) if layer < self.replaced_layers else ()
        return InjectedBlock(self.injection(state, self.anchor_code, layer, *taught))


@dataclass(frozen=True)
class InjectFromTables:
    """The injection of a pass that drafts: the kernels, from prepared tables; not differentiable.

    Args:
        tables ([`TransferTables`]): Of the drafter.
        anchor (`torch.Tensor` of shape `[B]`, int64): Token of every block's anchor.
    """

    tables: TransferTables
    anchor: torch.LongTensor

    def __call__(self, state: torch.Tensor, layer: int) -> InjectedBlock:
        """Inject into blocks `[B, N, H]` after a layer; the last also says what the transition needs to know."""
        return adjacent_injection(state, self.anchor, layer, self.tables)


class TransferBasis(nn.Module):
    """What a code table is made of: mean row, top directions and their eigenvalues, all float32."""

    def __init__(self, config: DSpineConfig):
        super().__init__()
        rank, hidden = config.transfer_rank, config.hidden_size
        self.register_buffer("mean", torch.zeros(hidden, dtype=torch.float32))
        self.register_buffer("directions", torch.zeros(rank, hidden, dtype=torch.float32))
        self.register_buffer("eigenvalues", torch.ones(rank, dtype=torch.float32))


def transfer_basis(head_weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the top directions of the target's unit LM-head rows.

    Args:
        head_weight (`torch.Tensor` of shape `[V, H]`): LM-head rows.
        rank (`int`): Directions `R` to keep.

    Returns:
        `tuple` of mean (`[H]`), directions (`[R, H]`, orthonormal) and eigenvalues (`[R]`, ascending), float32.

    Raises:
        ValueError: When the head has fewer than `rank` directions of positive variance.
    """
    rows, width = head_weight.shape
    total = torch.zeros(width, dtype=torch.float32, device=head_weight.device)
    scatter = torch.zeros(width, width, dtype=torch.float32, device=head_weight.device)
    for chunk in head_weight.detach().split(16384):
        unit = F.normalize(chunk.float(), dim=-1)
        total += unit.sum(dim=0)
        scatter += unit.T @ unit
    mean = total / rows
    values, vectors = torch.linalg.eigh(scatter / rows - torch.outer(mean, mean))
    values, vectors = values[-rank:], vectors[:, -rank:]
    if not bool((values > 0).all()):
        raise ValueError(
            f"`transfer_rank` must not exceed the directions the head spans, got {rank} with "
            f"{int((values > 0).sum())} of positive variance."
        )
    return mean, vectors.T.contiguous(), values


def transfer_codes(
    head_weight: torch.Tensor, mean: torch.Tensor, directions: torch.Tensor, eigenvalues: torch.Tensor
) -> torch.Tensor:
    """Project LM-head rows `[V, H]` into the transfer space: whitened unit rows `[V, R]` in bfloat16."""
    whiten = (directions / eigenvalues.sqrt()[:, None]).T
    parts = [
        F.normalize((F.normalize(chunk.float(), dim=-1) - mean) @ whiten, dim=-1).to(torch.bfloat16)
        for chunk in head_weight.detach().split(16384)
    ]
    return torch.cat(parts)


class DSpinePreTrainedModel(PreTrainedModel):
    config_class = DSpineConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    input_modalities = ("text",)
    _no_split_modules = ["DSpineDecoderLayer"]
    _supports_sdpa = True
    # eigenvalues span orders of magnitude: a basis in half precision gives other codes
    _keep_in_fp32_modules_strict = ["transfer_basis"]

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # attention reads the setting on every call, so it may change after loading
        return True

    def _init_weights(self, module):
        # only what a checkpoint did not fill: loaded parameters carry the mark
        def fresh(parameter):
            return not getattr(parameter, "_is_hf_initialized", False)

        if isinstance(module, nn.Linear) and fresh(module.weight):
            module.weight.data.normal_(mean=0.0, std=self.config.initializer_range)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, DSpineRMSNorm) and fresh(module.weight):
            module.weight.data.fill_(1.0)
        elif isinstance(module, AdjacentInjection):
            zeroed = [write.weight for write in module.writes] + [module.predecessor_gate.weight, module.bias]
            for parameter in filter(fresh, zeroed):
                parameter.data.zero_()


class DSpineForSpeculation(DSpinePreTrainedModel):
    """Draft blocks of tokens for a target model.

    A drafter owns neither embedding nor LM head: call [`~DSpineForSpeculation.bind`] with the target, or generate
    with [`~DSpineForSpeculation.spec_generate`], which binds. It is not a language model by itself.

    Set `head_messages` to `False` before the first draft where memory is short: drafting then does without a table of
    `V * M` values, see [`transfer_tables`], and computes its rows every round.
    """

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = DSpineRMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(DSpineDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = DSpineRMSNorm(hidden, config.rms_norm_eps)
        self.injection = AdjacentInjection(config)
        if config.transfer_storage == "codes":
            codes = torch.zeros(config.vocab_size, config.transfer_rank, dtype=torch.bfloat16)
            self.register_buffer("transfer_codes", codes)
        else:
            # filled by `bind`: rebuilt from the basis and the target's head
            self.register_buffer("transfer_codes", None, persistent=False)
            self.transfer_basis = TransferBasis(config)
        self.register_buffer("transfer_ready", torch.tensor(False))
        self._bound: BoundTarget | None = None
        self._checked_tokenizer = None
        self.head_messages = True
        self._tables: TransferTables | None = None
        self._prepared_from: list[float] | None = None
        self._compiled: CompiledDraft | None = None
        self.post_init()

    # -- transfer space and target ---------------------------------------------------------------------------------

    @torch.no_grad()
    def initialize_transfer_space(self, head_weight: torch.Tensor) -> None:
        """Build the code table from the target's LM head and start the readouts at its directions.

        Done once, before training. Eigenvectors have no fixed sign, so a table is never rebuilt this way later.

        Args:
            head_weight (`torch.Tensor` of shape `[V, H]`): LM-head rows of the target (the embedding where tied).

        Raises:
            ValueError: When the head has another shape or spans too few directions.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        if tuple(head_weight.shape) != expected:
            raise ValueError(
                f"`head_weight` must have shape [V, H] = {list(expected)}, got {list(head_weight.shape)}: this "
                "drafter is configured for another target."
            )
        mean, directions, eigenvalues = transfer_basis(head_weight, self.config.transfer_rank)
        codes = transfer_codes(head_weight, mean, directions, eigenvalues)
        if self.config.transfer_storage == "codes":
            self.transfer_codes.copy_(codes)
        else:
            self.transfer_basis.mean.copy_(mean)
            self.transfer_basis.directions.copy_(directions)
            self.transfer_basis.eigenvalues.copy_(eigenvalues)
            self.transfer_codes = codes.to(self.fc.weight.device)
        for readout in self.injection.readouts:
            readout.weight.copy_(directions)
        self.transfer_ready.fill_(True)

    @torch.no_grad()
    def bind(self, target: PreTrainedModel, tokenizer=None) -> "DSpineForSpeculation":
        """Take embedding and LM head from the target, after checking that it is the right one.

        Args:
            target (`PreTrainedModel`): The target model.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Its tokenizer; checked against the recorded one.

        Returns:
            `DSpineForSpeculation`: This drafter.

        Raises:
            ValueError: When hidden size, layer count, vocabulary or tokenizer differ from those this drafter was
                trained for, when its transfer space was never built, or when a compact drafter meets another head.
        """
        embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
        text = target.config.get_text_config()
        found = (
            ("hidden_size", self.config.hidden_size, text.hidden_size),
            ("num_target_layers", self.config.num_target_layers, text.num_hidden_layers),
            ("vocab_size", self.config.vocab_size, text.vocab_size),
        )
        for name, mine, theirs in found:
            if mine != theirs:
                wanted = (self.config.target or {}).get("id")
                raise ValueError(
                    f"`{name}` of the drafter must equal the target's, got {mine} for a target with {theirs}. This "
                    f"drafter belongs to {f'`{wanted}`' if wanted else 'another target'}; load that target instead."
                )
        if tokenizer is not None:
            self.check_tokenizer(tokenizer)
        if not bool(self.transfer_ready):
            raise ValueError(
                "`transfer_ready` must be true, got false: call `initialize_transfer_space(head_weight)` before "
                "training, or load a trained checkpoint."
            )
        self._check_head(head.weight)
        self._check_codes()
        if self.config.transfer_storage == "basis":
            basis = [self.transfer_basis.mean, self.transfer_basis.directions, self.transfer_basis.eigenvalues]
            codes = transfer_codes(head.weight, *(tensor.to(head.weight.device) for tensor in basis))
            self.transfer_codes = codes.to(self.fc.weight.device)
        self._bound = BoundTarget(embedding, head)
        self.invalidate()
        return self

    def check_tokenizer(self, tokenizer) -> None:
        """Raise `ValueError` unless the tokenizer maps ids to the strings recorded in training."""
        record = self.config.target or {}
        if tokenizer is self._checked_tokenizer or not record.get("tokenizer_sha256"):
            return
        fingerprint = tokenizer_fingerprint(tokenizer)
        if fingerprint != record["tokenizer_sha256"]:
            raise ValueError(
                f"`tokenizer` must map ids to the same strings as in training (sha256 "
                f"{record['tokenizer_sha256'][:12]}), got {fingerprint[:12]}. Load the tokenizer of `{record['id']}`."
            )
        self._checked_tokenizer = tokenizer

    def _check_codes(self) -> None:
        # a checkpoint read without its codes only warns in transformers, and leaves memory as it was
        if self.config.transfer_storage == "codes":
            norms = self.transfer_codes[:64].float().norm(dim=-1)
            if not bool(torch.isfinite(norms).all() & (norms < 1.1).all() & (norms.max() > 0.9)):
                raise ValueError(
                    f"`transfer_codes` must hold unit rows, got lengths from {float(norms.min()):.3g} to "
                    f"{float(norms.max()):.3g}: the checkpoint is incomplete. Run `dspine-hub verify` on it."
                )

    def _check_head(self, weight: torch.Tensor) -> None:
        record = self.config.target or {}
        expected = record.get("lm_head_sha256")
        if not expected or not weight.is_floating_point():
            return
        fingerprint = head_fingerprint(weight)
        if fingerprint == expected:
            return
        problem = (
            f"`lm_head_sha256` of `{record['id']}` is {expected[:12]} in this drafter's record, got {fingerprint[:12]}"
            " from the target"
        )
        if self.config.transfer_storage == "basis":
            raise ValueError(f"{problem}: compact codes can only be rebuilt from the head they were made of.")
        logger.warning(f"{problem}: a fine-tuned target still decodes correctly, though acceptance may fall.")

    def bound(self) -> BoundTarget:
        """Return the bound modules, or raise `ValueError` when there are none."""
        if self._bound is None:
            raise ValueError(
                "`bind(target)` must be called before a drafter is used, got an unbound drafter: embedding and LM "
                "head belong to the target."
            )
        return self._bound

    def is_bound_to(self, target: PreTrainedModel) -> bool:
        """Tell whether `bind` already took this very target's modules."""
        return self._bound is not None and self._bound.head is target.get_output_embeddings()

    # -- what is prepared for drafting -----------------------------------------------------------------------------

    def prepare(self) -> TransferTables:
        """Return what the operations read at inference, made from the weights and the target's head on the first call.

        Loading, moving, casting and binding a drafter and its return from training forget what was prepared. After
        any other write to a weight call [`~DSpineForSpeculation.invalidate`]; generation looks for forgotten ones.

        Raises:
            ValueError: When the drafter is unbound, or a number of its weights is not finite.
        """
        if self._tables is None:
            *layers, codes, norm, head = self._sources()
            self._tables = transfer_tables(layers, codes, norm, self.norm.eps, head, self.head_messages)
            self._prepared_from = self._checksums()
        return self._tables

    def invalidate(self) -> None:
        """Forget what was prepared or captured: the weights it was made of are about to change, or have."""
        self._tables = self._prepared_from = self._compiled = None

    def invalidate_if_changed(self) -> None:
        """Forget what was prepared when a weight was written to since; sums over every weight tell.

        A permutation of a tensor's numbers keeps its sum and is not seen.
        """
        if self._tables is not None and self._prepared_from != self._checksums():
            self.invalidate()

    def _sources(self) -> list:
        layers = [self.injection.weights(layer) for layer in range(self.config.num_hidden_layers)]
        return [*layers, self.transfer_codes, self.norm.weight, self.bound().head.weight]

    @torch.no_grad()
    def _checksums(self) -> list[float]:
        *layers, codes, norm, head = self._sources()
        tensors = [*(tensor for layer in layers for tensor in layer), codes, norm, head]
        return [float(self.head_messages), *(float(tensor.sum(dtype=torch.float32)) for tensor in tensors)]

    def _apply(self, *args, **kwargs):
        # moved or cast
        self.invalidate()
        return super()._apply(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        """As in PyTorch; what was prepared from the weights before is forgotten."""
        self.invalidate()
        return super().load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> "DSpineForSpeculation":
        """As in PyTorch; what was prepared is forgotten where the mode changes, since training changes weights."""
        if mode != self.training:
            self.invalidate()
        return super().train(mode)

    def new_cache(self, batch: int = 1) -> DSpineContextCache:
        """Return an empty cache for the context rows of `batch` requests of one length.

        After [`~DSpineForSpeculation.compile_draft`] it is the one its graph reads, and the cache given out before is
        used up.
        """
        if self._compiled is not None and batch in self._compiled.batch_sizes:
            return self._compiled.new_cache(batch)
        return DSpineContextCache()

    def compile_draft(self, max_length: int = 4096, batch_sizes: tuple[int, ...] = (1,)) -> "DSpineForSpeculation":
        """Capture drafting as a CUDA graph per batch size; [`~DSpineForSpeculation.draft`] then replays it.

        Args:
            max_length (`int`): Longest text drafted by the graph, prompt and block included; a longer one is drafted
                without it. Its keys and values are allocated here, and every draft attends over all of them.
            batch_sizes (`tuple[int]`): Batches to capture.

        Returns:
            `DSpineForSpeculation`: This drafter.

        Raises:
            ValueError: When the drafter is unbound or not on a CUDA device, or `max_length` holds no block.
        """
        if self.device.type != "cuda":
            raise ValueError(f"`compile_draft` needs a drafter on a CUDA device, got one on `{self.device}`.")
        self._compiled = CompiledDraft(self, max_length, batch_sizes)
        return self

    # -- the pass over a block -------------------------------------------------------------------------------------

    def run_blocks(
        self,
        embeds: torch.Tensor,
        context: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor,
        inject: InjectFromWeights | InjectFromTables,
        cache=None,
        output_features: bool = False,
    ) -> DSpineModelOutput:
        """Run packed blocks through all layers.

        Args:
            embeds (`torch.Tensor` of shape `[B, Q, H]`): Target embeddings of `Q / N` blocks, one after another.
            context (`torch.Tensor` of shape `[B, n, T * H]`): Tapped target states that are not in `cache` yet.
            position_ids (`torch.Tensor` of shape `[B, n + Q]`, int64): Absolute positions, context first.
            mask (`torch.Tensor` of shape `[B or 1, 1, Q, cached + n + Q]`, bool): `True` where a row may look.
            inject ([`InjectFromWeights`] or [`InjectFromTables`]): What every layer ends with, of `B * Q / N` blocks.
            cache (*optional*): [`DSpineContextCache`] or a transformers cache; gains `n + Q` rows.
            output_features (`bool`): Also return the predicted features after every write.

        Returns:
            [`DSpineModelOutput`].
        """
        hidden = embeds.to(self.fc.weight.dtype) if not torch.is_autocast_enabled() else embeds
        context = self.hidden_norm(self.fc(context.to(hidden.dtype)))
        theta = self.config.rope_parameters["rope_theta"]
        rotary = rotary_tables(position_ids, self.config.head_dim, theta, hidden.dtype)
        blocks = (-1, self.config.block_size, hidden.shape[-1])
        features = []
        for index, layer in enumerate(self.layers):
            state = layer(hidden, context, rotary, mask, cache)
            injected = inject(state.reshape(blocks), index)
            hidden = injected.hidden.reshape(state.shape)
            if output_features:
                features.append(self.injection.feature(hidden, index))
        return DSpineModelOutput(
            last_hidden_state=self.norm(hidden),
            pre_injection_state=state,
            layer_features=tuple(features) if output_features else None,
            projection=injected.projection,
        )

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache=None,
        past_key_values=None,
        anchor_ids: torch.LongTensor | None = None,
        **kwargs,
    ) -> DSpineModelOutput:
        """Run one block a request; the signature transformers' own block-drafter generator calls.

        Args:
            noise_embeds (`torch.Tensor` of shape `[B, N, H]`): Target embeddings of `[anchor, mask, mask, ...]`.
            context_hidden_states (`torch.Tensor` of shape `[B, n, T * H]`): Outputs of the tapped target layers at the
                committed positions that are new since the last call, concatenated in the order of the taps.
            position_ids (`torch.Tensor` of shape `[B, n + N]`, int64, *optional*): Absolute positions of both.
            attention_mask (`torch.Tensor` of shape `[B, cached + n + N]`, *optional*): 0 hides a padded row.
            cache, past_key_values (*optional*): Cache of earlier rows, under its new and its old name; it gains
                `n + N` rows, and the caller crops the last `N`.
            anchor_ids (`torch.Tensor` of shape `[B]`, int64, *optional*): Anchor tokens. Without them they are found
                by their embedding, which reads the whole embedding table.

        Returns:
            [`DSpineModelOutput`].

        Raises:
            ValueError: When the drafter is unbound or the block has another size.
        """
        batch, rows = noise_embeds.shape[:2]
        if rows != self.config.block_size:
            raise ValueError(f"`noise_embeds` must hold `block_size` = {self.config.block_size} rows, got {rows}.")
        cache = past_key_values if cache is None else cache
        if anchor_ids is None:
            anchor_ids = self._anchors_of(noise_embeds[:, 0])
        self.bound()
        past = 0 if cache is None else cache.get_seq_length()
        total = past + context_hidden_states.shape[1] + rows
        device = noise_embeds.device
        if position_ids is None:
            position_ids = torch.arange(past, total, device=device)[None].expand(batch, -1)
        mask = torch.ones(rows, total, dtype=torch.bool, device=device).tril(total - rows)[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :].bool()
        # never an argument of this method: hooks of quantised and dispatched models rebuild arguments as plain tuples
        inject = self.injector(anchor_ids)
        return self.run_blocks(noise_embeds, context_hidden_states, position_ids, mask, inject, cache)

    def injector(self, anchor_ids: torch.LongTensor) -> InjectFromWeights | InjectFromTables:
        """Return the injection of blocks with these anchors `[B]`: from weights where gradients are recorded."""
        if torch.is_grad_enabled():
            return self.injection.from_weights(F.embedding(anchor_ids, self.transfer_codes))
        return self.injection.from_tables(self.prepare(), anchor_ids)

    def _anchors_of(self, embeds: torch.Tensor) -> torch.Tensor:
        table = self.bound().embedding.weight
        found = []
        for row in embeds.to(table.dtype):
            # equality in one column leaves few rows to compare in full
            rows = (table[:, 0] == row[0]).nonzero().squeeze(-1)
            match = rows[(table[rows] == row).all(dim=-1)]
            if match.numel() == 0:
                raise ValueError(
                    "`noise_embeds` must start with an embedding of the bound target, got a row that is not in its "
                    "table: bind the target that generates, or pass `anchor_ids`."
                )
            found.append(match[0])
        return torch.stack(found)

    # -- drafting --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def draft(
        self,
        context: torch.Tensor,
        anchor: torch.LongTensor,
        temperature: float | torch.Tensor = 0.0,
        generator: torch.Generator | None = None,
        cache: DSpineContextCache | None = None,
    ) -> DSpineDraft:
        """Draft the `S` tokens that may follow the anchor.

        Args:
            context (`torch.Tensor` of shape `[B, n, T * H]`): Tapped target states at committed positions before the
                anchor; with a `cache`, only those it does not hold yet.
            anchor (`torch.Tensor` of shape `[B]`, int64): The target's last committed token.
            temperature (`float` or `torch.Tensor` of shape `[B]`): `0` drafts greedily.
            generator (`torch.Generator`, *optional*): Source of the sampled drafts.
            cache (`DSpineContextCache`, *optional*): Gains the `n` context rows.

        Returns:
            [`DSpineDraft`].

        Raises:
            ValueError: When the drafter is unbound or the temperature negative.
        """
        device, slots, tables = anchor.device, self.config.block_size - 1, self.prepare()
        greedy = not isinstance(temperature, torch.Tensor) and temperature == 0
        if not isinstance(temperature, torch.Tensor):
            if temperature < 0:
                raise ValueError(f"`temperature` must be >= 0, got {temperature}.")
            temperature = torch.full(anchor.shape, temperature, dtype=torch.float32, device=device)
        shape = (anchor.shape[0], slots)
        # greedy decoding draws nothing, so the caller's random stream stays where it is
        uniforms = (
            torch.zeros(shape, device=device) if greedy else torch.rand(shape, generator=generator, device=device)
        )
        # a graph reads the tables it was captured with: once a weight has changed it no longer drafts
        captured = isinstance(cache, GraphContextCache) and cache.compiled.tables is tables
        if captured and cache.fits(context.shape[1]):
            return cache.compiled(context, anchor, temperature, uniforms, cache)
        cache = DSpineContextCache() if cache is None else cache
        output = self(
            noise_embeds=self.bound().embedding(self.block_ids(anchor)),
            context_hidden_states=context,
            cache=cache,
            anchor_ids=anchor,
        )
        cache.crop(-self.config.block_size)
        return self.choose(output, anchor, temperature, uniforms, tables)

    def append_context(self, context: torch.Tensor, cache: DSpineContextCache) -> None:
        """Put context rows `[B, n, T * H]` into a cache without drafting from them."""
        context = self.hidden_norm(self.fc(context.to(self.fc.weight.dtype)))
        past = cache.get_seq_length()
        positions = torch.arange(past, past + context.shape[1], device=context.device)[None]
        theta = self.config.rope_parameters["rope_theta"]
        rotary = rotary_tables(positions, self.config.head_dim, theta, context.dtype)
        for index, layer in enumerate(self.layers):
            cache.update(*layer.self_attn.keys_values(context, rotary), index)

    def block_ids(self, anchor: torch.LongTensor) -> torch.LongTensor:
        """Return the token rows of blocks, `[anchor, mask, mask, ...]`: `[B]` to `[B, N]`."""
        masks = anchor.new_full((anchor.shape[0], self.config.block_size - 1), self.config.mask_token_id)
        return torch.cat((anchor[:, None], masks), dim=1)

    def choose(
        self,
        output: DSpineModelOutput,
        anchor: torch.LongTensor,
        temperature: torch.FloatTensor,
        uniforms: torch.FloatTensor,
        tables: TransferTables,
    ) -> DSpineDraft:
        """Choose the tokens of blocks from one pass of the backbone.

        Args:
            output ([`DSpineModelOutput`]): Of blocks `[B, N, H]`.
            anchor (`torch.Tensor` of shape `[B]`, int64), temperature (`torch.Tensor` of shape `[B]`, float32),
                uniforms (`torch.Tensor` of shape `[B, S]`, float32): As of [`candidate_walk`].
            tables ([`TransferTables`]): This drafter's.
        """
        head = self.bound().head
        logits = head(output.last_hidden_state[:, 1:].to(head.weight.dtype))
        _, candidates = top_candidates(logits, self.config.num_candidates)
        state, projection = output.pre_injection_state[:, 1:], output.projection.slots()
        scores = transition_scores(state, candidates, anchor, tables, projection)
        tokens, q = candidate_walk(scores, candidates, temperature, uniforms)
        return DSpineDraft(tokens=tokens, candidates=candidates, q=q, scores=scores)

    spec_generate = spec_generate


__all__ = ["DSpineConfig", "DSpineContextCache", "DSpineForSpeculation"]
