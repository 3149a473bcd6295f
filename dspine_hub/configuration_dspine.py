"""Configuration of a DSpine drafter. Every rule about a config is checked here, at construction and at save.

The algorithm's source is arXiv 2609.36173; field names follow Qwen3 and the public block-drafter checkpoints.
"""

import hashlib
import json

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

TARGET_FIELDS = (
    "id",
    "revision",
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "padded_vocab_size",
    "tokenizer_sha256",
    "lm_head_sha256",
    "chat_template_sha256",
    "enable_thinking",
)

REQUIRED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_target_layers",
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "transfer_rank",
    "message_size",
    "num_candidates",
)


@strict
class DSpineConfig(PreTrainedConfig):
    """Shape of a DSpine drafter and the target it belongs to.

    Args:
        vocab_size (`int`): Rows of the target's LM head, padding rows included.
        hidden_size (`int`): Width of drafter and target.
        intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, hidden_act,
            rms_norm_eps, attention_bias, attention_dropout, max_position_embeddings, initializer_range: As in Qwen3.
        num_target_layers (`int`): Decoder layers of the target.
        block_size (`int`): Rows of a block: one anchor and `block_size - 1` proposal slots.
        target_layer_ids (`list[int]`): Tapped decoder layers of the target, sorted; 0 is the first decoder layer,
            whose output is `hidden_states[1]` of transformers. The last layer cannot be tapped: what transformers
            returns for it is already normed.
        mask_token_id (`int`): Token whose embedding fills the proposal slots.
        transfer_rank (`int`): Width `R` of the unified transfer space.
        message_size (`int`): Width `M` of an injected message.
        num_candidates (`int`): Candidates `K` a slot.
        rope_parameters (`dict`): `{"rope_type": "default", "rope_theta": ...}`. A top-level `rope_theta` is read too.
            A drafter rotates its full head dim with plain RoPE, whatever its target does.
        layer_types (`list[str]`, *optional*): `"full_attention"` for every layer.
        is_causal (`bool`, *optional*, defaults to `True`): Attention inside a block. DSpine's is causal.
        transfer_storage (`str`, *optional*, defaults to `"codes"`): `"codes"` keeps the `[V, R]` code table in the
            checkpoint; `"basis"` keeps mean, directions and eigenvalues and rebuilds the table from the target's head.
        target (`dict`, *optional*): What the drafter was trained for; its keys are `TARGET_FIELDS`.

    Raises:
        ValueError: When a rule is broken; transformers wraps it in `StrictDataclassClassValidationError` when the rule
            is one of the `validate_*` methods.
    """

    model_type = "dspine"
    has_no_defaults_at_init = True

    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    max_position_embeddings: int | None = None
    initializer_range: float = 0.02
    rope_parameters: dict | None = None
    num_target_layers: int | None = None
    block_size: int | None = None
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    transfer_rank: int | None = None
    message_size: int | None = None
    num_candidates: int | None = None
    layer_types: list[str] | None = None
    is_causal: bool | None = None
    transfer_storage: str | None = None
    target: dict | None = None

    def __post_init__(self, **kwargs):
        missing = [name for name in REQUIRED_FIELDS if getattr(self, name) is None]
        if missing:
            names = ", ".join(f"`{name}`" for name in missing)
            raise ValueError(f"{names} must be set: a drafter's layout is never guessed, got no value.")
        self.rope_parameters = _plain_rope(self.rope_parameters, kwargs)
        # written out instead of defaulted, so that config.json states them
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.is_causal is None:
            self.is_causal = True
        if self.transfer_storage is None:
            self.transfer_storage = "codes"
        super().__post_init__(**kwargs)

    def validate_basic_sizes(self):
        for name in (*REQUIRED_FIELDS[:8], "num_target_layers", "message_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1, got {getattr(self, name)}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` must be a multiple of `num_key_value_heads`, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even for rotary embeddings, got {self.head_dim}.")

    def validate_block(self):
        if self.block_size < 2:
            raise ValueError(f"`block_size` counts the anchor and must be >= 2, got {self.block_size}.")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"`mask_token_id` must lie in [0, {self.vocab_size}), got {self.mask_token_id}.")
        if not 1 <= self.num_candidates <= self.vocab_size:
            raise ValueError(f"`num_candidates` must lie in [1, {self.vocab_size}], got {self.num_candidates}.")

    def validate_target_layer_ids(self):
        ids = self.target_layer_ids
        if not ids or ids != sorted(set(ids)):
            raise ValueError(f"`target_layer_ids` must be sorted and unique and name at least one layer, got {ids}.")
        last = self.num_target_layers - 1
        if ids[0] < 0 or ids[-1] > last:
            raise ValueError(f"`target_layer_ids` must lie in [0, {last}), got {ids}.")
        if ids[-1] == last:
            raise ValueError(
                f"`target_layer_ids` must not tap the last layer ({last}): its entry in `hidden_states` is already "
                f"normed, got {ids}."
            )

    def validate_transfer_space(self):
        limit = min(self.hidden_size, self.vocab_size - 1)
        if not 1 <= self.transfer_rank <= limit:
            raise ValueError(
                f"`transfer_rank` must lie in [1, min(hidden_size, vocab_size - 1)] = [1, {limit}], "
                f"got {self.transfer_rank}."
            )
        if self.transfer_storage not in ("codes", "basis"):
            raise ValueError(f"`transfer_storage` must be 'codes' or 'basis', got {self.transfer_storage!r}.")

    def validate_attention(self):
        if self.is_causal is not True:
            raise ValueError(
                f"`is_causal` must be true, got {self.is_causal}: DSpine attends causally inside a block; a "
                "bidirectional drafter is another method."
            )
        expected = ["full_attention"] * self.num_hidden_layers
        if self.layer_types != expected:
            raise ValueError(
                f"`layer_types` must be 'full_attention' for all {self.num_hidden_layers} layers, got "
                f"{self.layer_types}: sliding windows are not supported."
            )

    def validate_target(self):
        if self.target is None:
            return
        if set(self.target) != set(TARGET_FIELDS):
            missing = sorted(set(TARGET_FIELDS) - set(self.target))
            unknown = sorted(set(self.target) - set(TARGET_FIELDS))
            raise ValueError(
                f"`target` must have exactly the keys {list(TARGET_FIELDS)}, missing {missing}, unknown {unknown}."
            )
        pairs = (
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_target_layers),
            ("padded_vocab_size", self.vocab_size),
        )
        for name, expected in pairs:
            if self.target[name] != expected:
                raise ValueError(
                    f"`target.{name}` must equal the drafter's own value {expected}, got {self.target[name]}."
                )
        logical = self.target["vocab_size"]
        if not isinstance(logical, int) or not 1 <= logical <= self.vocab_size:
            raise ValueError(
                f"`target.vocab_size` is the tokenizer's and must lie in [1, {self.vocab_size}], got {logical}."
            )


