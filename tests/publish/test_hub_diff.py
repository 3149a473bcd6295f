"""What two drafters differ in, wherever they lie."""

import json
import shutil

import pytest
import torch
from click.testing import CliRunner
from helpers.hub import REPO, passes
from helpers.receipts import RECEIPT
from safetensors.torch import load_file, save_file

import dspine_hub
from dspine_hub.cli.diff import command as diff_command
from dspine_hub.errors import DSpineHubError


def test_diff_names_config_tensors_receipts_and_files(server, folder, tmp_path):
    """Catches a difference that is not reported, or a re-sharding reported as new weights."""
    dspine_hub.push(folder, REPO, tag="v1", check=passes)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "config.json").write_text(json.dumps({"block_size": 16, "target": {"id": "Qwen/Qwen3-8B"}, "new": 1}))
    (other / "receipts" / "mini.json").write_text(json.dumps({**RECEIPT, "date": "2026-12-24"}))
    tensors = [load_file(path) for path in sorted(other.glob("*.safetensors"))]
    for path in other.glob("model*"):
        path.unlink()
    merged = {**tensors[0], "layers.1.weight": tensors[1]["layers.1.weight"] + 1, "extra": torch.zeros(2, 3)}
    save_file(merged, other / "model.safetensors")
    result = dspine_hub.diff(f"{REPO}@v1", other)
    assert result.config == {"block_size": [8, 16], "new": [None, 1]}
    assert result.receipts == {"receipts/mini.json": {"date": [RECEIPT["date"], "2026-12-24"]}}
    assert set(result.tensors) == {"layers.1.weight", "extra"}
    assert result.tensors["extra"][0] is None and result.tensors["extra"][1]["shape"] == [2, 3]
    assert not result.identical and "README.md" not in result.files
    output = CliRunner().invoke(diff_command, [str(folder), str(other)]).output
    assert "config   block_size: 8 -> 16" in output and "tensor   extra: absent -> F32 [2, 3]" in output
    assert CliRunner().invoke(diff_command, [str(folder), f"{REPO}@v1"]).output == "identical\n"


def test_diff_of_damaged_weights_is_readable(folder, tmp_path):
    """Catches a traceback, or a hash of bytes that are not there."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    weights = other / "model-00001-of-00002.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(DSpineHubError, match="must be a complete safetensors file"):
        dspine_hub.diff(folder, other)
