"""Stored tensors: read by their headers, in pieces, or scanned whole in one pass.

The safetensors library finds damaged files and keeps to itself where a tensor lies; this module reads the rest of a
header, so that files of any size pass through a few megabytes of memory. Importing it loads no torch.
"""

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from dspine_hub.errors import DSpineHubError
from dspine_hub.folders import parse_json

# small enough to stay in the processor's cache between reading, checking, hashing and writing
PIECE = 1 << 20
BUFFERS = 8
INDEX = "model.safetensors.index.json"
# loading one of these runs whatever code it holds
PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")

# safetensors' name of a dtype -> torch's
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BOOL": "bool",
    "U8": "uint8",
}


def torch_dtype(name: str):
    """Return torch's dtype of a safetensors name; `DSpineHubError` for one no drafter is stored in."""
    import torch

    if name not in DTYPES:
        raise DSpineHubError(f"`dtype` of a stored tensor must be one of {list(DTYPES)}, got {name!r}.")
    return getattr(torch, DTYPES[name])


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Args:
        name (`str`), shape (`tuple[int]`), dtype (`str`): As its header says; dtypes by safetensors' names, `"BF16"`.
        path (`Path`): The file; of a repository that is not local, its name there.
        start, size (`int`): Where its bytes lie in a local file, and how many there are.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    start: int
    size: int

    def rows(self, first: int, last: int) -> "StoredTensor":
        """Return rows `first` to `last` as a tensor of their own."""
        width = self.size // self.shape[0]
        shape, start = (last - first, *self.shape[1:]), self.start + first * width
        return StoredTensor(self.name, shape, self.dtype, self.path, start, (last - first) * width)

    def load(self):
        """Read all of it into a `torch.Tensor`."""
        import torch

        data = bytearray(self.size)
        with self.path.open("rb") as file:
            file.seek(self.start)
            file.readinto(data)
        if not self.size:
            return torch.empty(self.shape, dtype=torch_dtype(self.dtype))
        return as_tensor(data, self.dtype).reshape(self.shape)

    def pieces(self) -> Iterator:
        """Read it as flat tensors of at most `PIECE` bytes; `BUFFERS` buffers take turns, so keep none longer."""
        for view in self.raw_pieces():
            yield as_tensor(view, self.dtype)

    def raw_pieces(self) -> Iterator[memoryview]:
        """Read its bytes the same way."""
        buffers = [bytearray(min(PIECE, self.size)) for _ in range(BUFFERS)]
        with self.path.open("rb") as file:
            file.seek(self.start)
            for turn, offset in enumerate(range(0, self.size, PIECE)):
                view = memoryview(buffers[turn % BUFFERS])[: min(PIECE, self.size - offset)]
                file.readinto(view)
                yield view

    def sha256(self) -> str:
        """Hash its bytes."""
        digest = hashlib.sha256()
        for view in self.raw_pieces():
            digest.update(view)
        return digest.hexdigest()


def as_tensor(data, dtype: str):
    """View bytes as a flat tensor of safetensors' dtype."""
    import torch

    return torch.frombuffer(data, dtype=torch_dtype(dtype))


def read_file(path: Path) -> dict[str, StoredTensor]:
    """Read the headers of one safetensors file.

    Raises:
        DSpineHubError: When the file is damaged or cut off.
    """
    _check_whole(path)
    with path.open("rb") as file:
        return _parse_header(path, _read_header(file))


def _check_whole(path: Path) -> None:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise DSpineHubError(
            f"`{path}` must be a complete safetensors file, got one that cannot be read ({error}). It may be cut off: "
            "copy or download it again."
        ) from None


def _read_header(file) -> bytes:
    length = file.read(8)
    return length + file.read(int.from_bytes(length, "little"))


def _parse_header(path: Path, header: bytes) -> dict[str, StoredTensor]:
    tensors = json.loads(header[8:])
    tensors.pop("__metadata__", None)
    return {
        name: StoredTensor(name, tuple(fields["shape"]), fields["dtype"], path, len(header) + first, last - first)
        for name, fields in tensors.items()
        for first, last in [fields["data_offsets"]]
    }


