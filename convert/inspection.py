"""What a folder or repository holds, from config and tensors' headers alone: no weight is read or fetched."""

from pathlib import Path

from dspine_hub.checkpoints.settings import flatten, read_settings
from dspine_hub.checkpoints.sources import Source
from dspine_hub.checkpoints.tensors import StoredTensor
from dspine_hub.conversion.convert import plan_names
from dspine_hub.conversion.drafter_files import DrafterFiles
from dspine_hub.errors import DSpineHubError

SETTINGS = (
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "transfer_rank",
    "message_size",
    "num_candidates",
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_target_layers",
    "transfer_storage",
)


def inspect(location: str | Path, revision: str | None = None) -> dict:
    """Describe a drafter of any format.

    Args:
        location (`str` or `Path`): Folder or repository.
        revision (`str`, *optional*): Branch, tag or commit of a repository.

    Returns:
        `dict`: `name`, `format` (`None` when unknown), `reasons`, the fields of `SETTINGS` (`None` when unknown),
        `parameters`, `bytes`, `dtypes` (dtype -> values), `files`, `target`, `quantization`, `notes` and `problems`.

    Raises:
        DSpineHubError: When it cannot be read.
    """
    drafter = DrafterFiles(Source(location, revision))
    config, files = drafter.config, drafter.files
    result = {"name": drafter.name, "format": None, "reasons": [], **dict.fromkeys(SETTINGS), **_sizes(files)}
    target = config.get("target") or (config.get("dspine_hub") or {}).get("target") or {}
    result |= {"target": target.get("id"), "quantization": _quantization(config), "notes": [], "problems": []}
    if not files:
        result["problems"].append("no safetensors weights")
        return result
    try:
        result |= {"format": drafter.format, "reasons": list(drafter.detection.reasons)}
    except DSpineHubError as error:
        result["problems"].append(str(error))
        return result
    _describe(result, drafter)
    return result


def advice(folder: Path) -> str | None:
    """Say how a folder in another format becomes a bundle; `None` for a bundle and for what nobody knows."""
    try:
        source = DrafterFiles.open(folder)
    except DSpineHubError:
        return None
    if source.format == "hub":
        return None
    return (
        f"`{folder}` is in the format `{source.format}` ({'; '.join(source.detection.reasons)}). Make it a bundle: "
        f"`dspine-hub convert {folder} OUT --target TARGET`"
    )


def _describe(result: dict, source: DrafterFiles) -> None:
    try:
        config, result["notes"] = read_settings(source.config, source.format, source.shapes())
    except DSpineHubError as error:
        result["problems"].append(str(error))
        # nesting may be the problem itself
        flat = flatten(source.config, "reference")
        result |= {name: flat.get(name) for name in SETTINGS}
        return
    result |= {name: getattr(config, name) for name in SETTINGS}
    try:
        plan_names(source, config)
    except DSpineHubError as error:
        result["problems"].append(str(error))


def _quantization(config: dict) -> str | None:
    found = config.get("quantization_config") or {}
    return found.get("quant_method")


def _sizes(files: dict[Path, dict[str, StoredTensor]]) -> dict:
    dtypes: dict[str, int] = {}
    total = 0
    for tensors in files.values():
        for tensor in tensors.values():
            values = 1
            for size in tensor.shape:
                values *= size
            dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + values
            total += tensor.size
    return {"parameters": sum(dtypes.values()), "bytes": total, "dtypes": dtypes, "files": len(files)}
