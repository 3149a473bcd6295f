"""How two bundles differ: config, tensors, receipts, files."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from dspine_hub.checkpoints.tensors import read_file
from dspine_hub.folders import hash_files, parse_json, walk
from dspine_hub.publish.pull import fetch_snapshot


@dataclass
class Difference:
    """How two bundles differ; every part is empty when they do not.

    Args:
        config (`dict`): Dotted key -> `[a, b]`; `None` where a side has no such key.
        tensors (`dict`): Name -> `[a, b]`, each `{"dtype", "shape", "sha256"}` or `None`.
        receipts (`dict`): File -> dotted key -> `[a, b]`.
        files (`dict`): Path -> `[sha256 a, sha256 b]`.
    """

    config: dict[str, list] = field(default_factory=dict)
    tensors: dict[str, list] = field(default_factory=dict)
    receipts: dict[str, dict] = field(default_factory=dict)
    files: dict[str, list] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """`True` when every file is."""
        return not self.files

    def as_dict(self) -> dict:
        """Return the fields for JSON."""
        return {"identical": self.identical, **vars(self)}


def compare_folders(a: Path, b: Path) -> Difference:
    """Compare two folders; `DSpineHubError` when a file in one cannot be read."""
    # the Hub adds its own attributes to every repository
    files = [{name: path for name, path in walk(f).items() if name != ".gitattributes"} for f in (a, b)]
    result = Difference(
        config=_changes(*(read_flat(side.get("config.json")) for side in files)),
        files=_changes(*(hash_files(side) for side in files)),
    )
    receipts = sorted(name for name in set(files[0]) | set(files[1]) if re.fullmatch(r"receipts/.*\.json", name))
    for name in set(receipts) & set(result.files):
        result.receipts[name] = _changes(*(read_flat(side.get(name)) for side in files))
    if any(name.endswith(".safetensors") for name in result.files):
        result.tensors = _changes(*(_tensors(side) for side in files))
    return result


def _changes(a: dict, b: dict) -> dict[str, list]:
    return {key: [a.get(key), b.get(key)] for key in sorted(set(a) | set(b)) if a.get(key) != b.get(key)}


def read_flat(path: Path | None) -> dict:
    """Read a JSON object as dotted key -> value."""
    if path is None:
        return {}
    flat = {}

    def visit(prefix, item):
        if isinstance(item, dict) and (item or not prefix):
            for key, inner in item.items():
                visit(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = item

    visit("", parse_json(path.read_bytes(), str(path)))
    return flat


def _tensors(files: dict[str, Path]) -> dict[str, dict]:
    """Hash every stored tensor by its own bytes, so that moving one to another shard is no change."""
    return {
        name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "sha256": tensor.sha256()}
        for file, path in files.items()
        if file.endswith(".safetensors")
        for name, tensor in read_file(path).items()
    }


def diff(a: str | Path, b: str | Path, *, token: str | None = None) -> Difference:
    """Compare config, tensors, receipts and files of two bundles.

    Args:
        a (`str` or `Path`): A folder, or `org/name`, or `org/name@revision`.
        b (`str` or `Path`): The other.
        token (`str`, *optional*): Token instead of the stored one.

    Returns:
        [`Difference`].

    Raises:
        DSpineHubError: When one cannot be read.
    """
    return compare_folders(*(_local(side, token, f"dspine-hub diff {a} {b}") for side in (a, b)))


def _local(side: str | Path, token: str | None, command: str) -> Path:
    if Path(side).is_dir():
        return Path(side).resolve()
    repo_id, _, revision = str(side).partition("@")
    return fetch_snapshot(repo_id, revision, command, token)
