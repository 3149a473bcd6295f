"""How two bundles differ: config, tensors, receipts, files."""

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from dspine_hub.checkpoints.sources import TensorHeader, read_headers
from dspine_hub.errors import DSpineHubError
from dspine_hub.folders import file_sha256


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
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DSpineHubError(f"`{path}` must be valid JSON: {error}.") from None
    flat = {}

    def visit(prefix, item):
        if isinstance(item, dict) and (item or not prefix):
            for key, inner in item.items():
                visit(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = item

    visit("", value)
    return flat


def _tensors(files: dict[str, Path]) -> dict[str, dict]:
    """Hash every stored tensor by its own bytes, so that moving one to another shard is no change."""
    return {
        header.name: {"dtype": header.dtype, "shape": list(header.shape), "sha256": _sha256(path, header)}
        for name, path in files.items()
        if name.endswith(".safetensors")
        for header in read_headers(path)
    }


def _sha256(path: Path, header: TensorHeader) -> str:
    digest, length = hashlib.sha256(), header.size
    with path.open("rb") as file:
        file.seek(header.start)
        while length and (piece := file.read(min(length, 1 << 20))):
            digest.update(piece)
            length -= len(piece)
    return digest.hexdigest()


def walk(folder: Path) -> dict[str, Path]:
    """List all files of a folder by their paths in it."""
    paths = (Path(place) / name for place, _, names in os.walk(folder) for name in names)
    return {path.relative_to(folder).as_posix(): path for path in sorted(paths)}


def hash_files(files: dict[str, Path]) -> dict[str, str]:
    """Hash files."""
    with ThreadPoolExecutor(max_workers=4) as threads:
        return dict(zip(files, threads.map(file_sha256, files.values()), strict=True))
