"""The functions of `dspine_hub` itself that bring several rooms together."""

import hashlib
import json
from pathlib import Path

from dspine_hub._version import __version__
from dspine_hub.errors import DSpineHubError


def generate(target, drafter, input_ids, **kwargs):
    """Generate with a target, drafted by a drafter; the same loop as `drafter.spec_generate`.

    Args:
        target (`PreTrainedModel`): The target.
        drafter (`DSpineForSpeculation`): Its drafter, of this package or loaded as remote code.
        input_ids (`torch.Tensor` of shape `[1, P]`, int64): Prompt.
        kwargs: As `spec_generate` takes: `max_new_tokens`, `temperature`, `stop_token_ids`, `streamer`,
            `return_dict_in_generate`, and whatever `target.generate` takes.

    Returns:
        `torch.Tensor` of shape `[1, P + n]`, int64, or `DSpineGenerateOutput` with `return_dict_in_generate=True`.

    Raises:
        ValueError: When the drafter belongs to another target, or the request cannot be decoded.
    """
    return drafter.spec_generate(target, input_ids, **kwargs)


def convert(
    source: str | Path,
    out: str | Path,
    *,
    from_format: str = "auto",
    to_format: str = "hub",
    target: str | Path | None = None,
    storage: str | None = None,
    tap_ids: str | None = None,
    quantize: str | None = None,
    revision: str | None = None,
):
    """Convert a drafter between formats; the folder appears whole or not at all, and the source is only read.

    Args:
        source (`str` or `Path`): Folder or repository of the drafter.
        out (`str` or `Path`): Folder to create; must not exist or be empty.
        from_format, to_format (`str`): Keys of `FORMATS` in `checkpoints/formats.py`; `"auto"` tells the source's.
        target (`str` or `Path`, *optional*): Folder or repository of the target. A bundle records it; codes, tables
            that are left out and the pair itself are checked with it.
        storage (`str`, *optional*): `"codes"` or `"basis"`, of the transfer space; as in the source by default.
        tap_ids (`str`, *optional*): What ids of tapped layers mean, a key of `TAP_MEANINGS`; as usual by default.
        quantize (`str`, *optional*): `"fp8"` or `"int8"`, for the linears of the backbone's layers.
        revision (`str`, *optional*): Branch, tag or commit, when `source` is a repository.

    Returns:
        `dspine_hub.conversion.convert.Conversion`.

    Raises:
        DSpineHubError: When the source is incomplete, contradictory, damaged, or does not fit the target.
    """
    from dspine_hub.checkpoints.formats import FORMATS
    from dspine_hub.checkpoints.pairing import check_pair
    from dspine_hub.checkpoints.targets import TargetFiles
    from dspine_hub.conversion.convert import write_converted
    from dspine_hub.conversion.drafter_files import DrafterFiles
    from dspine_hub.findings import Report
    from dspine_hub.folders import check_free, new_folder
    from dspine_hub.publish.build import complete_bundle

    out = check_free(out, "DST")
    writable = [name for name, entry in FORMATS.items() if entry.writes]
    if to_format not in writable or from_format not in ("auto", *FORMATS):
        raise DSpineHubError(
            f"`--from` must be one of {['auto', *FORMATS]} and `--to` one of {writable}, got {from_format!r} and "
            f"{to_format!r}."
        )
    files = None if target is None else TargetFiles(target)
    drafter = DrafterFiles.open(_folder_of(source, revision), from_format, str(source))

    def check(folder):
        # sizes of other sources were compared when their config was read
        checked = folder if to_format == "hub" else drafter.folder if drafter.format == "hub" else None
        report = check_pair(checked, files.source) if files and checked else Report()
        report.raise_for_errors(f"`{source}` must fit `{target}`, and nothing was written")
        return report

    with new_folder(out) as work:
        result = write_converted(drafter, work, to_format, files, storage, tap_ids, quantize, check)
        if to_format == "hub":
            if result.config.target is None:
                raise DSpineHubError(
                    "`--target` must be given, got none, and the source does not record its target: a bundle without "
                    "it cannot be paired. A repository like `Qwen/Qwen3-8B` will do."
                )
            same = quantize is None and storage in (None, drafter.config.get("transfer_storage", "codes"))
            complete_bundle(work, drafter.folder, hashes=result.hashes, receipts=same)
    return result


