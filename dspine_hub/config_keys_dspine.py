"""What the keys of a drafter's `config.json` mean here: which change what the weights compute, and which never do.

Public drafters carry keys of other methods, of their trainer, and of the target their config was copied from. A key
that changes the result is refused unless its value leaves the result as it is; one known to be harmless is kept; every
other is kept and named once. One table for the model's config, the converter, `bundle`, `inspect`, engines and docs.
"""

import math
from typing import NamedTuple


class Changing(NamedTuple):
    """A key that changes what the weights compute.

    Args:
        neutral (`tuple`): Values under which it does not; `None` and a missing key are always neutral.
        what (`str`): What it asks for.
        seen (`str`): Whose drafters use it.
    """

    neutral: tuple
    what: str
    seen: str


_OFF = (False, 0)

# at the top of a config or in `dflash_config`, where engines read them too
CHANGING = {
    "rope_is_neox_style": Changing((True,), "interleaved RoPE", "LiquidAI's LFM2.5 DSpark; SGLang honours it"),
    "is_neox_style": Changing((True,), "interleaved RoPE", "SGLang's other spelling"),
    "rope_interleave": Changing(_OFF, "interleaved RoPE", "DeepSeek's"),
    "rope_interleaved": Changing(_OFF, "interleaved RoPE", "converted checkpoints"),
    "rope_dim": Changing((), "RoPE on a part of the head", "SGLang's MiMo"),
    "rotary_dim": Changing((), "RoPE on a part of the head", "GPT-J's and its heirs"),
    "attention_sink_bias": Changing(_OFF, "a learned sink a head", "NVIDIA's Nemotron DSpark, MiMo"),
    "attention_sinks": Changing(_OFF, "a learned sink a head", "gpt-oss"),
    "attention_value_scale": Changing((1,), "scaled values", "MiMo"),
    "attention_multiplier": Changing((), "another scale of attention", "Granite"),
    "attention_scale": Changing((), "another scale of attention", "converted checkpoints"),
    "query_pre_attn_scalar": Changing((), "another scale of attention", "Gemma"),
    "attn_logit_softcapping": Changing(_OFF, "capped attention", "Gemma"),
    "enable_qwen35_gated_q_proj": Changing(_OFF, "gated queries", "Ornith's DSpark for Qwen3.5"),
    "log_snr_conditioning": Changing(_OFF, "an embedding of the noise level", "PrismML's Bonsai DSpark"),
    "markov_rank": Changing(_OFF, "a Markov head", "DSpark"),
    "markov_head_type": Changing((), "a Markov head", "DSpark"),
    "enable_confidence_head": Changing(_OFF, "a confidence head", "DSpark"),
    "dflash_query_causal": Changing((True,), "attention in both directions", "mlx-dspark"),
    "conv_kernel_size": Changing(_OFF, "DFlash2's convolution", "DFlash2"),
    "conv_group_size": Changing(_OFF, "DFlash2's convolution", "DFlash2"),
    "selector_rank": Changing(_OFF, "DFlash2's selector", "DFlash2, mlx-dspark"),
    "selector_top_k": Changing(_OFF, "DFlash2's selector", "DFlash2"),
    "gru_hidden_dim": Changing(_OFF, "Domino's recurrent head", "Domino"),
    "emb_dim": Changing(_OFF, "Domino's recurrent head", "Domino"),
    "shift_label": Changing(_OFF, "labels one slot later", "SpecForge's Domino"),
    "pure_draft_prefix_len": Changing(_OFF, "Domino's prefix", "Domino"),
    "projector_type": Changing(("dspine", "dflash"), "another method's head", "SpecForge's DSpark, Domino, DFlash2"),
    "attention_mode": Changing(("gqa", "mha"), "another attention", "z-lab's MLA drafters"),
    "attention_modes": Changing(("gqa", "mha"), "another attention", "z-lab's MLA drafters"),
    "use_swa": Changing(_OFF, "sliding windows", "NVIDIA's Nemotron DSpark"),
    "swa_window_size": Changing(_OFF, "sliding windows", "NVIDIA's Nemotron DSpark"),
    "final_logit_softcapping": Changing(_OFF, "capped logits", "Gemma's drafters"),
    "output_multiplier": Changing((1,), "scaled logits", "Cohere's and MuP drafters"),
    "logit_scale": Changing((1,), "scaled logits", "Cohere's"),
    "logits_scaling": Changing((1,), "scaled logits", "Granite"),
    "input_embedding_scale": Changing((1,), "scaled embeddings", "Gemma's drafters"),
    "embedding_multiplier": Changing((1,), "scaled embeddings", "Granite"),
    "scale_embedding": Changing(_OFF, "scaled embeddings", "Gemma's drafters"),
    "residual_multiplier": Changing((1,), "scaled residuals", "Granite"),
    "norm_weight_offset": Changing(_OFF, "norm weights stored minus one", "Gemma, Qwen3.5"),
    "zero_centered_norm": Changing(_OFF, "norm weights stored minus one", "Gemma, Qwen3.5"),
    "zero_centered_rmsnorm": Changing(_OFF, "norm weights stored minus one", "Megatron's exports"),
    "layernorm_zero_centered_gamma": Changing(_OFF, "norm weights stored minus one", "Megatron's exports"),
    "sample_from_anchor": Changing(_OFF, "an anchor that predicts too", "speculators, DSpark"),
    "use_qk_norm": Changing((True,), "queries and keys without norms", "backbones that are no Qwen3"),
    "qk_norm": Changing((True,), "queries and keys without norms", "backbones that are no Qwen3"),
    "mlp_bias": Changing(_OFF, "biases in the MLP", "Llama's"),
    "swiglu_limit": Changing((), "a clamped SwiGLU", "gpt-oss"),
    "hc_mult": Changing((1,), "hyper-connections", "DeepSeek V4's drafters"),
    "injection_layers": Changing((), "an injection after some layers only", "a variant of SpecForge's DSpine"),
    "has_lm_head": Changing(_OFF, "a head of its own", "speculators"),
    "norm_before_residual": Changing(_OFF, "EAGLE-3's residual", "EAGLE-3"),
    "norm_before_fc": Changing(_OFF, "a norm before `fc`", "EAGLE-3"),
}
# z-lab's name of the bidirectional block; the same weights run causally here, and a conversion says so
CHANGING_IN_DFLASH = {"causal": Changing((True,), "attention in both directions", "z-lab's DFlash, vLLM")}

