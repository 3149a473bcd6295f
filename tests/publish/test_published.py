"""The published drafter, as its users load it: by tag, main, fork, mirror and pull."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest
from helpers.hub import REPO, environment, names_in, passes, seal, use
from helpers.loopback_hub import HubServer, copy_repository
from helpers.paths import MINI
from helpers.processes import run
from safetensors.torch import load_file, save_file

import dspine_hub
from dspine_hub.folders import file_sha256
from dspine_hub.publish.cards import PLACEHOLDER

OLAH = os.environ.get("DSPINE_OLAH")

DRAFTS = """
import json, sys
sys.modules["dspine_hub"] = None
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
target_folder, sources, custom, save_to = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
tokenizer = AutoTokenizer.from_pretrained(target_folder)
target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
ids = tokenizer("def add(a, b):\\n", return_tensors="pt")["input_ids"]
plain = target.generate(ids, max_new_tokens=24, do_sample=False)
report = {}
for name, (location, revision) in sources.items():
    drafter = AutoModel.from_pretrained(location, revision=revision, trust_remote_code=True, dtype=torch.float32)
    module = sys.modules[type(drafter).__module__]
    drafted = drafter.bind(target, tokenizer).spec_generate(
        target, ids, 24, temperature=0.0, return_dict_in_generate=True)
    report[name] = {
        "module": module.__name__.split(".")[0],
        "marker": getattr(module, "MARKER", None),
        "weights": sum(float(tensor.double().sum()) for tensor in drafter.state_dict().values()),
        "lengths": drafted.statistics.lengths,
        "lossless": torch.equal(plain, drafted.sequences),
    }
    if name == custom:
        output = target.generate(ids, max_new_tokens=24, do_sample=False, custom_generate=location, drafter=drafter,
            trust_remote_code=True)
        report[name]["custom_generate"] = torch.equal(plain, output)
    if save_to and name == "v1":
        drafter.save_pretrained(save_to)
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def published(mini_bundle, tmp_path_factory):
    """The mini bundle at tag v1; then main with other code and other weights."""
    place = tmp_path_factory.mktemp("published")
    with HubServer(place / "server") as server, pytest.MonkeyPatch.context() as monkeypatch:
        use(monkeypatch, server, place / "cache")
        dspine_hub.push(mini_bundle, REPO, tag="v1", check=passes)
        later = place / "later"
        shutil.copytree(mini_bundle, later)
        with (later / "modeling_dspine.py").open("a") as file:
            file.write('\nMARKER = "main"\n')
        tensors = load_file(later / "model.safetensors")
        tensors["norm.weight"] = tensors["norm.weight"] * 1.5
        save_file(tensors, later / "model.safetensors", metadata={"format": "pt"})
        dspine_hub.push(seal(later), REPO, check=passes)
        copy_repository(server, REPO, "someone/fork")
        yield server


@pytest.fixture(scope="module")
def loaded(published, mini_bundle, tmp_path_factory):
    """Reports of two fresh processes: local, tag and main; then what the first saved, and a fork."""
    place = tmp_path_factory.mktemp("loaded")
    env = environment(published, place / "home")
    sources = {"local": [str(mini_bundle), "main"], "v1": [REPO, "v1"], "main": [REPO, "main"]}
    saved = place / "saved"
    report = run(DRAFTS, MINI / "target", json.dumps(sources), "main", saved, env=env, cwd=place)
    sources = {"saved": [str(saved), "main"], "fork": ["someone/fork", "v1"]}
    env = environment(published, place / "other-home")
    report |= run(DRAFTS, MINI / "target", json.dumps(sources), "fork", "", env=env, cwd=place)
    return report


@pytest.mark.slow
def test_published_tag_drafts_as_the_local_bundle(loaded):
    """Catches a file lost or changed on the way, and code that needs this package."""
    assert loaded["v1"]["module"] == "transformers_modules"
    assert loaded["v1"] == {**loaded["local"], "module": "transformers_modules"}
    assert loaded["v1"]["lossless"] and max(loaded["v1"]["lengths"]) > 1


