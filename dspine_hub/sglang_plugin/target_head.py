"""Codes of a compact checkpoint, rebuilt from the target's LM head as it lies on disk."""

import torch

from dspine_hub.checkpoints.targets import TargetFiles
from dspine_hub.modeling_dspine import transfer_codes


def rebuild_codes(
    location: str, revision: str | None, basis: dict[str, torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Project the target's LM-head rows into the transfer space.

    Args:
        location, revision: The target.
        basis (`dict`): `mean` `[H]`, `directions` `[R, H]`, `eigenvalues` `[R]`.
        device (`torch.device`): Where to compute.

    Returns:
        `torch.Tensor` of shape `[V, R]`, bfloat16: Unit codes.

    Raises:
        DSpineHubError: When the target stores no LM head, or a quantised one.
    """
    parts = (basis[name].to(device) for name in ("mean", "directions", "eigenvalues"))
    return transfer_codes(TargetFiles(location, revision).head().to(device), *parts)
