"""Names and shapes of every tensor a drafter stores, told from its config alone."""

import re

import torch

from dspine_hub.checkpoints.formats import QUANTIZED
from dspine_hub.configuration_dspine import DSpineConfig

# what DSpine adds to a backbone; made where a backbone comes without it
START_NAMES = ("injection.", "transfer_")


def expected_tensors(config: DSpineConfig) -> dict[str, tuple[int, ...]]:
    """List names and shapes of everything a drafter with this config stores."""
    from dspine_hub.modeling_dspine import DSpineForSpeculation

    with torch.device("meta"):
        model = DSpineForSpeculation(config)
    return stored_shapes({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, config)


def quantized_names(names) -> list[str]:
    """List the weights that are quantised, of all names of a drafter."""
    return [name for name in names if re.fullmatch(QUANTIZED + r"\.weight", name)]


def stored_shapes(shapes: dict[str, tuple[int, ...]], config) -> dict[str, tuple[int, ...]]:
    """Add the scales that a quantised drafter stores beside the tensors of its model."""
    if not getattr(config, "quantization_config", None):
        return dict(shapes)
    return shapes | {f"{name}_scale": (shapes[name][0], 1) for name in quantized_names(shapes)}
