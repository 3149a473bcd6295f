"""Weight-only quantisation of a drafter's backbone, in the layout of compressed-tensors.

A linear of a layer becomes `weight` (fp8 e4m3 or int8) and `weight_scale`, one bfloat16 scale a row. Everything else
stays in bfloat16: norms, injection and codes, because they decide which token is drafted after which, and `fc`,
because it reads the target's raw states, outliers included, and its dtype is that of the whole pass.
"""

from collections.abc import Iterator

import torch

from dspine_hub.checkpoints.expected import quantized_names
from dspine_hub.checkpoints.formats import QUANTIZATIONS, QUANTIZED
from dspine_hub.checkpoints.tensors import torch_dtype
from dspine_hub.conversion.writing import Item

ROWS = 1024


def quantization_config(name: str) -> dict:
    """Return what `config.json` says, for transformers, vLLM and SGLang alike.

    Args:
        name (`str`): A key of `QUANTIZATIONS`.
    """
    scheme = QUANTIZATIONS[name]
    weights = {"num_bits": 8, "type": scheme.kind, "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"targets": [f"re:{QUANTIZED}$"], "format": scheme.layout, "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "input_activations": None, "output_activations": None}},
        "ignore": [],
        # transformers turns the weights back when it loads, as its linears cannot multiply with them; the second
        # name is that of older releases
        "dequantize": True,
        "run_compressed": False,
    }


def quantize_items(items: list[Item], name: str) -> list[Item]:
    """Replace the backbone's linears by their quantised pairs."""
    chosen = set(quantized_names(item.name for item in items))
    result = [item for item in items if item.name not in chosen]
    for item in items:
        if item.name in chosen:
            result += _pair(item, name)
    return result


def _pair(item: Item, name: str) -> list[Item]:
    dtype = QUANTIZATIONS[name].dtype

    def weights() -> Iterator[torch.Tensor]:
        yield from (weight.reshape(-1) for weight, _ in _quantized_rows(item, name))

    def scales() -> Iterator[torch.Tensor]:
        yield from (scale.reshape(-1) for _, scale in _quantized_rows(item, name))

    return [
        Item(item.name, item.shape, dtype, weights),
        Item(f"{item.name}_scale", (item.shape[0], 1), "BF16", scales),
    ]


def _quantized_rows(item: Item, name: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield some rows in the small dtype, and their scales `[rows, 1]`."""
    scheme = QUANTIZATIONS[name]
    # pieces share two buffers: a copy of each
    matrix = torch.cat([piece.clone() for piece in item.pieces()]).reshape(item.shape)
    for rows in matrix.split(ROWS):
        wide = rows.float()
        scale = (wide.abs().amax(dim=1, keepdim=True) / scheme.top).clamp_min(1e-12).to(torch.bfloat16)
        # the scale that is stored, rounded as it is
        scaled = (wide / scale.float()).clamp(-scheme.top, scheme.top)
        yield (scaled.round() if scheme.kind == "int" else scaled).to(torch_dtype(scheme.dtype)), scale
