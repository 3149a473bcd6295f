"""A folder to publish, and waits that take no time."""

import json
import time
import types

import pytest
from helpers.hub import CARD, seal, write_shards
from helpers.receipts import RECEIPT


@pytest.fixture
def sleeps(monkeypatch):
    """Record waits instead of waiting, in the client and here."""
    waits = []
    shim = types.SimpleNamespace(**{**vars(time), "sleep": waits.append})
    monkeypatch.setattr("huggingface_hub.utils._http.time", shim)
    monkeypatch.setattr("dspine_hub.publish.hub_client.time", shim)
    return waits


@pytest.fixture
def folder(tmp_path):
    """A small folder with the kinds of files a bundle has."""
    path = tmp_path / "bundle"
    (path / "receipts").mkdir(parents=True)
    (path / "README.md").write_text(CARD)
    (path / "config.json").write_text(json.dumps({"block_size": 8, "target": {"id": "Qwen/Qwen3-8B"}}))
    (path / "receipts" / "mini.json").write_text(json.dumps(RECEIPT))
    write_shards(path, 2)
    return seal(path)
