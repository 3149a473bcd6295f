"""A model in a folder or in a repository, read alike: its JSON files, its tokenizer, its tensors' headers.

Nothing here loads weights; what a repository holds is read through the Hub client's cache.
"""

import re
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from dspine_hub.checkpoints.tensors import StoredTensor, joined, list_tensors
from dspine_hub.errors import DSpineHubError
from dspine_hub.folders import parse_json

# what transformers, safetensors and a config's own rules raise for a broken folder
LOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, SafetensorError, StrictDataclassError)

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]{0,95}")


def is_repo_id(text: str) -> bool:
    """Tell by its form alone whether a repository can have this name, `owner/name`."""
    ends_badly = text.endswith((".git", "-", "."))
    return bool(_REPO_ID.fullmatch(text)) and "--" not in text and ".." not in text and not ends_badly


class Source:
    """A model folder or repository.

    Args:
        location (`str` or `Path`): An existing folder, or a repository id `org/name`.
        revision (`str`, *optional*): Branch, tag or commit of a repository.

    Raises:
        DSpineHubError: When it is neither.
    """

    def __init__(self, location: str | Path, revision: str | None = None):
        self.name = str(location)
        self.revision = revision
        self.folder = Path(location) if Path(location).is_dir() else None
        if self.folder is None and not is_repo_id(self.name):
            raise DSpineHubError(f"`{self.name}` must be a folder or a repository id like `org/name`; no such folder.")

    def read_json(self, name: str) -> dict | None:
        """Read a JSON object, or return `None` when the file is not there."""
        path = self.file(name)
        return None if path is None else parse_json(path.read_bytes(), f"{self.name}/{name}")

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

    def tensors_by_file(self) -> dict[Path, dict[str, StoredTensor]]:
        """List the tensors of every safetensors file at the top; of a repository by ranges, no weight is fetched.

        Raises:
            DSpineHubError: When a file is damaged, index and files disagree, or a repository cannot be read.
        """
        if self.folder is not None:
            return list_tensors(self.folder)
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        api = HfApi()
        try:
            names = [name for name in api.list_repo_files(self.name, revision=self.revision) if "/" not in name]
            found = {
                Path(name): api.parse_safetensors_file_metadata(self.name, name, revision=self.revision).tensors
                for name in sorted(names)
                if name.endswith(".safetensors")
            }
        except (HfHubHTTPError, HTTPError) as error:
            raise DSpineHubError(f"`{self.name}` must be a repository you can read, got: {error}") from None
        return {file: {n: _remote(n, tensor, file) for n, tensor in found[file].items()} for file in found}

    def tensors(self) -> dict[str, StoredTensor]:
        """List the tensors of all files by name, each of which must be stored once."""
        return joined(self.tensors_by_file())

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


def _remote(name: str, tensor, file: Path) -> StoredTensor:
    first, last = tensor.data_offsets
    dtype = str(getattr(tensor.dtype, "value", tensor.dtype))
    return StoredTensor(name, tuple(tensor.shape), dtype, file, 0, last - first)
