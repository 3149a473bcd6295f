"""What a real engine registers and refuses, and what stays of the plugin when it is uninstalled."""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from helpers import sglang_engines
from helpers.engine_runs import ENGINES, LIMIT, NEEDS_ENGINES, NEWEST, OLDEST, engine_arguments, start
from helpers.overlays import OVERLAY_FOLDER
from helpers.paths import ROOT
from safetensors.torch import load_file, save_file

pytestmark = NEEDS_ENGINES


@pytest.mark.parametrize("version", sglang_engines.ENGINES)
def test_the_plugin_registers_everything(version):
    """Catches a release whose tables moved: SGLang only logs a plugin that fails."""
    done = start(version, "-m", "dspine_hub.sglang_plugin")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "sglang": version,
        "algorithm": True,
        "architectures": ["DSpineForSpeculation", "DSpineDraftModel"],
        "config": True,
    }


def changed(bundle, place, edit):
    """Copy the drafter and change its weights."""
    folder = Path(shutil.copytree(bundle, place / "drafter"))
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def refusal(version, place, engine):
    """Start an engine that must not start; returns what it says."""
    (place / "job.json").write_text(json.dumps({"engine": engine, "calls": []}, default=str))
    done = start(version, ROOT / "tests" / "helpers" / "sglang_job.py", place / "job.json", place / "result.json")
    assert not (place / "result.json").exists() and done.returncode != 0
    assert "ended after" not in done.stderr, "the engine hung instead of ending"
    return done.stderr


@pytest.mark.parametrize(("version", "algorithm"), [(OLDEST, "DSPINE"), (NEWEST, "DFLASH")])
def test_a_wrong_pair_is_refused(bundle, tmp_path, version, algorithm):
    """Catches a drafter of another target, which would only be slow."""
    folder = changed(bundle, tmp_path, lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    config["target"]["tokenizer_sha256"] = "0" * 64
    (folder / "config.json").write_text(json.dumps(config))
    said = refusal(version, tmp_path, engine_arguments(folder, algorithm, disable_overlap_schedule=True))
    assert "does not fit" in said and "`tokenizer` must map ids to the same strings as in training" in said


def test_a_broken_checkpoint_is_refused(bundle, tmp_path):
    """Catches a tensor that is missing and stays as initialised: SGLang's own loader says nothing."""
    folder = changed(bundle, tmp_path, lambda tensors: tensors.pop("injection.writes.1.weight"))
    said = refusal(NEWEST, tmp_path, engine_arguments(folder))
    assert "must hold `injection.writes.1.weight` [192, 64], got none: it is incomplete" in said


STATE = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.speculative.spec_registry import get_spec
ours = sorted(name for name in sys.modules if name.startswith("dspine"))
print(json.dumps([get_spec("DSPINE") is not None, bool(ours)]))
"""


def venv_without_this_package(place):
    """Make an environment that sees everything installed but for this package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
    view = place / "view"
    view.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(("dspine", "__editable__", "_virtualenv")):
            (view / entry.name).symlink_to(entry)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    shared = (Path(ENGINES) / "venv" / "lib" / version / "site-packages").resolve()
    site = place / "venv" / "lib" / version / "site-packages"
    (site / "others.pth").write_text(f"{shared}\n{view}\n")
    return place / "venv" / "bin" / "python", site


def test_uninstalling_leaves_sglang_untouched(tmp_path):
    """Catches a file of SGLang that the package changes, and what stays behind after `pip uninstall`."""
    python, site = venv_without_this_package(tmp_path)
    source = tmp_path / "source"
    for name in ("dspine_hub", "model_cards", "convert"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    files = {path: path.read_bytes() for path in (Path(ENGINES) / NEWEST / "sglang").rglob("*.py")}
    clean = sorted(site.rglob("*"))
    pip = [sys.executable, "-m", "pip", "--python", python]
    env = sglang_engines.environment(Path(ENGINES), Path(OVERLAY_FOLDER), NEWEST, SGLANG_PLUGINS="dspine")

    def run(*command):
        done = sglang_engines.run(command, LIMIT, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()[-1:]

    run(*pip, "install", "--quiet", "--no-deps", source)
    assert run(python, "-c", STATE) == ["[true, true]"]
    run(*pip, "uninstall", "--quiet", "--yes", "dspine-hub")
    assert run(python, "-c", STATE) == ["[false, false]"]
    assert {path: path.read_bytes() for path in files} == files
    assert [path for path in sorted(site.rglob("*")) if "__pycache__" not in path.parts] == clean
