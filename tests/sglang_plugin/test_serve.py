"""The commands `serve` and `doctor`."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.paths import MINI

from dspine_hub.cli import main
from dspine_hub.sglang_plugin import command, doctor


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(command, "installed_sglang", lambda: "0.5.21")


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_serve_prints_the_whole_command(installed, bundle):
    """Catches a command that is not what runs, or one that forgets what users forget."""
    result = invoke("serve", "--target", MINI / "target", "--drafter", bundle, "--print", "--port", 3000, "--tp=2")
    assert result.exit_code == 0, result.output
    launch = f"{sys.executable} -m sglang.launch_server --model-path {MINI / 'target'} "
    own = f"--speculative-algorithm DSPINE --speculative-draft-model-path {bundle} "
    filled = "--speculative-draft-model-quantization unquant --speculative-num-draft-tokens 8 "
    assert result.stdout == launch + own + filled + "--port 3000 --tp=2\n"


def test_serve_leaves_flags_of_the_user_alone(installed, bundle):
    flags = ["--speculative-num-draft-tokens=4", "--speculative-draft-model-quantization", "fp8"]
    line = command.launch_command(str(MINI / "target"), bundle, [*flags, "--context-length", "20000"])
    assert line[-5:] == [*flags, "--context-length", "20000"]
    assert [part for part in line if part.startswith("--speculative-num-draft-tokens")] == flags[:1]
    # beyond the drafter's own positions it sees its newest rows only
    assert line[line.index("--speculative-draft-window-size") + 1] == "8192"


def _other_tokenizer(bundle, tmp_path):
    folder = Path(shutil.copytree(bundle, tmp_path / "drafter"))
    config = json.loads((folder / "config.json").read_text())
    config["target"]["tokenizer_sha256"] = "0" * 64
    (folder / "config.json").write_text(json.dumps(config))
    return [folder]


SERVE_ERRORS = {
    "wrong-pair": (_other_tokenizer, "`tokenizer` must map ids to the same strings as in training"),
    "own-flag": (lambda bundle, tmp_path: [bundle, "--model-path=x"], "`--model-path` must not be given here"),
    "no-folder": (lambda bundle, tmp_path: [tmp_path / "none"], "no such folder"),
}


@pytest.mark.parametrize(("arguments", "message"), SERVE_ERRORS.values(), ids=SERVE_ERRORS)
def test_serve_refuses_in_one_readable_error(installed, bundle, tmp_path, arguments, message):
    result = invoke("serve", "--target", MINI / "target", "--print", "--drafter", *arguments(bundle, tmp_path))
    assert result.exit_code == 1 and result.stderr.startswith("Error: ") and message in result.stderr


@pytest.mark.parametrize(("version", "message"), [(None, "got none"), ("0.5.24", "0.5.19 to 0.5.23, got 0.5.24")])
def test_serve_needs_a_tested_release(monkeypatch, bundle, version, message):
    monkeypatch.setattr(command, "installed_sglang", lambda: version)
    result = invoke("serve", "--target", MINI / "target", "--drafter", bundle, "--print")
    assert result.exit_code == 1 and message in result.stderr and "dspine-hub[sglang]" in result.stderr


def test_doctor_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "installed_sglang", lambda: None)
    result = invoke("doctor", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["ok"] is False
    assert found["plugin"]["entry_point"] == "dspine_hub.sglang_plugin:register"
    assert "sglang" in [finding["rule"] for finding in found["findings"]]
    assert "pip install" in invoke("doctor").stdout


REGISTERED = {"algorithm": True, "config": True, "architectures": ["a", "b"]}
PROBES = {
    "fine": (REGISTERED, {}, set()),
    "not-registered": ({"algorithm": False, "config": False, "architectures": []}, {}, {"registration"}),
    "whitelist": (
        {"algorithm": True, "config": True, "architectures": ["a", "b"]},
        {"SGLANG_PLUGINS": "other"},
        {"whitelist"},
    ),
    "import": (None, {}, {"import"}),
}


@pytest.mark.parametrize(("probe", "variables", "rules"), PROBES.values(), ids=PROBES)
def test_doctor_asks_sglang_itself(monkeypatch, probe, variables, rules):
    """Catches a doctor that calls an installed plugin a working one."""
    monkeypatch.setattr(doctor, "installed_sglang", lambda: "0.5.21")
    monkeypatch.setattr(doctor, "_version", lambda name: "0.5.21" if name == "sglang" else "1")
    pins = ["torch==2.13.0", 'av==1; sys_platform == "x"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: pins)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    output = "" if probe is None else json.dumps(probe)
    result = subprocess.CompletedProcess([], 0, output, "ImportError: libcuda.so.1")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: result)
    found = doctor.examine()
    errors = {finding["rule"] for finding in found["findings"] if finding["severity"] == "error"}
    assert errors == rules
    assert [f["message"] for f in found["findings"] if f["rule"] == "pin"] == [
        "`torch` must be 2.13.0 for sglang 0.5.21, got 1."
    ]
