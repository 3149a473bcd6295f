"""A drafter's folder or repository in whatever format: its config, its tensors' headers, and which format it is."""

from functools import cached_property
from pathlib import Path

from dspine_hub.checkpoints.formats import Rename
from dspine_hub.checkpoints.sources import Source
from dspine_hub.checkpoints.tensors import PICKLES, StoredTensor, joined
from dspine_hub.conversion.detect import Detection, detect
from dspine_hub.conversion.rules import match
from dspine_hub.errors import DSpineHubError


class DrafterFiles:
    """What a conversion or an inspection reads of a drafter; no weight is.

    Args:
        source ([`Source`]): The folder or repository.
        format_name (`str`): A key of `FORMATS`, or `"auto"`: told by names and config.
        name (`str`, *optional*): What to call it in messages; its location by default.

    Raises:
        DSpineHubError: When it holds no config, or files that are damaged.
    """

    def __init__(self, source: Source, format_name: str = "auto", name: str | None = None):
        self.name, self.folder = name or source.name, source.folder
        self.config, self.files = source.config(), source.tensors_by_file()
        self._format_name = format_name

    @classmethod
    def open(cls, folder: Path, format_name: str = "auto", name: str | None = None) -> "DrafterFiles":
        """Read a folder that must hold weights in a known format."""
        if not folder.is_dir():
            raise DSpineHubError(f"`{name or folder}` must name a folder or a repository, got no such folder.")
        found = cls(Source(folder), format_name, name)
        if not found.files:
            pickles = sorted(path.name for path in folder.iterdir() if path.name.lower().endswith(PICKLES))
            got = f"pickles ({', '.join(pickles)}), which run code when loaded" if pickles else "none"
            raise DSpineHubError(f"`{found.name}` must hold safetensors weights, got {got}.")
        _ = found.detection
        return found

    @cached_property
    def detection(self) -> Detection:
        """Format and reasons; `DSpineHubError` when it is none of `FORMATS`."""
        if self._format_name != "auto":
            return Detection(self._format_name, ("named by `--from`",))
        shapes = {
            path.name: {name: tensor.shape for name, tensor in tensors.items()} for path, tensors in self.files.items()
        }
        return detect(self.config, shapes, self.name)

    @property
    def format(self) -> str:
        """A key of `FORMATS`."""
        return self.detection.format

    def tensors(self) -> dict[str, StoredTensor]:
        """List all tensors by their names in the source, each of which must be stored once."""
        return joined(self.files)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """List shapes by the drafter's own names, of what is only renamed."""
        matched = ((match(name), tensor.shape) for name, tensor in self.tensors().items())
        return {names[0]: shape for (rule, names), shape in matched if isinstance(rule, Rename)}
