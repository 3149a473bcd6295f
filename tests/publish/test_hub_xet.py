"""Xet storage: a round trip, a Hub without it, and a damaged store."""

import os
import re
import subprocess
import sys

import pytest
import torch
from helpers.hub import PULL, PUSH, REPO, assert_holds, environment, passes
from helpers.loopback_hub import HubServer
from helpers.paths import ROOT
from helpers.processes import run
from huggingface_hub import constants
from safetensors.torch import save_file

import dspine_hub
from dspine_hub.errors import DSpineHubError


def test_server_without_xet_names_the_way_around(server, folder, monkeypatch):
    """Catches the client's dead end on self-hosted Hubs (huggingface_hub#4786)."""
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    with pytest.raises(
        DSpineHubError, match=r"offers no xet storage.*`HF_HUB_DISABLE_XET=1 dspine-hub push \S+ \S+`$"
    ):
        dspine_hub.push(folder, REPO, check=passes)
    assert set(server.repositories[REPO].files()) == {".gitattributes"}


def test_xet_round_trip(folder, tmp_path):
    """Catches hashes that only the LFS path computes; each process ends, for the store is locked while one runs."""
    pytest.importorskip("hf_xet")
    with HubServer(tmp_path / "server", xet=True) as server:
        env = environment(server, tmp_path / "home", PYTHONPATH=str(ROOT), HF_HUB_DISABLE_XET="0")
        run(PUSH, folder, REPO, env=env, cwd=tmp_path)
        assert server.seen("GET", "/xet-write-token/") and not server.seen("PUT")
        assert_holds(server, folder, "v1")
        run(PULL, REPO, tmp_path / "by-xet", env=env, cwd=tmp_path)
        assert server.seen("GET", "/xet-read-token/")
        run(PULL, REPO, tmp_path / "by-http", env={**env, "HF_HUB_DISABLE_XET": "1"}, cwd=tmp_path)
    for place in ("by-xet", "by-http"):
        assert dspine_hub.diff(folder, tmp_path / place).identical


XET = """
import sys
from dspine_hub.errors import DSpineHubError
from dspine_hub.findings import Report
from dspine_hub import pull, push
what, folder = sys.argv[1:]
try:
    if what == "push":
        push(folder, "org/mini", tag="v1", check=lambda path: Report())
    else:
        pull("org/mini", folder, revision="v1")
except DSpineHubError as error:
    print("refused:", error)
"""


def test_damaged_xet_storage_names_the_way_around(tmp_path):
    """Catches `failed to fill whole buffer` and a traceback in place of advice (xet-core#928)."""
    pytest.importorskip("hf_xet")
    folder = tmp_path / "bundle"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A drafter\n")
    save_file({"weight": torch.rand(256, 1024, generator=torch.Generator().manual_seed(0))}, folder / "a.safetensors")
    (folder / "provenance.json").write_text('{"files": {}}')

    with HubServer(tmp_path / "server", xet=True) as server:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        env = {"HF_ENDPOINT": server.url, "HF_TOKEN": "hf_owner", "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(ROOT)}

        def run(what, place, home):
            command = [sys.executable, "-c", XET, what, str(place)]
            env_of = {**kept, **env, "HF_HOME": str(tmp_path / home)}
            return subprocess.run(command, capture_output=True, text=True, env=env_of, cwd=tmp_path)

        pushed = run("push", folder, "home")
        assert pushed.returncode == 0 and pushed.stdout == "", pushed.stderr[-2000:]
        (stored,) = (path for path in (tmp_path / "server").rglob("default.*") if path.suffix != ".tagset")
        stored.chmod(0o644)
        stored.write_bytes(stored.read_bytes()[:1000].ljust(stored.stat().st_size, b"\0"))
        pulled = run("pull", tmp_path / "out", "other-home")
    assert pulled.returncode == 0, pulled.stderr[-2000:]
    assert re.search(r"refused: `org/mini`: .*`HF_HUB_DISABLE_XET=1 dspine-hub pull ", pulled.stdout), pulled.stdout
    assert not (tmp_path / "out").exists()