def list_tensors(folder: Path) -> dict[Path, dict[str, StoredTensor]]:
    """List the tensors of every safetensors file of a folder, having checked files and index.

    Raises:
        DSpineHubError: When a file is cut off, or the index and the files disagree.
    """
    files = {path: read_file(path) for path in sorted(folder.glob("*.safetensors"))}
    index = folder / INDEX
    if not index.is_file():
        return files
    owners = weight_map(index.read_bytes(), str(index))
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


def joined(files: dict[Path, dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """List the tensors of several files by name; `DSpineHubError` when one is stored twice."""
    found: dict[str, StoredTensor] = {}
    for tensors in files.values():
        for name, tensor in tensors.items():
            if name in found:
                both = f"`{found[name].path.name}` and `{tensor.path.name}`"
                raise DSpineHubError(f"`{name}` must be stored once, got it in {both}.")
            found[name] = tensor
    return found


def weight_map(index: bytes | str, place: str) -> dict[str, str]:
    """Read the tensors' owners from an index; `DSpineHubError` when it has none."""
    owners = parse_json(index, place).get("weight_map")
    if not isinstance(owners, dict) or not all(isinstance(owner, str) for owner in owners.values()):
        raise DSpineHubError(f"`{place}` must be a JSON object with a `weight_map`: download it again.")
    return owners


@dataclass(frozen=True)
class ScannedFile:
    """A safetensors file after one pass over its bytes.

    Args:
        sha256 (`str`): Of the whole file.
        tensors (`dict[str, StoredTensor]`): By name.
        not_finite (`dict[str, int]`): Tensor -> how many of its numbers are not finite, where some are not.
        flags (`dict[str, bool]`): Value of every tensor of one boolean.
    """

    sha256: str
    tensors: dict[str, StoredTensor]
    not_finite: dict[str, int]
    flags: dict[str, bool]


def scan_file(path: Path) -> ScannedFile:
    """Hash a file and look at every number in it, reading it once.

    Raises:
        DSpineHubError: When the file is damaged, or stores a dtype no drafter has.
    """
    _check_whole(path)
    digest, not_finite, flags = hashlib.sha256(), {}, {}
    buffers = [bytearray(PIECE) for _ in range(2)]
    with path.open("rb") as file, ThreadPoolExecutor(max_workers=1) as hasher:
        header = _read_header(file)
        digest.update(header)
        tensors = _parse_header(path, header)
        pending, turn = None, 0
        # they lie side by side, without gaps: the library has seen to it
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
            left, bad = tensor.size, 0
            while left:
                view = memoryview(buffers[turn % 2])[: min(PIECE, left)]
                file.readinto(view)
                if pending is not None:
                    pending.result()
                pending = hasher.submit(digest.update, view)
                bad += count_not_finite(view, tensor.dtype)
                left, turn = left - len(view), turn + 1
                if tensor.dtype == "BOOL" and tensor.size == 1:
                    flags[tensor.name] = bool(view[0])
            if bad:
                not_finite[tensor.name] = bad
        if pending is not None:
            pending.result()
    return ScannedFile(digest.hexdigest(), tensors, not_finite, flags)


def count_not_finite(data, dtype: str) -> int:
    """Count the numbers among some bytes that are infinite or none."""
    floats = DTYPES.get(dtype, "float").startswith(("float", "bfloat"))
    if not floats or dtype in _EXPONENTS and not _reaches_exponent(data, dtype):
        return 0
    import torch

    numbers = as_tensor(data, dtype)
    # not every small dtype can be asked
    return int((~torch.isfinite(numbers.float() if numbers.itemsize == 1 else numbers)).sum())


# a number is not finite when every bit of its exponent is set: then its bits are the largest there are, read with a
# sign for positive numbers and without for negative ones; asked so, in one thread, it costs a tenth of asking torch
_EXPONENTS = {"BF16": ("uint16", "int16", 0x7F80), "F32": ("uint32", "int32", 0x7F800000)}


def _reaches_exponent(data, dtype: str) -> bool:
    import numpy as np

    unsigned, signed, exponent = _EXPONENTS[dtype]
    bits = np.frombuffer(data, dtype=unsigned)
    sign = np.iinfo(signed).max + 1
    return bool(bits.size) and (int(bits.max()) >= sign + exponent or int(bits.view(signed).max()) >= exponent)
