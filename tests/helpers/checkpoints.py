"""Checkpoints of other formats, written from their descriptions with torch and safetensors alone.

Nothing here imports the package: what a converter reads must not be made by it.
"""

import json
from pathlib import Path

import torch
from helpers.oracle import transfer_codes
from safetensors.torch import save_file

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
TAPS, LAYERS, BLOCK, MASK, RANK, MESSAGE, TOP_K, THETA = [0, 2, 4], 6, 5, 96, 16, 8, 6, 10000.0

# what an oracle needs to know beside the tensors
SETTINGS = {
    **SIZES,
    "rope_theta": THETA,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "transfer_rank": RANK,
    "num_candidates": TOP_K,
}

TRAINING = {
    "ce_weight": 0.1,
    "alignment_weight": 0.5,
    "alignment_warmup_steps": 146,
    "replacement_layers": 3,
    "replacement_probability": 0.5,
    "replacement_hold_ratio": 1 / 6,
    "replacement_end_ratio": 1 / 3,
    "candidate_mass_threshold": 1e-4,
}


def backbone(seed: int = 0) -> dict[str, torch.Tensor]:
    """Make a random backbone in bfloat16, with norms that are not all one."""
    generator = torch.Generator().manual_seed(seed)
    hidden, mlp, dim = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["head_dim"]
    queries, keys = SIZES["num_attention_heads"] * dim, SIZES["num_key_value_heads"] * dim

    def matrix(*shape):
        return (torch.randn(*shape, generator=generator) * 0.2).bfloat16()

    def norm(size):
        return (1 + 0.2 * torch.randn(size, generator=generator)).bfloat16()

    tensors = {"fc.weight": matrix(hidden, len(TAPS) * hidden)}
    tensors |= {"hidden_norm.weight": norm(hidden), "norm.weight": norm(hidden)}
    for layer in range(SIZES["num_hidden_layers"]):
        tensors |= {
            f"layers.{layer}.{name}": tensor
            for name, tensor in {
                "input_layernorm.weight": norm(hidden),
                "post_attention_layernorm.weight": norm(hidden),
                "self_attn.q_proj.weight": matrix(queries, hidden),
                "self_attn.k_proj.weight": matrix(keys, hidden),
                "self_attn.v_proj.weight": matrix(keys, hidden),
                "self_attn.o_proj.weight": matrix(hidden, queries),
                "self_attn.q_norm.weight": norm(dim),
                "self_attn.k_norm.weight": norm(dim),
                "mlp.gate_proj.weight": matrix(mlp, hidden),
                "mlp.up_proj.weight": matrix(mlp, hidden),
                "mlp.down_proj.weight": matrix(hidden, mlp),
            }.items()
        }
    return tensors


def drafter(head: torch.Tensor, seed: int = 0) -> dict[str, torch.Tensor]:
    """Make a whole random drafter with the codes of a head, under the public names."""
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = backbone(seed)
    codes, directions = transfer_codes(head, RANK)
    for layer in range(SIZES["num_hidden_layers"]):
        noise = 0.1 * torch.randn(RANK, SIZES["hidden_size"], generator=generator)
        tensors[f"injection.readouts.{layer}.weight"] = (directions + noise).bfloat16()
        write = 0.4 * torch.randn(SIZES["hidden_size"], MESSAGE, generator=generator)
        tensors[f"injection.writes.{layer}.weight"] = write.bfloat16()
    for name in ("message", "receiver_gate", "predecessor_gate"):
        tensors[f"injection.{name}.weight"] = (0.3 * torch.randn(MESSAGE, RANK, generator=generator)).bfloat16()
    tensors["injection.bias"] = (0.3 * torch.randn(MESSAGE, generator=generator)).bfloat16()
    return tensors | {"transfer_codes": codes.bfloat16(), "transfer_ready": torch.tensor(True)}


def specforge_config() -> dict:
    """Config keys as SpecForge's trainer writes them."""
    return {
        **SIZES,
        "architectures": ["DSpineDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "is_causal": True,
        "num_target_layers": LAYERS,
        "rope_theta": THETA,
        "tie_word_embeddings": False,
        "eos_token_id": 90,
        "layer_types": ["full_attention"] * SIZES["num_hidden_layers"],
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS), "block_size": BLOCK},
        "dspine_config": {"transfer_rank": RANK, "message_size": MESSAGE, "top_k": TOP_K, **TRAINING},
    }


def write(folder: Path, config: dict, tensors: dict, name: str = "model.safetensors") -> Path:
    """Write one weight file and the config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_sharded(folder: Path, config: dict, tensors: dict) -> Path:
    """Write two shards and their index."""
    names = sorted(tensors)
    owners = {key: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, key in enumerate(names)}
    for shard in sorted(set(owners.values())):
        write(folder, config, {key: tensors[key] for key in names if owners[key] == shard}, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": owners}))
    return folder


def write_specforge(folder: Path, head: torch.Tensor, **changes) -> Path:
    """Write SpecForge's export."""
    return write(folder, {**specforge_config(), **changes}, drafter(head))


def write_reference(folder: Path, head: torch.Tensor, nested: bool = True) -> Path:
    """Write the reference layout: codes in a file of their own, a config that says another block length."""
    tensors = drafter(head)
    codes = {"codes": tensors.pop("transfer_codes")}
    del tensors["transfer_ready"]
    config = specforge_config()
    # its source config is the backbone's
    config |= {"architectures": ["DFlashDraftModel"], "block_size": 8}
    config["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
    del config["dspine_config"]
    write(folder, {"config": config} if nested else config, tensors)
    save_file(codes, folder / "transfer.safetensors")
    return folder


def write_dflash(folder: Path, **changes) -> Path:
    """Write z-lab's drafter: a backbone and its config."""
    config = specforge_config()
    del config["dspine_config"], config["is_causal"]
    config["dflash_config"] = {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
    config |= {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    return write(folder, {**config, **changes}, backbone())


def write_hub(folder: Path, head: torch.Tensor, record: dict) -> Path:
    """Write an early bundle: no code, no provenance, none of the optional fields."""
    config = {key: value for key, value in specforge_config().items() if key in SIZES}
    config |= {"model_type": "dspine", "architectures": ["DSpineForSpeculation"], "num_target_layers": LAYERS}
    config |= {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": list(TAPS), "rope_theta": THETA}
    config |= {"transfer_rank": RANK, "message_size": MESSAGE, "num_candidates": TOP_K, "target": record}
    return write(folder, config, drafter(head))
