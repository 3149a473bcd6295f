"""Commands as users type them: whole outputs, exit codes, one readable error."""

import importlib.metadata
import json
import re
import shutil

import pytest
from click.testing import CliRunner
from helpers.paths import MINI

from dspine_hub.cli import main
from dspine_hub.cli.demo import JSON_FIELDS


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", ["dspine-hub", "hf-dspine"])
def test_entry_points_resolve(name):
    """Catches a script that points at a function that moved."""
    (script,) = importlib.metadata.entry_points(group="console_scripts", name=name)
    assert script.load() is main


def test_version():
    assert re.fullmatch(r"dspine-hub, version \d+\.\d+\.\d+\S*\n", invoke("--version").output)


def test_demo_decodes_the_mini_pair(tmp_path):
    """Catches a demo whose two texts differ, or whose JSON lost a field."""
    result = invoke("demo", "--json", "--prompt", "def fibonacci(n):\n", "--max-new-tokens", 24)
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout.splitlines()[-1])
    assert tuple(table) == JSON_FIELDS
    assert table["identical"] is True
    assert table["tokens"] == 24 and 0 < table["rounds"] < 24
    assert len(table["acceptance_per_slot"]) == 7
    assert table["tau_pooled"] > 1


def test_demo_streams_the_targets_text():
    """Catches a stream that drops or repeats tokens at the seams of rounds."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompt = "def fibonacci(n):\n"
    result = invoke("demo", "--prompt", prompt, "--max-new-tokens", 24)
    assert result.exit_code == 0, result.output
    tokenizer = AutoTokenizer.from_pretrained(MINI / "target")
    target = AutoModelForCausalLM.from_pretrained(MINI / "target", dtype="float32")
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    text = tokenizer.decode(target.generate(ids, max_new_tokens=24, do_sample=False)[0], skip_special_tokens=True)
    assert result.stdout.startswith(text)
    assert "texts identical" in result.stdout


def test_demo_samples():
    """Catches a temperature that is not handed on; two samples are no reason to report a difference."""
    result = invoke("demo", "--json", "--prompt", "import os\n", "--temperature", 0.8, "--max-new-tokens", 12)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["identical"] is None


def test_bundle_prints_its_folder(tmp_path):
    result = invoke("bundle", MINI / "drafter", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'out'}\n")


def _pair(tmp_path, **changes):
    """Copy the mini drafter with a changed config, as a drafter of another target would have it."""
    folder = tmp_path / "drafter"
    shutil.copytree(MINI / "drafter", folder)
    config = json.loads((folder / "config.json").read_text())
    config["target"].update(changes.pop("target", {}))
    config.update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _truncated(tmp_path):
    folder = _pair(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return ["--drafter", folder]


def _bad_line(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ok"}\n{"text": "no"}\n')
    return ["--prompts", tmp_path / "prompts.jsonl"]


def _other_target(**changes):
    """A target of another shape: the drafter must refuse it before a shape error does."""

    def arguments(tmp_path):
        from transformers import Qwen3Config, Qwen3ForCausalLM

        folder = tmp_path / "target"
        shutil.copytree(MINI / "target", folder, ignore=shutil.ignore_patterns("model.safetensors"))
        sizes = {"vocab_size": 8192, "hidden_size": 192, "num_hidden_layers": 20, "intermediate_size": 32}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, **changes}
        Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained(folder)
        return ["--target", folder]

    return arguments


ERRORS = {
    "negative-temperature": (lambda tmp: ["--temperature", "-1"], "`--temperature` must be >= 0, got -1.0."),
    "empty-prompt": (lambda tmp: ["--prompt", ""], "`--prompt` must hold at least one token"),
    "both-prompts": (lambda tmp: ["--prompt", "x", "--prompts", "y"], "exclude each other"),
    "no-prompt-file": (lambda tmp: ["--prompts", tmp / "none.jsonl"], "`prompts` must name a .jsonl file"),
    "bad-prompt-line": (_bad_line, "line 2 must be a JSON object"),
    "no-drafter": (lambda tmp: ["--drafter", tmp / "none"], "which does not exist"),
    "no-target": (lambda tmp: ["--target", tmp / "none"], "must be a folder or a repository id"),
    "truncated-weights": (_truncated, "must be a complete safetensors file"),
    "taps-out-of-range": (
        lambda tmp: ["--drafter", _pair(tmp, target_layer_ids=[1, 6, 10, 14, 40])],
        "`target_layer_ids` must lie in [0, 19), got [1, 6, 10, 14, 40]",
    ),
    "other-tokenizer": (
        lambda tmp: ["--drafter", _pair(tmp, target={"tokenizer_sha256": "0" * 64})],
        "`tokenizer` must map ids to the same strings",
    ),
    "other-hidden-size": (_other_target(hidden_size=64), "`hidden_size` of the drafter must equal the target's"),
    "other-layer-count": (_other_target(num_hidden_layers=4), "`num_target_layers` of the drafter must equal"),
    "other-vocabulary": (_other_target(vocab_size=8200), "`vocab_size` of the drafter must equal the target's"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS)
def test_bad_input_ends_in_one_readable_error(tmp_path, arguments, message):
    """Catches a traceback, a cryptic shape error and a folder left behind."""
    given = arguments(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = invoke("demo", "--json", *given)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stderr.startswith("Error: ") and message in result.stderr
    assert result.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_bundle_and_train_refuse_bad_input(tmp_path):
    """Catches commands that skip the shared error handling."""
    for arguments in (["bundle", tmp_path / "none", tmp_path / "out"], ["train", tmp_path / "none.yaml"]):
        result = invoke(*arguments)
        assert result.exit_code == 1 and result.stderr.startswith("Error: ") and "does not exist" in result.stderr
    assert list(tmp_path.iterdir()) == []
