"""Stored tensors, read and written in pieces: a file of any size passes through a few megabytes of memory.

The safetensors library finds damaged files (`sources.read_headers`); its writer wants every tensor at once, which is
why this module writes the format itself: the header's length, the header, the data, in the library's own order.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dspine_hub.checkpoints.sources import TensorHeader, read_headers
from dspine_hub.errors import DSpineHubError

# small enough to stay in the processor's cache between reading, checking, hashing and writing
PIECE = 1 << 20
BUFFERS = 8
INDEX = "model.safetensors.index.json"

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "BOOL": torch.bool,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: name, shape, safetensors' dtype, and where its bytes lie."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    start: int
    size: int

    def rows(self, first: int, last: int) -> "StoredTensor":
        """Return rows `first` to `last` as a tensor of their own."""
        width = self.size // self.shape[0]
        return StoredTensor(
            self.name,
            (last - first, *self.shape[1:]),
            self.dtype,
            self.path,
            self.start + first * width,
            (last - first) * width,
        )

    def load(self) -> torch.Tensor:
        """Read all of it."""
        data = bytearray(self.size)
        with self.path.open("rb") as file:
            file.seek(self.start)
            file.readinto(data)
        empty = not self.size
        return torch.empty(self.shape, dtype=DTYPES[self.dtype]) if empty else self._tensor(data).reshape(self.shape)

    def pieces(self) -> Iterator[torch.Tensor]:
        """Read it as flat tensors of at most `PIECE` bytes; `BUFFERS` buffers take turns, so keep none longer."""
        buffers = [bytearray(min(PIECE, self.size)) for _ in range(BUFFERS)]
        with self.path.open("rb") as file:
            file.seek(self.start)
            for turn, offset in enumerate(range(0, self.size, PIECE)):
                view = memoryview(buffers[turn % BUFFERS])[: min(PIECE, self.size - offset)]
                file.readinto(view)
                yield self._tensor(view)

    def _tensor(self, data) -> torch.Tensor:
        return torch.frombuffer(data, dtype=DTYPES[self.dtype])


def list_tensors(folder: Path) -> dict[Path, dict[str, StoredTensor]]:
    """List the tensors of every safetensors file of a folder, having checked files and index.

    Raises:
        DSpineHubError: When a file is cut off, or the index and the files disagree.
    """
    files = {path: read_file(path) for path in sorted(folder.glob("*.safetensors"))}
    index = folder / INDEX
    if not index.is_file():
        return files
    try:
        owners = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise DSpineHubError(f"`{index}` must be a JSON object with a `weight_map`: download it again.") from None
    for name in sorted(set(owners.values())):
        if folder / name not in files:
            raise DSpineHubError(
                f"`{index.name}` of `{folder}` must name files that exist, got `{name}`, which is missing: download "
                "it again."
            )
    for name, owner in owners.items():
        if name not in files[folder / owner]:
            raise DSpineHubError(f"`{owner}` of `{folder}` must hold `{name}`, as `{index.name}` says; it does not.")
    return files


def read_file(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of one safetensors file; `DSpineHubError` when it is cut off."""
    return stored_tensors(read_headers(path), path)


def stored_tensors(headers: list[TensorHeader], path: Path) -> dict[str, StoredTensor]:
    """Name the tensors a file's headers describe."""
    return {h.name: StoredTensor(h.name, h.shape, h.dtype, path, h.start, h.size) for h in headers}
