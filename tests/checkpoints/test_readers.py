"""Every reader of a checkpoint names what is wrong with it."""

import json

import pytest
from helpers.tiny import tiny_bundle
from safetensors.torch import load_file, save_file

from dspine_hub.checkpoints.loading import load_bundle, load_drafter_checkpoint
from dspine_hub.configuration_dspine import DSpineConfig
from dspine_hub.errors import DSpineHubError
from dspine_hub.findings import Report
from dspine_hub.publish.bundle import Bundle
from dspine_hub.publish.verify import check_tensors


def renamed(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["codebook.weight"] = tensors.pop("transfer_codes")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def one_tap_less(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "target_layer_ids": config["target_layer_ids"][:-1]}))


def refusals(folder, target):
    """What every reader of a bundle says: the checkpoint loader, `verify`, and the load for decoding."""
    report = Report()
    check_tensors(report, Bundle.read(folder), DSpineConfig.from_pretrained(folder))
    with pytest.raises(DSpineHubError) as checkpoint:
        load_drafter_checkpoint(folder)
    with pytest.raises(DSpineHubError) as bundle:
        load_bundle(folder, target, None)
    return str(checkpoint.value), {finding.rule for finding in report.findings}, str(bundle.value)


def test_a_renamed_tensor_is_named_by_every_reader(target, tmp_path):
    """Catches a table that stays at its initial value with only a line in a log (verl-SpeCo#62)."""
    folder = tiny_bundle(target, tmp_path / "bundle")
    renamed(folder)
    checkpoint, rules, bundle = refusals(folder, target)
    assert "transfer_codes" in checkpoint and "transfer_codes" in bundle
    assert rules == {"missing-tensor", "unknown-tensor"}


def test_a_wrong_count_of_taps_is_refused_by_every_reader(target, tmp_path):
    """Catches taps that do not fit the projection they feed: its width is their count (z-lab/dflash#156)."""
    folder = tiny_bundle(target, tmp_path / "bundle")
    one_tap_less(folder)
    checkpoint, rules, bundle = refusals(folder, target)
    assert "could not be loaded" in checkpoint and "could not be used" in bundle and rules == {"shape"}
