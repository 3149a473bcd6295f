"""A damaged bundle is found and named; a sound one passes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from helpers.paths import MINI
from safetensors.torch import load_file, save_file

from dspine_hub.cli import main
from dspine_hub.evaluation.canary import CANARY_PROMPTS
from dspine_hub.findings import Report
from dspine_hub.folders import file_sha256
from dspine_hub.publish.build import build_bundle
from dspine_hub.publish.bundle import Bundle
from dspine_hub.publish.verify import check_canary, verify


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A bundle that records the canary of its target, which takes a while to run."""
    return build_bundle(MINI / "drafter", tmp_path_factory.mktemp("verify") / "mini", MINI / "target")


@pytest.fixture
def bundle(mini_bundle, tmp_path):
    """A bundle to damage."""
    return Path(shutil.copytree(mini_bundle, tmp_path / "mini"))


def rehash(folder):
    """Write honest hashes of the damaged files, so that only the damage itself can be found."""
    path = folder / "provenance.json"
    provenance = json.loads(path.read_text())
    provenance["files"] = {
        file.relative_to(folder).as_posix(): file_sha256(file)
        for file in folder.rglob("*")
        if file.is_file() and file != path
    }
    path.write_text(json.dumps(provenance))


def errors(report):
    return {finding.rule for finding in report.findings if finding.severity == "error"}


def change_tensor(name, function):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = function(tensors[name])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def poison(tensor):
    tensor[0, 0] = float("nan")
    return tensor


def edit_config(**fields):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def append(name, text):
    return lambda folder: (folder / name).write_text((folder / name).read_text() + text)


DAMAGES = {
    "nan": (change_tensor("fc.weight", poison), "finite"),
    "shape": (change_tensor("injection.bias", lambda tensor: tensor[:-1].clone()), "shape"),
    "never-trained": (change_tensor("transfer_ready", torch.zeros_like), "transfer-space"),
    "truncated": (
        lambda folder: (folder / "model.safetensors").write_bytes(
            (folder / "model.safetensors").read_bytes()[:50_000]
        ),
        "weights",
    ),
    "no-weights": (lambda folder: (folder / "model.safetensors").unlink(), "weights"),
    "pickle": (lambda folder: (folder / "pytorch_model.bin").write_bytes(b"x"), "pickle"),
    "other-code": (append("modeling_dspine.py", "\nprint('hello')\n"), "custom-code"),
    "extra-code": (lambda folder: (folder / "extra.py").write_text("x = 1\n"), "custom-code"),
    "code-elsewhere": (edit_config(auto_map={"AutoModel": "other/repo--modeling.X"}), "auto-map"),
    "taps-out-of-range": (edit_config(target_layer_ids=[1, 6, 10, 14, 19]), "config"),
    "no-block-size": (edit_config(block_size=None), "config"),
}


@pytest.mark.parametrize(("damage", "rule"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_found_though_the_hashes_are_honest(bundle, damage, rule):
    """Catches a bundle that a stranger could not use, or that would run code nobody has read."""
    damage(bundle)
    rehash(bundle)
    report = verify(bundle)
    assert rule in errors(report)


def test_hashes_find_any_changed_missing_and_unlisted_file(bundle):
    """Catches a file that was changed after it was measured."""
    append("config.json", "\n")(bundle)
    (bundle / "candidate_walk.py").unlink()
    (bundle / "notes.txt").write_text("x")
    assert {"hash", "missing-file", "unlisted-file"} <= errors(verify(bundle))


@pytest.mark.slow
def test_sound_bundle_passes_with_its_target(sound):
    """Catches a check that refuses what is right; the load runs in a process without this package."""
    report = verify(sound, MINI / "target")
    assert report.ok, report.lines()
    assert [finding.rule for finding in report.findings] == ["canary"]


@pytest.mark.slow
@pytest.mark.parametrize("taps", [[0, 5, 9, 13, 17], [2, 7, 11, 15, 18]], ids=["before", "after"])
def test_taps_shifted_by_one_are_caught_by_the_canary(sound, tmp_path, taps):
    """Catches the silent mistake: everything loads, the text is right, and decoding is slow."""
    bundle = Path(shutil.copytree(sound, tmp_path / "mini"))
    edit_config(target_layer_ids=taps)(bundle)
    rehash(bundle)
    report = verify(bundle, MINI / "target")
    assert errors(report) == {"canary"}


def test_wrong_target_is_refused_before_it_is_loaded(bundle, tmp_path):
    """Catches a canary run with a target that cannot fit."""
    shutil.copytree(MINI / "target", tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    edit_config(hidden_size=256)(tmp_path / "target")
    assert errors(verify(bundle, tmp_path / "target")) == {"hidden-size"}


def test_custom_code_runs_only_when_allowed(bundle):
    """Catches foreign code that runs before anybody has read it, and a flag that does not help."""
    append("modeling_dspine.py", "\nMARK = True\n")(bundle)
    rehash(bundle)
    refused = verify(bundle)
    assert errors(refused) == {"custom-code"}
    assert "+MARK = True" in "\n".join(refused.lines())
    allowed = verify(bundle, allow_custom_code=True)
    assert allowed.ok and "custom-code" in {finding.rule for finding in allowed.findings}


def test_command_reports_and_sets_the_exit_code(bundle):
    """Catches a script that cannot tell success from failure."""
    result = CliRunner().invoke(main, ["verify", str(bundle)])
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "ok")
    (bundle / "config.json").unlink()
    result = CliRunner().invoke(main, ["verify", str(bundle), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False


def test_a_drafter_that_is_never_accepted_fails_verify(tmp_path, monkeypatch):
    """Catches 0 % acceptance that nothing reports (sglang#39087): the text stays right."""
    # a few short answers are enough to tell 1.0 from 1.3
    (tmp_path / "prompts.jsonl").write_text("".join(CANARY_PROMPTS.read_text().splitlines(keepends=True)[:3]))
    monkeypatch.setattr("dspine_hub.evaluation.canary.CANARY_PROMPTS", tmp_path / "prompts.jsonl")
    monkeypatch.setattr("dspine_hub.evaluation.canary.CANARY_NEW_TOKENS", 8)
    checkpoint = Path(shutil.copytree(MINI / "drafter", tmp_path / "checkpoint"))
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["norm.weight"] = -tensors["norm.weight"]
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    report = Report()
    check_canary(report, Bundle.read(build_bundle(checkpoint, tmp_path / "bundle")), MINI / "target")
    assert [finding.rule for finding in report.findings if finding.severity == "error"] == ["canary"]
    assert "must be at least 1.3, got 1.0" in "\n".join(report.lines())
