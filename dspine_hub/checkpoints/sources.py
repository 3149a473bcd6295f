"""A model in a folder or in a repository, read alike: its JSON files, its tokenizer, its tensors' headers.

Nothing here loads weights; what a repository holds is read through the Hub client's cache.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from dspine_hub.errors import DSpineHubError

# what transformers, safetensors and a config's own rules raise for a broken folder
LOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, SafetensorError, StrictDataclassError)


@dataclass(frozen=True)
class TensorHeader:
    """A stored tensor: name, shape, safetensors' dtype (`"BF16"`), its bytes, and where in a local file they start."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    start: int = 0


class Source:
    """A model folder or repository.

    Args:
        location (`str` or `Path`): An existing folder, or a repository id `org/name`.
        revision (`str`, *optional*): Branch, tag or commit of a repository.

    Raises:
        DSpineHubError: When it is neither, or cannot be reached.
    """

    def __init__(self, location: str | Path, revision: str | None = None):
        self.name = str(location)
        self.revision = revision
        self.folder = Path(location) if Path(location).is_dir() else None
        if self.folder is None and (self.name.count("/") != 1 or self.name.startswith((".", "/", "~"))):
            raise DSpineHubError(f"`{self.name}` must be a folder or a repository id like `org/name`; no such folder.")

    def read_json(self, name: str) -> dict | None:
        """Read a JSON object, or return `None` when the file is not there."""
        path = self.file(name)
        if path is None:
            return None
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DSpineHubError(f"`{name}` of `{self.name}` must be valid JSON: {error}.") from None
        if not isinstance(value, dict):
            raise DSpineHubError(f"`{name}` of `{self.name}` must be a JSON object, got {type(value).__name__}.")
        return value

    def config(self) -> dict:
        """Read `config.json`, which must be there."""
        config = self.read_json("config.json")
        if config is None:
            raise DSpineHubError(f"`{self.name}` must hold a `config.json`, got none.")
        return config

    def tokenizer(self):
        """Load the tokenizer, or return `None` when there is none."""
        if self.file("tokenizer_config.json") is None:
            return None
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder or self.name, revision=self.revision)
        except LOAD_ERRORS as error:
            raise DSpineHubError(f"the tokenizer of `{self.name}` could not be loaded: {error}") from error

    def headers(self) -> dict[str, TensorHeader]:
        """Read every tensor's header; an empty dict when there are no safetensors weights."""
        if self.folder is not None:
            return {header.name: header for path in self.weight_files() for header in read_headers(path)}
        from huggingface_hub import get_safetensors_metadata
        from huggingface_hub.errors import NotASafetensorsRepoError

        try:
            metadata = get_safetensors_metadata(self.name, revision=self.revision)
        except NotASafetensorsRepoError:
            return {}
        return {
            name: _remote_header(name, tensor)
            for file in metadata.files_metadata.values()
            for name, tensor in file.tensors.items()
        }

    def remote_headers(self) -> dict[str, list[TensorHeader]]:
        """Read the headers of every safetensors file of a repository, by ranges: no weight is fetched."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        api = HfApi()
        try:
            names = [name for name in api.list_repo_files(self.name, revision=self.revision) if "/" not in name]
            found = {
                name: api.parse_safetensors_file_metadata(self.name, name, revision=self.revision)
                for name in sorted(names)
                if name.endswith(".safetensors")
            }
        except (HfHubHTTPError, HTTPError) as error:
            raise DSpineHubError(f"`{self.name}` must be a repository you can read, got: {error}") from None
        return {
            file: [_remote_header(name, tensor) for name, tensor in metadata.tensors.items()]
            for file, metadata in found.items()
        }

    def weight_files(self) -> list[Path]:
        """List the local safetensors files."""
        return sorted(self.folder.glob("*.safetensors")) if self.folder is not None else []

    def file(self, name: str) -> Path | None:
        """Return the local path of a file, fetched when it lies in a repository, or `None` when it is not there."""
        if self.folder is not None:
            path = self.folder / name
            return path if path.is_file() else None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(self.name, name, revision=self.revision))
        except LocalEntryNotFoundError as error:
            raise DSpineHubError(
                f"`{self.name}` is not in the local cache and cannot be downloaded: {error}"
            ) from None
        except EntryNotFoundError:
            return None
        except HfHubHTTPError as error:
            raise DSpineHubError(f"`{self.name}` must be a repository you can read, got: {error}") from None


def _remote_header(name: str, tensor) -> TensorHeader:
    first, last = tensor.data_offsets
    return TensorHeader(name, tuple(tensor.shape), str(getattr(tensor.dtype, "value", tensor.dtype)), last - first)


def read_headers(path: Path) -> list[TensorHeader]:
    """Read the headers of one safetensors file.

    Raises:
        DSpineHubError: When the file is damaged or cut off.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise DSpineHubError(
            f"`{path}` must be a complete safetensors file, got one that cannot be read ({error}). It may be cut off: "
            "copy or download it again."
        ) from None
    # the library finds damage, and keeps to itself where a tensor lies
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return [
        TensorHeader(name, tuple(fields["shape"]), fields["dtype"], last - first, 8 + length + first)
        for name, fields in header.items()
        for first, last in [fields["data_offsets"]]
    ]
