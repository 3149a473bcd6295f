"""The formats a drafter can be converted from and to, as data: what they are, their config's places, their tensors.

This table is read by the command line, the documents and the tests; it needs neither torch nor transformers.
"""

from dataclasses import dataclass

# what an id of a tapped layer may mean -> what to add to get this package's meaning, "output of decoder layer id"
TAP_MEANINGS = {
    "output": 0,
    # `hidden_states[0]` is the embedding, so entry i is the output of layer i - 1
    "hidden_states": -1,
    # what enters layer i left layer i - 1
    "before": -1,
}


@dataclass(frozen=True)
class Rename:
    """Store the tensor matched by `pattern` as `name`, a regular expression's template."""

    pattern: str
    name: str


@dataclass(frozen=True)
class Split:
    """Cut the rows of a fused tensor into `names`, in this order."""

    pattern: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Drop:
    """Leave a tensor out, for a reason. `equal_to` is what it must equal: a table of the target, or `"identity"`."""

    pattern: str
    reason: str
    equal_to: str | None = None


@dataclass(frozen=True)
class Cast:
    """Store the destination's tensors matched by `pattern` as `dtype`, safetensors' name."""

    pattern: str
    dtype: str


@dataclass(frozen=True)
class Format:
    """One layout.

    Args:
        summary (`str`): One line for people.
        reads, writes (`bool`): Whether it can be a source, a destination.
        needs_target (`bool`): Whether a source of it holds too little without its target.
        block_size (`int`, *optional*): Block length whatever its config says.
        nested (`bool`): Whether its config may lie under the key `config`.
    """

    summary: str
    reads: bool = True
    writes: bool = False
    needs_target: bool = False
    block_size: int | None = None
    nested: bool = False


FORMATS = {
    "hub": Format("this package's bundle; converting to it also upgrades an older one", writes=True),
    "specforge": Format("SpecForge's export: `DSpineDraftModel`, config and weights, no code", writes=True),
    "reference": Format(
        "weights without codes, a second file with one tensor `codes`, config possibly under `config`",
        block_size=16,
        nested=True,
    ),
    "dflash": Format(
        "z-lab's `DFlashDraftModel`: a backbone; the injection starts silent and is to be trained", needs_target=True
    ),
}


@dataclass(frozen=True)
class Quantization:
    """One way to store the backbone's linears: safetensors' dtype, its largest value, compressed-tensors' names."""

    dtype: str
    top: float
    kind: str
    layout: str


QUANTIZATIONS = {
    "fp8": Quantization("F8_E4M3", 448.0, "float", "float-quantized"),
    "int8": Quantization("I8", 127.0, "int", "int-quantized"),
}
# the modules whose weights are quantised
QUANTIZED = r"layers\.\d+\.(?:self_attn|mlp)\.\w+_proj"

_PREFIX = r"(?:(?:model|draft_model)\.)?"

# the first rule that matches a source tensor applies
RULES = (
    Drop(_PREFIX + r"rotary_emb\.inv_freq", "follows from `rope_theta`"),
    Drop(_PREFIX + r"embed_tokens\.weight", "the embedding is the target's", "embedding"),
    Drop(_PREFIX + r"lm_head\.weight", "the LM head is the target's", "head"),
    Drop(_PREFIX + r"(?:d2t|t2d)", "a drafter has the target's whole vocabulary", "identity"),
    Split(
        _PREFIX + r"(layers\.\d+\.self_attn)\.qkv_proj\.(weight|bias)",
        (r"\1.q_proj.\2", r"\1.k_proj.\2", r"\1.v_proj.\2"),
    ),
    Split(_PREFIX + r"(layers\.\d+\.mlp)\.gate_up_proj\.weight", (r"\1.gate_proj.weight", r"\1.up_proj.weight")),
    Rename(r"codes", "transfer_codes"),
    Rename(_PREFIX + r"(.+)", r"\1"),
)

# the first rule that matches a destination tensor applies
CASTS = (
    Cast(r"transfer_ready", "BOOL"),
    # eigenvalues span orders of magnitude
    Cast(r"transfer_basis\..+", "F32"),
    Cast(r".+", "BF16"),
)

# keys that mean the same in every config
SHARED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "max_position_embeddings",
    "initializer_range",
    "num_target_layers",
    "layer_types",
)
ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")
ROPE_PLACES = ("rope_parameters.rope_theta", "rope_scaling.rope_theta", "rope_theta")

# field of a drafter's config -> places of other configs that give it; all that are there must agree
PLACES = {
    "block_size": ("block_size", "dflash_config.block_size", "dspine_config.block_size"),
    "mask_token_id": ("dflash_config.mask_token_id", "mask_token_id"),
    "transfer_rank": ("dspine_config.transfer_rank",),
    "message_size": ("dspine_config.message_size",),
    "num_candidates": ("dspine_config.top_k",),
    "target": ("dspine_hub.target",),
}

# places of tapped layers -> what their ids mean
TAP_PLACES = {
    "dflash_config.target_layer_ids": "output",
    "target_layer_ids": "output",
    # speculators' and vLLM's: the state that enters the layer
    "aux_hidden_state_layer_ids": "before",
    "dflash_config.aux_hidden_state_layer_ids": "before",
    "eagle_aux_hidden_state_layer_ids": "before",
}

# trainer's defaults, where its config leaves them out
DEFAULTS = {"num_candidates": 16}
# a drafter started from a backbone gets the published sizes, capped by what its target allows
START_RANK, START_MESSAGE = 1024, 512

# keys of a config that change what the weights compute -> values under which they do not
NEUTRAL = {
    "dflash_config.attention_mode": (None, "gqa", "mha"),
    "dflash_config.attention_modes": (None,),
    "dflash_config.causal": (None, True),
    "dflash_config.projector_type": (None,),
    "dflash_config.shift_label": (None, False),
    "dflash_config.pure_draft_prefix_len": (None, 0),
    "dflash_config.final_logit_softcapping": (None, 0),
    "dflash_config.output_multiplier": (None, 1),
    "dflash_config.input_embedding_scale": (None, 1),
    "final_logit_softcapping": (None, 0),
    "output_multiplier": (None, 1),
    "input_embedding_scale": (None, 1),
    "sample_from_anchor": (None, False),
    "quantization_config": (None,),
}
# DFlash looks both ways inside a block; the same weights run causally here, and say so
NEUTRAL_FOR_DFLASH = ("dflash_config.causal",)

# keys that name code or the writer's software, never a property of the drafter
DROPPED_KEYS = (
    "auto_map",
    "_name_or_path",
    "transformers_version",
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
)