def _plain_rope(parameters, kwargs):
    """Read RoPE from the new `rope_parameters` or the old top-level keys (removed from `kwargs`), or refuse it."""
    scaling = kwargs.pop("rope_scaling", None) or {}
    theta = kwargs.pop("rope_theta", None)
    found = {**scaling, **(parameters or {})}
    partial = found.pop("partial_rotary_factor", kwargs.pop("partial_rotary_factor", None))
    if partial not in (None, 1):
        raise ValueError(
            f"`partial_rotary_factor` must be 1 or absent, got {partial}: a drafter rotates its full head dim; the "
            "value belongs to the target's config."
        )
    if any(name.startswith("mrope") for name in found) or found.get("rope_type") == "mrope":
        raise ValueError(
            f"`rope_parameters` must be plain RoPE, got the M-RoPE parameters {found}: they belong to a multimodal "
            "target; a drafter sees text positions only."
        )
    theta = found.pop("rope_theta", theta)
    if theta is None:
        raise ValueError(
            "`rope_parameters` must give `rope_theta` (or the config a top-level `rope_theta`), got neither: a "
            "guessed base silently ruins acceptance."
        )
    rope_type = found.pop("rope_type", None) or found.pop("type", None) or "default"
    found.pop("type", None)
    if rope_type != "default" or found:
        raise ValueError(
            f"`rope_parameters` must be plain RoPE (`rope_type` 'default' and `rope_theta`), got {rope_type!r} with "
            f"{found}: scaled or per-layer RoPE is not supported."
        )
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or theta <= 0:
        raise ValueError(f"`rope_theta` must be a positive number, got {theta!r}.")
    return {"rope_type": "default", "rope_theta": float(theta)}


def tokenizer_fingerprint(tokenizer) -> str:
    """Hash which string every token id stands for.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer, added tokens included.

    Returns:
        `str`: sha256 of the JSON list of `[id, token]`, sorted by id.
    """
    table = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(table, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()


def head_fingerprint(weight) -> str:
    """Hash an LM head so that the load dtype does not matter.

    Args:
        weight (`torch.Tensor` of shape `[V, H]`): The LM head's rows.

    Returns:
        `str`: sha256 of the rows in bfloat16, row by row, little endian.
    """
    import torch

    digest = hashlib.sha256()
    for rows in weight.detach().split(16384):
        digest.update(rows.to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


__all__ = ["TARGET_FIELDS", "DSpineConfig", "head_fingerprint", "tokenizer_fingerprint"]
