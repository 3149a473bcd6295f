"""The repository, token and folder that tests of publishing share, and what they look at in a Hub."""

import json
import os

import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from dspine_hub.findings import Report
from dspine_hub.folders import file_sha256
from dspine_hub.publish.bundle import git_blob_id

REPO = "org/mini-dspine"
TOKEN = "hf_owner"
CARD = "---\nbase_model: Qwen/Qwen3-8B\nlicense: apache-2.0\ntags: [dspine]\n---\n# A drafter\n"


def passes(folder):
    """Stand in for the bundle's own checks, which have tests of their own."""
    return Report()


def environment(server, home, **extra):
    """Environment of a process that only knows this Hub."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    fields = {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    return {**kept, **fields, "NO_PROXY": "127.0.0.1", "PYTHONPATH": "", **extra}


def use(monkeypatch, server, home):
    """Point this process at a Hub; the suite runs offline otherwise."""
    for name, value in (("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True), ("HF_HUB_CACHE", str(home))):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return server


def write_shards(path, count, seed=0):
    """Write `count` shards of 1 MB and their index."""
    for old in path.glob("model*"):
        old.unlink()
    generator, weights = torch.Generator().manual_seed(seed), {}
    for shard in range(count):
        name = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        save_file({f"layers.{shard}.weight": torch.rand(256, 1024, generator=generator)}, path / name)
        weights[f"layers.{shard}.weight"] = name
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def seal(path):
    """Write the hashes of a folder anew."""
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    hashes = {name: file_sha256(path / name) for name in names if name != "provenance.json"}
    (path / "provenance.json").write_text(json.dumps({"dspine_hub": "0", "files": hashes}))
    return path


def names_in(path):
    return {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}


def head(server):
    repository = server.repositories.get(REPO)
    return None if repository is None else repository.head


def assert_holds(server, path, revision="main"):
    """Compare a revision with a folder by the Hub's own checksums."""
    files = server.repositories[REPO].files(revision)
    assert set(files) - {".gitattributes"} == names_in(path)
    for name in names_in(path):
        blob = files[name]
        own = file_sha256(path / name) if blob.sha256 else git_blob_id((path / name).read_bytes())
        assert blob.etag == own, name


PUSH = """
import sys
from dspine_hub.findings import Report
from dspine_hub import push
push(sys.argv[1], sys.argv[2], tag="v1", check=lambda folder: Report())
print("{}")
"""

PULL = """
import sys
from dspine_hub import pull
print('"' + str(pull(sys.argv[1], sys.argv[2], revision="v1")) + '"')
"""