# fmt: off
# the public trainer's own section: it refuses any other key itself
DSPINE_SECTION = frozenset(
    {
        "transfer_rank", "message_size", "top_k", "ce_weight", "alignment_weight", "alignment_warmup_steps",
        "replacement_layers", "replacement_probability", "replacement_hold_ratio", "replacement_end_ratio",
        "candidate_mass_threshold", "block_size",
    }
)
DFLASH_SECTION = frozenset(
    {
        "mask_token_id", "mask_token", "target_layer_ids", "aux_hidden_state_layer_ids", "block_size",
        "num_target_layers", "num_anchors", "max_anchors", "loss_decay_gamma", "attention_backend", "loss_type",
        "anchor_sampling", "num_hidden_layers",
    }
)

# keys of every transformers config, of trainers, and of the target a config was copied from, which shapes contradict
HARMLESS = frozenset(
    {
        "_attn_implementation", "_attn_implementation_internal", "_commit_hash", "_name_or_path",
        "add_cross_attention", "architectures", "auto_map", "bad_words_ids", "bos_token_id",
        "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty",
        "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
        "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
        "id2label", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty", "max_length", "min_length",
        "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
        "output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "prefix", "problem_type",
        "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
        "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
        "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "top_k", "top_p", "torch_dtype",
        "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache", "attn_output_gate",
        "decoder_sparse_step", "full_attention_interval", "image_token_id", "linear_conv_kernel_dim",
        "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim",
        "mamba_ssm_dtype", "max_window_layers", "mlp_only_layers", "moe_intermediate_size", "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings", "norm_topk_prob", "num_experts", "num_experts_per_tok",
        "output_router_logits", "router_aux_loss_coef", "shared_expert_intermediate_size", "text_config",
        "video_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id", "attention_backend",
        "auto_generated", "confidence_head_with_markov", "confidence_temperatures", "loss_decay_gamma",
        "max_anchors", "min_log_snr", "max_log_snr", "num_anchors", "speculators_model_type", "speculators_version",
        "speculators_config", "target_hidden_size", "target_model_name", "target_model_type", "training_args",
        "sliding_window_non_causal", "origin", "trained_context", "transfer_checksums",
    }
)
# fmt: on


def is_neutral(value, known: Changing) -> bool:
    """Tell whether a key with this value leaves the result as it is; lists are neutral when each entry is."""
    if value is None:
        return True
    if isinstance(value, list):
        return all(is_neutral(item, known) for item in value)
    if isinstance(value, str):
        return value.lower() in known.neutral
    # `True == 1`, and neither is asked for in place of the other
    return any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in known.neutral
    ) or (known.neutral == _OFF and value is False)


def changing_keys(config: dict, place: str = "", known: dict | None = None) -> list[str]:
    """Describe every key of an object that changes what the weights compute, one sentence each."""
    found = []
    for key, meaning in (CHANGING if known is None else known).items():
        value = config.get(key)
        if not is_neutral(value, meaning):
            allowed = " or ".join(["absent", *(repr(item) for item in meaning.neutral)])
            found.append(
                f"`{place}{key}` must be {allowed}, got {value!r}: it asks for {meaning.what} ({meaning.seen}), which "
                "changes what the weights compute, and DSpine has no such part."
            )
    return found


def neutral_rope(parameters: dict) -> bool:
    """Tell whether scaled RoPE scales nothing: a factor of 1 of a kind that then equals plain RoPE."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    scale = parameters.get("attention_factor")
    return kind in ("linear", "yarn", "llama3") and parameters.get("factor") == 1 and scale in (None, 1)


def not_finite(config: dict, place: str = "") -> str | None:
    """Return the place of a number that is not finite, or `None`."""
    for key, value in config.items():
        if isinstance(value, float) and not math.isfinite(value):
            return f"{place}{key}"
        if isinstance(value, dict):
            inner = not_finite(value, f"{place}{key}.")
            if inner is not None:
                return inner
    return None