def load(source: str | Path, target=None, revision: str | None = None, tokenizer=None, tap_ids=None):
    """Load a drafter of any format, bound to its target; another format is converted once, into a cache.

    No code of a repository runs: this package's own model reads the weights.

    Args:
        source (`str` or `Path`): Folder or repository of the drafter.
        target (`PreTrainedModel`, `str` or `Path`, *optional*): The loaded target, or its folder or repository, which
            is loaded. Without one the drafter must be bound before use: `drafter.bind(target)`.
        revision (`str`, *optional*): Branch, tag or commit, when `source` is a repository.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizer of a loaded target, to be checked.
        tap_ids (`str`, *optional*): What ids of tapped layers mean, a key of `TAP_MEANINGS`; as usual by default.

    Returns:
        `DSpineForSpeculation`, in evaluation mode, in the target's dtype and on its device.

    Raises:
        DSpineHubError: When the drafter cannot be read or converted, or belongs to another target.
    """
    from dspine_hub.checkpoints.loading import load_bound, load_drafter_checkpoint, load_target
    from dspine_hub.checkpoints.pairing import check_pair
    from dspine_hub.checkpoints.targets import LoadedTarget, TargetFiles
    from dspine_hub.conversion.drafter_files import DrafterFiles

    drafter = DrafterFiles.open(_folder_of(source, revision), name=str(source))
    if isinstance(target, str | Path):
        files = TargetFiles(target)
        folder = _converted(drafter, files, tap_ids)
        check_pair(folder, files.source).raise_for_errors(f"`{source}` must fit `{target}`")
        target, tokenizer = load_target(target)
    else:
        folder = _converted(drafter, None if target is None else LoadedTarget(target, tokenizer), tap_ids)
    if target is None:
        return load_drafter_checkpoint(folder)
    return load_bound(folder, target, tokenizer, str(source))


def _folder_of(source: str | Path, revision: str | None) -> Path:
    """Return the folder of a source; a repository's weights are fetched, its code is not."""
    if Path(source).is_dir():
        return Path(source)
    from dspine_hub.checkpoints.sources import Source
    from dspine_hub.publish.pull import fetch_weights

    # refuses what is neither a folder nor a repository id
    return fetch_weights(Source(source).name, revision)


def _converted(drafter, target, tap_ids: str | None) -> Path:
    """Return a folder in the hub layout: the drafter's own, or its conversion in the cache."""
    if drafter.format == "hub":
        return drafter.folder
    from huggingface_hub import constants

    from dspine_hub.conversion.convert import write_converted
    from dspine_hub.folders import new_folder

    paths = [drafter.folder / "config.json", *drafter.files]
    key = {
        "version": __version__,
        "commit": drafter.folder.name if drafter.folder.parent.name == "snapshots" else None,
        "files": {path.name: _content_sha256(path) for path in paths},
        "target": None if target is None else target.head_sha256(),
        "tap_ids": tap_ids,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    folder = Path(constants.HF_HOME) / "dspine-hub" / "converted" / digest
    if not folder.is_dir():
        try:
            with new_folder(folder) as work:
                write_converted(drafter, work, "hub", target, tap_ids=tap_ids)
        except OSError:
            # another process may have made the same folder meanwhile
            if not (folder / "config.json").is_file():
                raise
    return folder


def _content_sha256(path: Path) -> str:
    """Hash a file; in the Hub client's cache large ones are named by their hash."""
    from dspine_hub.folders import file_sha256

    blob = path.resolve()
    named = blob.parent.name == "blobs" and len(blob.name) == 64
    return blob.name if named else file_sha256(path)
