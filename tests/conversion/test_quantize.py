"""A quantised drafter loads with plain transformers, drafts as its rounding allows, and is not pushed unmeasured."""

import importlib.metadata
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers.bundles import run_loader
from helpers.hub import REPO, use
from helpers.loopback_hub import HubServer
from helpers.overlays import OVERLAY_FOLDER, OVERLAYS
from helpers.paths import MINI
from helpers.receipts import RECEIPT
from safetensors.torch import load_file

import dspine_hub
from dspine_hub.api import convert, load
from dspine_hub.checkpoints.formats import QUANTIZATIONS
from dspine_hub.conversion.inspection import inspect
from dspine_hub.errors import DSpineHubError
from dspine_hub.findings import Report
from dspine_hub.publish.build import build_bundle
from dspine_hub.publish.bundle import Bundle
from dspine_hub.publish.verify import verify

# half a step of three mantissa bits; half a step of the 127 that the largest value of a row is cut into
ROUNDING = {"fp8": 2.0**-4, "int8": 0.5 / 127}


@pytest.fixture(scope="module", params=list(QUANTIZATIONS))
def quantised(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("quantised") / request.param
    convert(MINI / "drafter", out, quantize=request.param, target=MINI / "target")
    return request.param, out


def test_linears_of_the_layers_are_rounded_and_nothing_else_is_touched(quantised):
    """Catches a scale of the wrong axis or dtype, and an injection, norm or code that lost bits too."""
    name, folder = quantised
    before, after = load_file(MINI / "drafter" / "model.safetensors"), load_file(folder / "model.safetensors")
    chosen = {key for key in before if key.endswith("_proj.weight")}
    assert len(chosen) == 21
    assert set(after) == set(before) | {f"{key}_scale" for key in chosen}
    for key in set(before) - chosen:
        assert torch.equal(before[key], after[key]), key
    for key in chosen:
        scale = after[f"{key}_scale"]
        assert scale.shape == (before[key].shape[0], 1) and scale.dtype == torch.bfloat16
        found, wanted = after[key].float() * scale.float(), before[key].float()
        largest = wanted.abs().amax(dim=1, keepdim=True)
        # relative to the value where it floats, to the row's largest where it does not; the scale itself is rounded
        bound = ROUNDING[name] * (wanted.abs() + 0.01 * largest if name == "fp8" else largest) + 2**-8 * wanted.abs()
        assert ((found - wanted).abs() <= bound).all(), key


@pytest.mark.slow
def test_verify_and_inspect_accept_it(quantised):
    """Catches checks that know only unquantised tensors, and acceptance lost on the way."""
    _, folder = quantised
    assert inspect(folder)["problems"] == [] and inspect(folder)["quantization"] == "compressed-tensors"
    report = verify(folder, MINI / "target")
    assert report.ok, report.lines()


@pytest.mark.overlay
@pytest.mark.skipif(OVERLAY_FOLDER is None, reason="needs DSPINE_OVERLAYS, see tests/helpers/overlays.py")
@pytest.mark.parametrize("version", OVERLAYS)
def test_it_decodes_on_every_supported_transformers(quantised, tmp_path, version):
    """Catches a loader that leaves the small dtype in a linear, or forgets the scales."""
    report = run_loader(quantised[1], tmp_path, version)
    assert report["version"] == version
    assert report["spec_generate"] and report["custom_generate"]
    assert sum(report["lengths"]) / len(report["lengths"]) > 1.3


def test_load_drafter_gives_it_in_the_targets_dtype(quantised):
    """Catches a cast of quantised weights, which would read the small numbers as they are."""
    drafter = load(quantised[1], target=MINI / "target")
    weight = drafter.layers[0].mlp.gate_proj.weight
    stored = load_file(MINI / "drafter" / "model.safetensors")["layers.0.mlp.gate_proj.weight"].float()
    assert weight.dtype == torch.float32
    assert (weight - stored).abs().max() < 0.05 * stored.abs().max()


def test_push_asks_for_a_receipt_of_these_very_weights(quantised, tmp_path, monkeypatch):
    """Catches a quantised drafter published unmeasured: it stays lossless, and may hardly be accepted."""
    name, folder = quantised
    copy = Path(shutil.copytree(folder, tmp_path / name))
    receipt = json.loads(json.dumps(RECEIPT))
    config = json.loads((copy / "config.json").read_text())
    receipt["decoding"]["block"] = config["block_size"]
    receipt["acceptance"]["per_slot"] = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
    receipt["target"] |= {"id": config["target"]["id"], "revision": None}
    (copy / "receipts").mkdir()
    with HubServer(tmp_path / "server") as server:
        use(monkeypatch, server, tmp_path / "cache")
        for digest, ok in (
            (Bundle.read(MINI / "drafter").weights_sha256, False),
            (Bundle.read(copy).weights_sha256, True),
        ):
            receipt["drafter"]["weights_sha256"] = digest
            (copy / "receipts" / "mini.json").write_text(json.dumps(receipt))
            report = dspine_hub.push(copy, REPO, dry_run=True, check=lambda path: Report()).report
            assert ("quantised" not in {finding.rule for finding in report.findings}) is ok, report.lines()
        (copy / "receipts" / "mini.json").unlink()
        with pytest.raises(
            DSpineHubError, match="`receipts` must hold a result measured with these quantised weights"
        ):
            dspine_hub.push(copy, REPO, check=lambda path: Report())
        assert server.repositories == {}


def test_quantised_drafters_are_not_sources(quantised, tmp_path):
    """Catches a drafter quantised twice, and dense weights under a config that calls them quantised."""
    _, folder = quantised
    with pytest.raises(DSpineHubError, match="a quantised source is not converted"):
        convert(folder, tmp_path / "out")
    with pytest.raises(DSpineHubError, match="must be unquantised"):
        build_bundle(folder, tmp_path / "out")
    with pytest.raises(DSpineHubError, match="must go with `--to hub`"):
        convert(MINI / "drafter", tmp_path / "out", to_format="specforge", quantize="fp8")
    assert not (tmp_path / "out").exists()


def test_the_library_is_installed_where_tests_run():
    """Catches an environment in which the load was never tried."""
    assert importlib.metadata.version("compressed-tensors") and os.environ.get("PYTHONPATH", "") == ""
