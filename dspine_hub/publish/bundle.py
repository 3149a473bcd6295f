"""A bundle read once: config, provenance, files with their hashes, receipts, card.

[`Bundle.read`] lists the files; each is read when something of it is first asked for, whole and once, and what was
learned is kept. So checks, card and push may ask for whatever they need.
"""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from dspine_hub.checkpoints.tensors import INDEX, ScannedFile, scan_file
from dspine_hub.errors import DSpineHubError
from dspine_hub.evaluation.receipts import Receipt, parse_receipt
from dspine_hub.findings import Report
from dspine_hub.folders import file_sha256, parse_json
from dspine_hub.publish.listing import list_files

# larger files that are no weights are hashed in pieces and not kept
KEPT_BYTES = 64 << 20
# made anew after the hashes of `provenance.json` were taken, or by the Hub, which may edit a card
UNHASHED = ("provenance.json", "README.md", ".gitattributes")


class BundleFile:
    """One file, read at most once.

    Args:
        name (`str`): Path in the bundle.
        path (`Path`): The file, links resolved.
        sha256 (`str`, *optional*): Its hash, where whoever wrote it knows.
    """

    def __init__(self, name: str, path: Path, sha256: str | None = None):
        self.name, self.path, self.size = name, path, path.stat().st_size
        if sha256 is not None:
            self.sha256 = sha256

    @property
    def is_weights(self) -> bool:
        """Whether it is scanned tensor by tensor and never kept."""
        return self.name.endswith(".safetensors")

    @property
    def is_kept(self) -> bool:
        """Whether its bytes are kept in memory."""
        return not self.is_weights and self.size <= KEPT_BYTES

    @cached_property
    def data(self) -> bytes:
        """All of its bytes."""
        return self.path.read_bytes()

    @cached_property
    def scan(self) -> ScannedFile:
        """What its tensors are and hold; `DSpineHubError` when it is damaged."""
        return scan_file(self.path)

    @cached_property
    def sha256(self) -> str:
        """Hash of its bytes."""
        if self.is_weights:
            try:
                return self.scan.sha256
            except DSpineHubError:
                # damaged weights have a hash too
                return file_sha256(self.path)
        return hashlib.sha256(self.data).hexdigest() if self.is_kept else file_sha256(self.path)

    @cached_property
    def blob_id(self) -> str:
        """The name git gives a file of these bytes."""
        return git_blob_id(self.data if self.is_kept else self.path.read_bytes())


class MemoryFile(BundleFile):
    """A file of a bundle whose bytes differ from what lies on disk, or that lies nowhere."""

    def __init__(self, name: str, data: bytes):
        self.name, self.path, self.size, self.data = name, None, len(data), data


def git_blob_id(data: bytes) -> str:
    """Return the name git gives a file of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def weights_sha256(hashes: Mapping[str, str]) -> str | None:
    """Name the weights of a drafter by one hash.

    Args:
        hashes (`Mapping[str, str]`): sha256 of every safetensors file at the top of a folder, by name.

    Returns:
        `str`, *optional*: The one file's; of several, sha256 of their sorted `name sha256` lines. `None` without
        weights.
    """
    if len(hashes) < 2:
        return next(iter(hashes.values()), None)
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


class Bundle:
    """A bundle folder, or a checkpoint on its way to become one.

    Args:
        folder (`Path`): Where it lies.
        files (`dict[str, BundleFile]`): What may be published, by name.
        refused ([`Report`]): Why other files may not.
    """

    def __init__(self, folder: Path, files: dict[str, BundleFile], refused: Report):
        self.folder, self.files, self.refused = folder, files, refused

    @classmethod
    def read(cls, folder: str | Path, hashes: Mapping[str, str] | None = None) -> "Bundle":
        """List a folder; `hashes` are those somebody knows already.

        Raises:
            DSpineHubError: When it is no folder.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise DSpineHubError(
                f"`{folder}` must be the folder of a bundle, got no such folder. Write one with `dspine-hub bundle`, "
                "or fetch a repository with `dspine-hub pull`."
            )
        listed, refused = list_files(folder)
        known = hashes or {}
        return cls(folder, {name: BundleFile(name, path, known.get(name)) for name, path in listed.items()}, refused)

    def text(self, name: str) -> str | None:
        """Read a text file, or return `None` when it is not there."""
        return self.files[name].data.decode("utf-8", errors="replace") if name in self.files else None

    def json(self, name: str) -> dict | None:
        """Read a JSON object, or return `None` when it is not there."""
        return parse_json(self.files[name].data, f"{self.folder}/{name}") if name in self.files else None

    @cached_property
    def config(self) -> dict:
        """`config.json` as it is, which must be there."""
        config = self.json("config.json")
        if config is None:
            raise DSpineHubError(
                f"`{self.folder}` must hold a `config.json`, got none. Write one with `dspine-hub bundle`."
            )
        return config

    @cached_property
    def drafter_config(self):
        """The config as a `DSpineConfig`, every rule of it checked."""
        from dspine_hub.checkpoints.pairing import validate_config

        return validate_config(self.config, str(self.folder))

    @cached_property
    def provenance(self) -> dict | None:
        """`provenance.json`: what made the bundle, a hash of every file, and the canary."""
        return self.json("provenance.json")

    @cached_property
    def weight_map(self) -> dict[str, str] | None:
        """Tensor -> file as the index says, `None` without one."""
        index = self.json(INDEX)
        return None if index is None else index.get("weight_map") or {}

    @cached_property
    def receipts(self) -> list[Receipt]:
        """Every measured result, by file name."""
        names = [name for name in self.files if name.startswith("receipts/") and name.count("/") == 1]
        return [parse_receipt(self.files[name].data, name) for name in names if name.endswith(".json")]

    @property
    def weights(self) -> dict[str, BundleFile]:
        """The safetensors files at the top, by name."""
        return {name: file for name, file in self.files.items() if file.is_weights and "/" not in name}

    @property
    def weights_sha256(self) -> str | None:
        """One hash that names the weights, see [`weights_sha256`]."""
        return weights_sha256({name: file.sha256 for name, file in self.weights.items()})
