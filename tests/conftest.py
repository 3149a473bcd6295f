"""Fixtures of every room: a tiny pair, scripted drafts, the committed pair's bundle, and a Hub on loopback."""

import os
import shutil
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# the code that comes with a model is copied there, and two processes must not share the place
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="dspine-modules-")

import pytest
import torch
from helpers.hub import use
from helpers.loopback_hub import HubServer
from helpers.paths import MINI
from helpers.scripted import ScriptedDraft
from helpers.tiny import build_drafter, build_target

from dspine_hub.publish.build import build_bundle

torch.set_num_threads(1)


def pytest_unconfigure():
    shutil.rmtree(os.environ["HF_MODULES_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session")
def target():
    return build_target()


@pytest.fixture
def make_target():
    return build_target


@pytest.fixture
def make_drafter(target):
    """Return `make(target=..., **overrides)`; the default target is the session's."""

    def make(target=target, **overrides):
        return build_drafter(target, **overrides)

    return make


@pytest.fixture
def drafter(make_drafter):
    return make_drafter()


@pytest.fixture
def taps(target):
    """Return `taps(ids, drafter)`: tapped states `[1, n, T * H]`, read through `hidden_states`, not through hooks."""

    @torch.no_grad()
    def read(ids, drafter, target=target):
        states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer + 1] for layer in drafter.config.target_layer_ids], dim=-1)

    return read


@pytest.fixture
def script(monkeypatch):
    """Return `script(drafter, policy, prompt)`, which replaces `drafter.draft` for one test."""

    def install(drafter, policy, prompt, run_real=True):
        scripted = ScriptedDraft(drafter, policy, prompt, run_real)
        monkeypatch.setattr(drafter, "draft", scripted, raising=False)
        return scripted

    return install


@pytest.fixture(scope="session")
def saved_target(tmp_path_factory):
    """A saved target in bfloat16 values, so that every reader sees the same head: its folder and the model."""
    model = build_target().bfloat16().float()
    place = tmp_path_factory.mktemp("target")
    model.save_pretrained(place)
    return place, model


@pytest.fixture(scope="session")
def mini_bundle(tmp_path_factory):
    """The committed drafter as a bundle; whoever changes it copies it first."""
    return build_bundle(MINI / "drafter", tmp_path_factory.mktemp("bundles") / "mini-b8")


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A Hub that this process knows, without any repository."""
    with HubServer(tmp_path / "server", part_size=3_000_000) as running:
        yield use(monkeypatch, running, tmp_path / "cache")
