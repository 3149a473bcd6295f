"""Tiny real models, seeded."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dspine_hub.configuration_dspine import DSpineConfig, head_fingerprint
from dspine_hub.modeling_dspine import DSpineForSpeculation
from dspine_hub.publish.build import build_bundle

TARGET_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}

DRAFTER_SIZES = {
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "block_size": 5,
    "target_layer_ids": [0, 2, 4],
    "transfer_rank": 16,
    "message_size": 8,
    "num_candidates": 8,
    "initializer_range": 0.2,
}


def config_fields(**overrides) -> dict:
    """Fields of a valid drafter config for the default target."""
    target = {"vocab_size": 97, "hidden_size": 32, "num_target_layers": 6, "mask_token_id": 96}
    return {**target, **DRAFTER_SIZES, **overrides}


def build_target(seed: int = 0, **overrides) -> Qwen3ForCausalLM:
    """Build a random target whose logits vary: the usual initialisation would make every arg-max a tie."""
    torch.manual_seed(seed)
    fields = {**TARGET_SIZES, "initializer_range": 0.3, "tie_word_embeddings": True, "rope_theta": 10000.0}
    fields.update({"bos_token_id": None, "eos_token_id": None, "pad_token_id": None})
    return Qwen3ForCausalLM(Qwen3Config(**{**fields, **overrides})).eval()


def build_drafter(target, seed: int = 1, ready: bool = True, bind: bool = True, writes: bool = True, **overrides):
    """Build a random drafter for `target`; `writes=False` leaves the injection as initialised (silent)."""
    text = target.config
    fields = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "num_target_layers": text.num_hidden_layers,
        "mask_token_id": text.vocab_size - 1,
        **overrides,
    }
    torch.manual_seed(seed)
    drafter = DSpineForSpeculation(DSpineConfig(**config_fields(**fields))).eval()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
        if ready:
            drafter.initialize_transfer_space(target.get_output_embeddings().weight)
        if writes:
            for write in drafter.injection.writes:
                write.weight.normal_(std=0.4)
            drafter.injection.predecessor_gate.weight.normal_(std=0.3)
            drafter.injection.bias.normal_(std=0.3)
    return drafter.bind(target) if ready and bind else drafter


def target_record(target, **overrides) -> dict:
    """The `target` entry of a config, for this very target."""
    text = target.config
    record = {
        "id": "lab/Tiny",
        "revision": "0" * 40,
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_hidden_layers,
        "vocab_size": text.vocab_size,
        "padded_vocab_size": text.vocab_size,
        "tokenizer_sha256": None,
        "lm_head_sha256": head_fingerprint(target.get_output_embeddings().weight),
        "chat_template_sha256": None,
        "enable_thinking": False,
    }
    return {**record, **overrides}


def tiny_bundle(target, place, **fields):
    """Publish a random drafter of `target` as a bundle at `place`."""
    drafter = build_drafter(target, **fields)
    drafter.config.target = target_record(target)
    drafter.save_pretrained(place.with_name(f"{place.name}-checkpoint"))
    return build_bundle(place.with_name(f"{place.name}-checkpoint"), place)
