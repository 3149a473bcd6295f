"""A bundle is complete, appears whole or not at all, and loads where this package is not importable."""

import json
import shutil

import pytest
import torch
from helpers.bundles import NEWEST, run_loader
from helpers.overlays import OVERLAY_FOLDER, OVERLAYS
from helpers.paths import MINI
from helpers.tiny import tiny_bundle
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dspine_hub.errors import DSpineHubError
from dspine_hub.folders import file_sha256
from dspine_hub.publish.build import build_bundle
from dspine_hub.publish.shipped import SHIPPED

WRITTEN = ("README.md", "card.toml", "provenance.json", "training.json")


@pytest.fixture(scope="module")
def newest(mini_bundle, tmp_path_factory):
    """Report of the installed transformers, with Triton."""
    return run_loader(mini_bundle, tmp_path_factory.mktemp("newest"), NEWEST)


@pytest.fixture(scope="module")
def newest_lengths(newest):
    return newest["lengths"]


def test_bundle_holds_code_weights_card_and_a_hash_of_each(mini_bundle):
    """Catches a file that is missing, or that no hash covers."""
    files = {path.relative_to(mini_bundle).as_posix() for path in mini_bundle.rglob("*") if path.is_file()}
    assert files == {*SHIPPED, "config.json", "model.safetensors", *WRITTEN}
    provenance = json.loads((mini_bundle / "provenance.json").read_text())
    assert set(provenance["files"]) == files - {"provenance.json"}
    for name, digest in provenance["files"].items():
        assert file_sha256(mini_bundle / name) == digest
    for name, source in SHIPPED.items():
        assert (mini_bundle / name).read_bytes() == source.read_bytes()


def test_bundle_keeps_every_weight_and_names_its_code_locally(mini_bundle):
    """Catches a dropped or cast tensor, and an `auto_map` that follows another repository's main branch."""
    before, after = load_file(MINI / "drafter" / "model.safetensors"), load_file(mini_bundle / "model.safetensors")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) and tensor.dtype == after[name].dtype, name
    assert not [name for name in after if "embed" in name or "lm_head" in name]
    config = json.loads((mini_bundle / "config.json").read_text())
    assert config["architectures"] == ["DSpineForSpeculation"] and config["model_type"] == "dspine"
    assert "--" not in json.dumps(config["auto_map"])


def test_float32_checkpoint_is_published_in_bfloat16_but_a_basis_is_not(target, tmp_path):
    """Catches a bundle twice its size, and codes rebuilt from a rounded basis."""
    folder = tiny_bundle(target, tmp_path / "bundle", transfer_storage="basis")
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        dtypes = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    for name, dtype in dtypes.items():
        expected = "BOOL" if name == "transfer_ready" else "F32" if name.startswith("transfer_basis") else "BF16"
        assert dtype == expected, name


@pytest.mark.parametrize(
    "hidden",
    [
        pytest.param(("dspine_hub",), id="triton"),
        pytest.param(("dspine_hub", "triton"), id="no-triton", marks=pytest.mark.slow),
    ],
)
def test_bundle_decodes_without_this_package(mini_bundle, tmp_path, hidden, newest, newest_lengths):
    """Catches code that only works beside its package, or only where Triton is installed."""
    report = newest if "triton" not in hidden else run_loader(mini_bundle, tmp_path, NEWEST, hidden)
    assert report["module"] == "transformers_modules"
    assert report["spec_generate"] and report["custom_generate"] and report["stock"]
    assert report["lengths"] == newest_lengths


@pytest.mark.overlay
@pytest.mark.skipif(OVERLAY_FOLDER is None, reason="needs DSPINE_OVERLAYS, see tests/helpers/overlays.py")
@pytest.mark.parametrize("hidden", [("dspine_hub",), ("dspine_hub", "triton")], ids=["triton", "no-triton"])
@pytest.mark.parametrize("version", OVERLAYS)
def test_bundle_decodes_on_every_supported_transformers(mini_bundle, tmp_path, version, hidden, newest_lengths):
    """Catches an API that changed between releases; equal acceptance catches a silent change of the drafts."""
    report = run_loader(mini_bundle, tmp_path, version, hidden)
    assert report["version"] == version and report["module"] == "transformers_modules"
    assert report["spec_generate"] and report["custom_generate"]
    assert report["stock"] is (None if version == "5.12.1" else True)
    assert report["lengths"] == newest_lengths


def _truncate(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


def _drop(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["injection.writes.1.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _add(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(4, 4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _edit(**fields):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **fields}))

    return change


BROKEN = {
    "no-weights": (lambda folder: (folder / "model.safetensors").unlink(), "without `model.safetensors`"),
    "no-config": (lambda folder: (folder / "config.json").unlink(), "without one"),
    "bad-json": (lambda folder: (folder / "config.json").write_text("{"), "must be valid JSON"),
    "truncated": (_truncate, "complete safetensors file"),
    "missing-tensor": (_drop, r"missing keys: \['injection.writes.1.weight'\]"),
    "unknown-tensor": (_add, r"unexpected keys: \['lm_head.weight'\]"),
    "other-shape": (_edit(transfer_rank=64), "could not be loaded|mismatched"),
    "tap-out-of-range": (_edit(target_layer_ids=[1, 40]), "`target_layer_ids` must lie in"),
    "no-block-size": (_edit(block_size=None), "`block_size` must be set"),
    "no-target": (_edit(target=None), "`target` must be recorded"),
    "another-model": (_edit(model_type="qwen3"), "`model_type` of"),
}


@pytest.mark.parametrize(("change", "match"), BROKEN.values(), ids=BROKEN)
def test_broken_checkpoint_is_refused_and_nothing_is_written(tmp_path, change, match):
    """Catches a half-written folder and an error that hides its cause."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(MINI / "drafter", checkpoint)
    change(checkpoint)
    with pytest.raises(DSpineHubError, match=match):
        build_bundle(checkpoint, tmp_path / "out" / "bundle")
    assert not (tmp_path / "out").exists()


def test_failure_while_writing_leaves_no_folder(tmp_path, monkeypatch):
    """Catches a folder that looks like a bundle and is not."""

    def fail(config):
        raise OSError("no space left")

    monkeypatch.setattr("dspine_hub.publish.build.render_card", fail)
    with pytest.raises(OSError, match="no space left"):
        build_bundle(MINI / "drafter", tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_taken_folder_is_refused_and_kept(tmp_path):
    """Catches an overwritten folder."""
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(DSpineHubError, match="`OUT` must not exist yet"):
        build_bundle(MINI / "drafter", tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep"
