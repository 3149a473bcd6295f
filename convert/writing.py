"""Tensors written in pieces: weights of any size pass through a few megabytes of memory.

The safetensors library's writer wants every tensor at once, which is why this module writes the format itself: the
header's length, the header, the data, in the library's own order.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from dspine_hub.checkpoints.tensors import BUFFERS, DTYPES, INDEX, PIECE, count_not_finite, torch_dtype
from dspine_hub.errors import DSpineHubError

SHARD_BYTES = 5_000_000_000
NAMES = {torch_dtype(name): name for name in DTYPES}


@dataclass(frozen=True)
class Item:
    """A tensor to write: its name, its shape, safetensors' dtype, and a function that yields it in flat pieces."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    pieces: Callable[[], Iterator[torch.Tensor]]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return torch.Size(self.shape).numel() * torch_dtype(self.dtype).itemsize


def made(name: str, tensor: torch.Tensor, dtype: str | None = None) -> Item:
    """Return the item of a tensor in memory."""
    dtype = NAMES[tensor.dtype] if dtype is None else dtype
    flat = tensor.detach().to(torch_dtype(dtype)).contiguous().reshape(-1)
    step = PIECE // flat.element_size()
    return Item(name, tuple(tensor.shape), dtype, lambda: iter(flat.split(step)) if flat.numel() else iter(()))


def write_weights(folder: Path, items: list[Item], shard_bytes: int = SHARD_BYTES) -> dict[str, str]:
    """Write `model.safetensors`, or shards and their index.

    Returns:
        `dict[str, str]`: File name -> sha256.
    """
    # the library's order: wide dtypes first, so that every tensor is aligned
    items = sorted(items, key=lambda item: (-torch_dtype(item.dtype).itemsize, item.name))
    shards, filled = [[]], 0
    for item in items:
        if shards[-1] and filled + item.size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item.size
    if len(shards) == 1:
        return {"model.safetensors": _write_file(folder / "model.safetensors", shards[0])}
    hashes, owners = {}, {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        hashes[name] = _write_file(folder / name, shard)
        owners |= {item.name: name for item in shard}
    total = sum(item.size for item in items)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(owners.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return hashes


def _write_file(path: Path, items: list[Item]) -> str:
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for item in items:
        header[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [end, end + item.size]}
        end += item.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(max_workers=1) as hasher:
        start = len(text).to_bytes(8, "little") + text
        file.write(start)
        digest.update(start)
        pending: deque[Future] = deque()
        for item in items:
            for piece in item.pieces():
                data = _checked_bytes(item, piece)
                pending.append(hasher.submit(digest.update, data))
                file.write(data)
                # a reader fills its buffers again in turn: what lies in them must be hashed by then
                if len(pending) == BUFFERS:
                    pending.popleft().result()
        while pending:
            pending.popleft().result()
    return digest.hexdigest()


def _checked_bytes(item: Item, piece: torch.Tensor) -> memoryview:
    data = memoryview(piece.to(torch_dtype(item.dtype)).view(torch.uint8).numpy())
    bad = count_not_finite(data, item.dtype)
    if bad:
        raise DSpineHubError(
            f"`{item.name}` must hold finite numbers, got {bad} that are not: the source is damaged, or was saved "
            "after its training diverged."
        )
    return data
