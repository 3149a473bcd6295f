"""Checkpoints of random weights, of ordinary scale, for engines whose speed is measured.

An engine's own dummy weights are so small that all rows of a batch become alike. A device may draw less power on such
rows and clock higher, and a drafter that proposes one token over and over then looks faster than one that does not.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SCALE = 0.02
SHARD = 2 << 30  # bytes


def target_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a transformers checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **options))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def dspine_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a DSpine checkpoint."""
    from dspine_hub.checkpoints.expected import expected_tensors
    from dspine_hub.configuration_dspine import DSpineConfig

    return expected_tensors(DSpineConfig(**config))


def dflash_part(dspine: dict) -> dict:
    """Return what of a DSpine checkpoint's tensors, or of their shapes, by name, a DFlash checkpoint has too."""
    from dspine_hub.checkpoints.expected import START_NAMES

    return {name: value for name, value in dspine.items() if not name.startswith(START_NAMES)}


def dflash2_shapes(dflash: dict[str, tuple[int, ...]], config: dict) -> dict[str, tuple[int, ...]]:
    """Return those of a DFlash checkpoint, and what its second version adds: a selector, two convolutions a layer."""
    width, vocabulary, method = config["hidden_size"], config["vocab_size"], config["dflash_config"]
    rank = method["selector_rank"]
    shapes = {f"candidate_selector.{side}_codebook": (vocabulary, rank) for side in ("predecessor", "successor")}
    shapes["candidate_selector.hidden_projection.weight"] = (rank, width)
    if "conv_kernel_size" in method:
        taps, groups = method["conv_kernel_size"], width // method["conv_group_size"]
        for layer in range(config["num_hidden_layers"]):
            for place in ("attention_conv", "mlp_conv"):
                name = f"layers.{layer}.{place}"
                shapes[f"{name}.base_kernel"] = (2, taps, width)
                shapes[f"{name}.kernel_projection.weight"] = (2 * taps * groups, width)
    return {**dflash, **shapes}


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draw one tensor in bfloat16: normal, save norms (1), the codes (unit rows) and the flag of a trained drafter."""
    if name == "transfer_ready":
        return torch.tensor(True)
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    values = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    values.normal_(0.0, SCALE, generator=generator)
    if name == "transfer_codes":
        values = torch.nn.functional.normalize(values.float(), dim=-1).to(values.dtype)
    if name.endswith("base_kernel"):
        values[:, 0] += 1
    return values.cpu()


def write_checkpoint(folder: Path, config: dict, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Path:
    """Write `config.json` and random tensors, in parts of about two gigabytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, part, number = torch.Generator(device).manual_seed(seed), {}, 0
    last = next(reversed(shapes))
    for name, shape in shapes.items():
        part[name] = draw(name, shape, generator)
        if name == last or sum(tensor.nbytes for tensor in part.values()) > SHARD:
            save_file(part, folder / f"model-{number:05}.safetensors", metadata={"format": "pt"})
            part, number = {}, number + 1
    return folder
