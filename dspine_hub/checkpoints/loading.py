"""Load a drafter checkpoint or a target folder, turning what users can fix into one readable error."""

from pathlib import Path

from dspine_hub.checkpoints.sources import LOAD_ERRORS, Source
from dspine_hub.checkpoints.tensors import INDEX, read_file, weight_map
from dspine_hub.errors import DSpineHubError
from dspine_hub.folders import parse_json


def cast_for_storage(model) -> None:
    """Cast a model to the dtypes it is published in: bfloat16, but for the float32 basis of compact codes."""
    import torch

    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not name.startswith("transfer_basis."):
            tensor.data = tensor.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16


def check_folder(path: str | Path, what: str) -> Path:
    """Return the folder of a checkpoint, or raise `DSpineHubError` when it holds no config or no weights."""
    path = Path(path)
    if not path.is_dir():
        raise DSpineHubError(f"`{what}` must name a folder, got `{path}`, which does not exist.")
    if not (path / "config.json").is_file():
        raise DSpineHubError(f"`{what}` must hold a `config.json`, got `{path}` without one.")
    parse_json((path / "config.json").read_bytes(), f"{path}/config.json")
    index = path / INDEX
    names = ["model.safetensors"]
    if index.is_file():
        names = sorted(set(weight_map(index.read_bytes(), str(index)).values()))
    for name in names:
        if not (path / name).is_file():
            raise DSpineHubError(f"`{what}` must hold its weights, got `{path}` without `{name}`.")
        read_file(path / name)
    return path


def load_drafter_checkpoint(path: str | Path, dtype="auto"):
    """Load a drafter, refusing any tensor that is missing, unknown or of another shape.

    Args:
        path (`str` or `Path`): Checkpoint folder.
        dtype (`torch.dtype`, *optional*): As stored by default. A quantised drafter cannot be cast later.

    Returns:
        `DSpineForSpeculation`.

    Raises:
        DSpineHubError: When the folder is no complete DSpine checkpoint.
    """
    folder = check_folder(path, "CHECKPOINT")
    from dspine_hub.modeling_dspine import DSpineForSpeculation

    kind = Source(folder).config().get("model_type")
    if kind != "dspine":
        raise DSpineHubError(
            f"`model_type` of `{folder}` must be 'dspine', got {kind!r}: this is no DSpine drafter. If it is one in "
            f"another format: `dspine-hub convert {folder} OUT`"
        )
    try:
        drafter, report = DSpineForSpeculation.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except LOAD_ERRORS as error:
        raise DSpineHubError(f"`{folder}` could not be loaded: {error}") from error
    _check_report(folder, report)
    if not bool(drafter.transfer_ready):
        raise DSpineHubError(
            f"`transfer_ready` in `{folder}` must be true, got false: this drafter was never trained."
        )
    return drafter.eval()


def _check_report(folder: Path, report: dict) -> None:
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            raise DSpineHubError(
                f"`{folder}` must hold exactly the drafter's tensors, got {problem.replace('_', ' ')}: "
                f"{sorted(map(str, report[problem]))}."
            )


def load_target(path: str | Path, dtype: str | None = None, device: str | None = None):
    """Load a target and its tokenizer.

    Args:
        path (`str` or `Path`): Folder or repository.
        dtype (`str`, *optional*): As torch names it; by default `float32` on a CPU and `bfloat16` on a GPU.
        device (`str`, *optional*): By default the GPU where there is one.

    Raises:
        DSpineHubError: When it is broken.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = Source(path)
    folder = check_folder(source.folder, "--target") if source.folder is not None else source.name
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        target, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), output_loading_info=True
        )
    except LOAD_ERRORS as error:
        raise DSpineHubError(f"`{folder}` could not be loaded: {error}") from error
    if report["missing_keys"] or report["mismatched_keys"]:
        raise DSpineHubError(
            f"`{folder}` must hold all of the target's tensors, got missing {sorted(report['missing_keys'])} and "
            f"mismatched {sorted(map(str, report['mismatched_keys']))}."
        )
    return target.to(device).eval(), tokenizer


def is_bundle(path: str | Path) -> bool:
    """Tell whether a folder carries its own modelling code."""
    return (Path(path) / "modeling_dspine.py").is_file()


def load_bundle(path: str | Path, target, tokenizer):
    """Load a bundle through transformers' remote code, as its users do, and bind it to the target.

    Raises:
        DSpineHubError: When the bundle is broken or belongs to another target.
    """
    from transformers import AutoModel

    folder = check_folder(path, "--drafter")
    try:
        drafter, report = AutoModel.from_pretrained(
            folder, trust_remote_code=True, dtype=target.dtype, output_loading_info=True
        )
        _check_report(folder, report)
        return drafter.to(target.device).eval().bind(target, tokenizer)
    except LOAD_ERRORS as error:
        raise DSpineHubError(f"`{folder}` could not be used with this target: {error}") from error


def load_bound(path: str | Path, target, tokenizer=None, name: str | None = None):
    """Load a checkpoint with this package's own code, in the target's dtype and on its device, and bind it.

    Raises:
        DSpineHubError: When the checkpoint is broken or belongs to another target; `name` is what to call it.
    """
    try:
        return load_drafter_checkpoint(path, target.dtype).to(target.device).bind(target, tokenizer)
    except ValueError as error:
        raise DSpineHubError(f"`{name or path}` could not be used with this target: {error}") from error
