"""Tensors written as a stream: the library's own bytes, in pieces and shards, and numbers that are not finite."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspine_hub.checkpoints import tensors as reading
from dspine_hub.conversion import writing as stream
from dspine_hub.errors import DSpineHubError
from dspine_hub.folders import file_sha256


def test_stream_writes_what_the_library_writes(tmp_path):
    """Catches another order, padding or header than safetensors' own: readers elsewhere map the file."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "b.odd": torch.randn(3, 5, generator=generator).bfloat16(),
        "a": torch.randn(7, generator=generator),
        "flag": torch.tensor(True),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "ü": torch.randn(2, generator=generator).half().bfloat16(),
    }
    save_file(tensors, tmp_path / "library.safetensors", metadata={"format": "pt"})
    hashes = stream.write_weights(tmp_path, [stream.made(name, tensor) for name, tensor in tensors.items()])
    own = (tmp_path / "model.safetensors").read_bytes()
    assert own == (tmp_path / "library.safetensors").read_bytes()
    assert hashes == {"model.safetensors": file_sha256(tmp_path / "model.safetensors")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -float("nan")], ids=str)
def test_numbers_that_are_not_finite_are_found_and_extremes_are_not(tmp_path, dtype, value):
    """Catches a test on bits that misses one sign or one kind, or refuses the largest number there is."""
    largest = torch.finfo(dtype).max
    numbers = torch.tensor([0.0, -0.0, 1.0, largest, -largest, torch.finfo(dtype).tiny], dtype=dtype)
    stream.write_weights(tmp_path, [stream.made("x", numbers)])
    with pytest.raises(DSpineHubError, match="`x` must hold finite numbers, got 1 that are not"):
        stream.write_weights(tmp_path, [stream.made("x", torch.cat((numbers, torch.tensor([value], dtype=dtype))))])


def test_large_tensors_pass_in_pieces_and_large_files_in_shards(tmp_path, monkeypatch):
    """Catches a seam between two pieces, a buffer reused too early, and an index that names the wrong shard."""
    tensors = {f"t{i}": torch.randn(1000, 7, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(5)}
    save_file(tensors, tmp_path / "source.safetensors")
    monkeypatch.setattr(reading, "PIECE", 1024)
    monkeypatch.setattr(stream, "PIECE", 1024)
    stored = reading.read_file(tmp_path / "source.safetensors")
    items = [stream.Item(name, tensor.shape, tensor.dtype, tensor.pieces) for name, tensor in stored.items()]
    (tmp_path / "out").mkdir()
    hashes = stream.write_weights(tmp_path / "out", items, shard_bytes=30_000)
    assert len(hashes) == 3
    assert hashes == {name: file_sha256(tmp_path / "out" / name) for name in hashes}
    index = json.loads((tmp_path / "out" / reading.INDEX).read_text())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], tensors[name])
    assert index["metadata"]["total_size"] == 5 * 14_000
    assert torch.equal(stored["t3"].rows(10, 20).load(), tensors["t3"][10:20])
