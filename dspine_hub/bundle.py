"""From a checkpoint to the flat folder a hub repository is: weights, code that loads without this package, provenance.

The folder appears whole or not at all: it is written beside its place and renamed when complete.
"""

import json
import shutil
from pathlib import Path

from dspine_hub._version import __version__
from dspine_hub.cards import render_card
from dspine_hub.errors import DSpineHubError
from dspine_hub.folders import check_free, file_sha256, new_folder

PACKAGE = Path(__file__).parent

# every file copied byte for byte into a repository: name there -> place here
SHIPPED = {
    "cache_dspine.py": PACKAGE / "cache_dspine.py",
    "configuration_dspine.py": PACKAGE / "configuration_dspine.py",
    "draft_graph_dspine.py": PACKAGE / "draft_graph_dspine.py",
    "generation_dspine.py": PACKAGE / "generation_dspine.py",
    "modeling_dspine.py": PACKAGE / "modeling_dspine.py",
    "kernels.py": PACKAGE / "kernels" / "__init__.py",
    "adjacent_injection.py": PACKAGE / "kernels" / "adjacent_injection.py",
    "injection_gate_kernels.py": PACKAGE / "kernels" / "injection_gate_kernels.py",
    "injection_kernels.py": PACKAGE / "kernels" / "injection_kernels.py",
    "candidate_walk.py": PACKAGE / "kernels" / "candidate_walk.py",
    "top_candidates.py": PACKAGE / "kernels" / "top_candidates.py",
    "transfer_tables.py": PACKAGE / "kernels" / "transfer_tables.py",
    "transition_kernels.py": PACKAGE / "kernels" / "transition_kernels.py",
    "transition_length_kernels.py": PACKAGE / "kernels" / "transition_length_kernels.py",
    "transition_scores.py": PACKAGE / "kernels" / "transition_scores.py",
    "triton_support.py": PACKAGE / "kernels" / "triton_support.py",
    "custom_generate/generate.py": PACKAGE / "custom_generate" / "generate.py",
}

# loading one of these runs whatever code it holds
PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")

AUTO_MAP = {
    "AutoConfig": "configuration_dspine.DSpineConfig",
    "AutoModel": "modeling_dspine.DSpineForSpeculation",
}


def build_bundle(checkpoint: str | Path, out: str | Path, target: str | Path | None = None) -> Path:
    """Write the hub folder of a drafter checkpoint.

    Args:
        checkpoint (`str` or `Path`): Folder of a trained drafter (`config.json`, safetensors weights).
        out (`str` or `Path`): Folder to create; must not exist or be empty.
        target (`str` or `Path`, *optional*): Target to run the canary with: drafts on a few prompts, recorded in
            `provenance.json` for `verify` to compare with.

    Returns:
        `Path`: `out`.

    Raises:
        DSpineHubError: When the checkpoint is missing, incomplete or invalid, or `out` is taken. Nothing is written
            then.
    """
    out = check_free(out, "OUT")
    from dspine_hub.loading import load_drafter_checkpoint

    drafter = load_drafter_checkpoint(checkpoint)
    # the loaded model is turned back and says nothing of it
    if json.loads((Path(checkpoint) / "config.json").read_text()).get("quantization_config"):
        raise DSpineHubError(
            f"`{checkpoint}` must be unquantised, got `quantization_config`: bundle the unquantised drafter, then "
            "`dspine-hub convert BUNDLE OUT --quantize fp8`"
        )
    if drafter.config.target is None:
        raise DSpineHubError(
            f"`target` must be recorded in `{checkpoint}/config.json`, got none: a drafter without its target cannot "
            "be paired. Train or convert it with the target at hand."
        )
    with new_folder(out) as work:
        _write_checkpoint(drafter, work)
        complete_bundle(work, Path(checkpoint), target)
    return out


def complete_bundle(
    folder: Path,
    checkpoint: Path,
    target: str | Path | None = None,
    hashes: dict[str, str] | None = None,
    receipts: bool = True,
) -> None:
    """Add to config and weights what makes them a bundle: code, receipts, card, provenance.

    Args:
        folder (`Path`): Holds `config.json` and weights; gains the rest.
        checkpoint (`Path`): Where receipts, `card.toml` and `training.json` come from.
        target (`str` or `Path`, *optional*): As of `build_bundle`.
        hashes (`dict[str, str]`, *optional*): Weight file -> sha256, of files that were hashed when written.
        receipts (`bool`): Take receipts over; wrong where the weights are no longer those that were measured.
    """
    _add_code_and_card(folder, checkpoint, receipts)
    provenance = {"dspine_hub": __version__, "files": _hashes(folder, hashes or {})}
    if target is not None:
        from dspine_hub.canary import measure_canary

        provenance["canary"] = measure_canary(folder, target)
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")


def _write_checkpoint(drafter, folder: Path) -> None:
    from dspine_hub.loading import cast_for_storage

    cast_for_storage(drafter)
    drafter.save_pretrained(folder, max_shard_size="5GB")
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)


def _add_code_and_card(folder: Path, checkpoint: Path, receipts: bool) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = AUTO_MAP
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name, source in SHIPPED.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, folder / name)
    for receipt in sorted(checkpoint.glob("receipts/*.json") if receipts else ()):
        (folder / "receipts").mkdir(exist_ok=True)
        shutil.copyfile(receipt, folder / "receipts" / receipt.name)
    for name in ("card.toml", "training.json"):
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)
    (folder / "README.md").write_text(render_card(folder), encoding="utf-8")


def _hashes(folder: Path, known: dict[str, str]) -> dict[str, str]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: known.get(name) or file_sha256(path) for name, path in names.items()}


def is_bundle(path: str | Path) -> bool:
    """Tell whether a folder carries its own modelling code."""
    return (Path(path) / "modeling_dspine.py").is_file()
