"""What a drafter is, from its headers: in a folder, and in a repository of which no weight is fetched."""

import json
import shutil
import sys

import pytest
import torch
from click.testing import CliRunner
from helpers import checkpoints
from helpers.hub import CARD, REPO, environment
from helpers.loopback_hub import HubServer
from helpers.paths import MINI, ROOT
from helpers.processes import run
from helpers.tiny import build_target

from dspine_hub.cli import main
from dspine_hub.conversion.inspection import SETTINGS, inspect

# runs where only the test's Hub is known
PUBLISH = """
import json, sys
from huggingface_hub import HfApi
api = HfApi()
api.create_repo(sys.argv[1])
api.upload_folder(repo_id=sys.argv[1], folder_path=sys.argv[2])
print(json.dumps({}))
"""
CLI = """
import json, sys
from click.testing import CliRunner
from dspine_hub.cli import main
result = CliRunner().invoke(main, sys.argv[1:])
print(json.dumps({"out": result.stdout, "err": result.stderr}))
"""
LOAD = """
import json, sys
import torch
from helpers.tiny import build_target
import dspine_hub
torch.set_num_threads(1)
target = build_target()
drafter = dspine_hub.load(sys.argv[1], target=target, revision="main")
states = target(torch.tensor([[3, 1, 4]]), output_hidden_states=True).hidden_states
taps = torch.cat([states[layer + 1] for layer in drafter.config.target_layer_ids], dim=-1)
print(json.dumps({"drafts": drafter.draft(taps, torch.tensor([7])).tokens[0].tolist()}))
"""


@pytest.fixture(scope="module")
def head():
    return build_target().get_output_embeddings().weight.detach()


def test_folder_is_described_by_its_headers(head, tmp_path):
    """Catches a field that is guessed or lost, and sizes that are not those of the file."""
    source = checkpoints.write_specforge(tmp_path / "source", head)
    found = inspect(source)
    expected = {"format": "specforge", "block_size": 5, "target_layer_ids": [0, 2, 4], "mask_token_id": 96}
    expected |= {
        "transfer_rank": 16,
        "message_size": 8,
        "num_candidates": 6,
        "num_hidden_layers": 3,
        "hidden_size": 32,
    }
    expected |= {"problems": [], "notes": [], "files": 1, "target": None, "quantization": None}
    assert {name: found[name] for name in expected} == expected
    tensors = checkpoints.drafter(head)
    values = sum(tensor.numel() for tensor in tensors.values())
    assert found["dtypes"] == {"BF16": values - 1, "BOOL": 1} and found["parameters"] == values
    assert found["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert set(SETTINGS) <= set(found)


def rename(config, tensors):
    config["architectures"] = ["Other"]
    strip(tensors)


def untap(config, tensors):
    del config["dflash_config"]["target_layer_ids"]


def shrink(config, tensors):
    tensors["norm.weight"] = torch.ones(31)


PROBLEMS = {
    "unknown": (rename, "must be in a known"),
    "taps": (untap, "`target_layer_ids` must be given"),
    "shape": (shrink, "`norm.weight` must have shape"),
    "codes": (lambda config, tensors: tensors.pop("transfer_codes"), "`transfer_codes` must be stored"),
}


def strip(tensors):
    for name in [name for name in tensors if name.startswith("injection") or name.startswith("transfer")]:
        del tensors[name]


@pytest.mark.parametrize(("change", "problem"), PROBLEMS.values(), ids=PROBLEMS)
def test_problems_are_listed_and_do_not_hide_the_rest(head, tmp_path, change, problem):
    """Catches a tool that refuses to look at what needs looking at."""
    config, tensors = checkpoints.specforge_config(), checkpoints.drafter(head)
    change(config, tensors)
    found = inspect(checkpoints.write(tmp_path / "source", config, tensors))
    assert len(found["problems"]) == 1 and problem in found["problems"][0]
    assert found["bytes"] > 0 and found["hidden_size"] in (32, None)
    result = CliRunner().invoke(main, ["inspect", str(tmp_path / "source")])
    assert result.exit_code == 0 and "problem" in result.stdout


def test_command_prints_text_or_one_json_object():
    """Catches output a script cannot read."""
    result = CliRunner().invoke(main, ["inspect", str(MINI / "drafter"), "--json"])
    assert json.loads(result.stdout)["format"] == "hub"
    text = CliRunner().invoke(main, ["inspect", str(MINI / "drafter")]).stdout
    assert text.startswith("format             hub\n") and "target_layer_ids   [1, 6, 10, 14, 18]\n" in text
    refused = CliRunner().invoke(main, ["inspect", "./none"])
    assert refused.exit_code == 1 and refused.stderr.startswith("Error: `./none` must be a folder or a repository id")


@pytest.mark.slow
def test_repository_of_another_format(head, tmp_path):
    """Catches weights fetched to look at headers, code of others that runs, and a pull that leaves users alone."""
    source = checkpoints.write_reference(tmp_path / "source", head)
    (source / "README.md").write_text(CARD)
    (source / "modeling_dspine.py").write_text("raise SystemExit('ran')")
    with HubServer(tmp_path / "server") as server:
        env = environment(server, tmp_path / "home", PYTHONPATH=str(ROOT / "tests"), HF_HUB_OFFLINE="0")
        run(PUBLISH, REPO, source, env=env, cwd=tmp_path)
        before = len(server.seen("GET", r"/resolve/.*\.safetensors"))
        shown = run(CLI, "inspect", REPO, "--json", env=env, cwd=tmp_path)
        found = json.loads(shown["out"])
        assert (found["format"], found["block_size"], found["problems"]) == ("reference", 16, [])
        assert not list((tmp_path / "home").rglob("*.safetensors"))
        assert len(server.seen("GET", r"/resolve/.*\.safetensors")) > before
        pulled = run(CLI, "pull", REPO, "pulled", env=env, cwd=tmp_path)
        assert pulled["out"] == "pulled\n"
        assert pulled["err"].strip().endswith("`dspine-hub convert pulled OUT --target TARGET`")
        assert "`pulled` is in the format `reference`" in pulled["err"]
        drafts = [run(LOAD, REPO, env=env, cwd=tmp_path)["drafts"] for _ in range(2)]
        assert drafts[0] == drafts[1] and len(drafts[0]) == 15
        assert len(list((tmp_path / "home" / "dspine-hub" / "converted").iterdir())) == 1
        assert not list((tmp_path / "home").rglob("modeling_dspine.py"))
    shutil.rmtree(tmp_path / "home")
    assert sys.modules.get("modeling_dspine") is None