@pytest.mark.slow
def test_tag_keeps_its_code_and_weights_when_main_moves(loaded):
    """Catches `auto_map` following main (transformers#18537) and a tag that is not a commit of its own."""
    assert loaded["main"]["marker"] == "main" and loaded["v1"]["marker"] is None
    assert loaded["main"]["weights"] != loaded["v1"]["weights"]


@pytest.mark.slow
def test_custom_generate_runs_from_the_repository(loaded):
    """Catches a `custom_generate/` that is missing or needs its neighbours."""
    assert loaded["main"]["custom_generate"] and loaded["fork"]["custom_generate"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["saved", "fork"])
def test_saved_and_forked_copies_draft_alike(loaded, name):
    """Catches a re-saved model without its code (transformers#24737) and a fork bound to its origin."""
    for field in ("weights", "lengths", "lossless", "marker", "module"):
        assert loaded[name][field] == loaded["v1"][field], field


@pytest.mark.slow
def test_pull_of_a_tag_passes_verify(published, mini_bundle, tmp_path, monkeypatch):
    """Catches a pull of main instead of the tag, and a pulled folder that is no bundle any more."""
    from dspine_hub.publish.verify import verify

    use(monkeypatch, published, tmp_path / "cache")
    pulled = dspine_hub.pull(REPO, tmp_path / "pulled", revision="v1")
    assert names_in(pulled) == names_in(mini_bundle) | {".gitattributes"}
    # the card alone differs: it names its repository
    assert set(dspine_hub.diff(pulled, mini_bundle).files) == {"README.md"}
    assert REPO in (pulled / "README.md").read_text() and PLACEHOLDER not in (pulled / "README.md").read_text()
    report = verify(pulled)
    assert report.ok, report.lines()


SNAPSHOT = """
import json, sys
from huggingface_hub import snapshot_download
print(json.dumps(snapshot_download(sys.argv[1], revision="v1", local_dir=sys.argv[2])))
"""
OLAH_FOUND = OLAH is not None or importlib.util.find_spec("olah") is not None


@pytest.mark.slow
@pytest.mark.skipif(not OLAH_FOUND, reason="install olah, or set DSPINE_OLAH to a folder that holds it")
def test_independent_mirror_reads_what_was_pushed(published, mini_bundle, tmp_path):
    """Catches a repository that only our own server and client understand."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    upstream, own = published.url.removeprefix("http://"), f"127.0.0.1:{port}"
    options = {"host": "127.0.0.1", "port": port, "repos-path": tmp_path / "repos", "log-path": tmp_path / "logs"}
    options |= {"hf-scheme": "http", "hf-netloc": upstream, "hf-lfs-netloc": upstream, "mirror-scheme": "http"}
    options |= {"mirror-netloc": own, "mirror-lfs-netloc": own}
    command = [sys.executable, "-m", "olah.server", *(f"--{key}={value}" for key, value in options.items())]
    env = environment(published, tmp_path / "home", PYTHONPATH=OLAH or "")
    with (tmp_path / "log").open("w") as log:
        mirror = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=log, stderr=log)
    try:
        wait_for(lambda: socket.create_connection(("127.0.0.1", port), 1).close(), 20)
        env = {**env, "HF_ENDPOINT": f"http://{own}", "PYTHONPATH": ""}
        env.pop("HF_TOKEN")
        run(SNAPSHOT, REPO, tmp_path / "copy", env=env, cwd=tmp_path)
    finally:
        mirror.terminate()
        mirror.wait(10)
    # the card alone differs: it names its repository
    for name in names_in(mini_bundle) - {"README.md"}:
        assert file_sha256(tmp_path / "copy" / name) == file_sha256(mini_bundle / name), name


def wait_for(attempt, seconds):
    """Repeat until it no longer raises."""
    end = time.monotonic() + seconds
    while True:
        try:
            return attempt()
        except (OSError, AssertionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
