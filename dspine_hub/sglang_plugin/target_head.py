"""Codes of a compact checkpoint, rebuilt from the target's LM head as it lies on disk."""

from pathlib import Path

import torch

from dspine_hub.errors import DSpineHubError
from dspine_hub.pairing import head_name
from dspine_hub.sources import Source


def rebuild_codes(
    location: str, revision: str | None, basis: dict[str, torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Project the target's LM-head rows into the transfer space.

    Args:
        location, revision: The target, whose weights are local or in the Hub client's cache.
        basis (`dict`): `mean` `[H]`, `directions` `[R, H]`, `eigenvalues` `[R]`.
        device (`torch.device`): Where to compute.

    Returns:
        `torch.Tensor` of shape `[V, R]`, bfloat16: Unit codes.
    """
    head = _read_head(location, revision)
    if not head.is_floating_point():
        raise DSpineHubError(f"compact codes need the LM head in full precision, got {head.dtype} in `{location}`.")
    from dspine_hub.modeling_dspine import transfer_codes

    parts = (basis[name].to(device) for name in ("mean", "directions", "eigenvalues"))
    return transfer_codes(head.to(device), *parts)


def _read_head(location: str, revision: str | None) -> torch.Tensor:
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    source = Source(location, revision)
    folder = source.folder or Path(snapshot_download(location, revision=revision, local_files_only=True))
    local = Source(folder)
    name = head_name(local)
    for path in local.weight_files():
        with safe_open(path, framework="pt") as weights:
            if name in weights.keys():  # noqa: SIM118
                return weights.get_tensor(name)
    raise DSpineHubError(f"compact codes need the LM head of `{location}`, got none under a known name.")
