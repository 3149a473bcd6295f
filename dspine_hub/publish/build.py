"""From a checkpoint to the flat folder a hub repository is: weights, code that loads without this package, provenance.

The folder appears whole or not at all: it is written beside its place and renamed when complete.
"""

import json
import shutil
from pathlib import Path

from dspine_hub._version import __version__
from dspine_hub.errors import DSpineHubError
from dspine_hub.folders import check_free, new_folder, write_json
from dspine_hub.publish.bundle import Bundle, MemoryFile
from dspine_hub.publish.cards import render_card
from dspine_hub.publish.shipped import AUTO_MAP, SHIPPED


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
    from dspine_hub.checkpoints.loading import load_drafter_checkpoint

    drafter = load_drafter_checkpoint(checkpoint)
    # the loaded model is turned back and says nothing of it
    if Bundle.read(checkpoint).config.get("quantization_config"):
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
    _add_code(folder)
    _add_records(folder, checkpoint, receipts)
    bundle = Bundle.read(folder, hashes)
    card = MemoryFile("README.md", render_card(bundle).encode())
    (folder / card.name).write_bytes(card.data)
    files = {**bundle.files, card.name: card}
    provenance = {"dspine_hub": __version__, "files": {name: files[name].sha256 for name in sorted(files)}}
    if target is not None:
        from dspine_hub.evaluation.canary import measure_canary

        provenance["canary"] = measure_canary(folder, target)
    write_json(folder / "provenance.json", provenance)


def _write_checkpoint(drafter, folder: Path) -> None:
    from dspine_hub.checkpoints.loading import cast_for_storage

    cast_for_storage(drafter)
    drafter.save_pretrained(folder, max_shard_size="5GB")
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)


def _add_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = AUTO_MAP
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for name, source in SHIPPED.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, folder / name)


def _add_records(folder: Path, checkpoint: Path, receipts: bool) -> None:
    for receipt in sorted(checkpoint.glob("receipts/*.json") if receipts else ()):
        (folder / "receipts").mkdir(exist_ok=True)
        shutil.copyfile(receipt, folder / "receipts" / receipt.name)
    for name in ("card.toml", "training.json"):
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)
