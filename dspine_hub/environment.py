"""The machine and the versions behind a number."""

import importlib.metadata
import importlib.util
import platform
import subprocess
from pathlib import Path

from dspine_hub.errors import DSpineHubError

PACKAGES = (
    "dspine-hub",
    "torch",
    "transformers",
    "huggingface_hub",
    "tokenizers",
    "safetensors",
    "accelerate",
    "triton",
    "sglang",
)


def require_installed() -> None:
    """Raise `DSpineHubError` in a checkout that was not installed: packages that lie beside this one are missing."""
    if importlib.util.find_spec("dspine_hub.conversion") is None:
        raise DSpineHubError(
            "`dspine_hub` must be installed to find the packages beside it, got a bare checkout: run `pip install -e "
            f".` in `{Path(__file__).resolve().parents[1]}`."
        )


def describe_environment() -> dict:
    """Describe where a measurement or a training run happened.

    Returns:
        `dict`: `machine` (`device`, `cpu_count`, `system`), `versions` (installed packages that matter, Python, CUDA)
        and `commit` (git sha of this source tree with `-dirty` when it has changes, `None` outside a checkout).
    """
    import os

    import torch

    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else (_cpu_name() or platform.machine())
    machine = {"device": device, "cpu_count": os.cpu_count(), "system": platform.system()}
    return {"machine": machine, "versions": versions, "commit": _commit()}


def _cpu_name() -> str | None:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return None
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else None


def _commit() -> str | None:
    root = Path(__file__).resolve().parent
    try:
        result = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
