"""A push as a plan: what it says is what then happens, and what it reads it reads once."""

import builtins
import collections
import io
import json
import shutil
from pathlib import Path

import pytest
from helpers.hub import REPO, head, names_in, passes, seal

import dspine_hub
from dspine_hub.cli.push import command as push_command
from dspine_hub.publish.bundle import Bundle, MemoryFile
from dspine_hub.publish.hub_client import client, look
from dspine_hub.publish.push import examine, make_plan


def states(result) -> dict[str, str]:
    return {entry.path: entry.state for entry in result.files}


def test_a_dry_run_says_what_then_happens(server, folder, tmp_path):
    """Catches a list of files that leaves out what is deleted, or calls new what is there already."""
    new = dspine_hub.push(folder, REPO, dry_run=True, check=passes)
    assert set(states(new).values()) == {"new"} and REPO not in server.repositories
    assert states(dspine_hub.push(folder, REPO, check=passes)) == states(new)
    (folder / "receipts" / "mini.json").unlink()
    (folder / "more.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "note": "changed"}))
    seal(folder)
    before, sent = head(server), len(server.requests)
    planned = dspine_hub.push(folder, REPO, tag="v2", dry_run=True, check=passes)
    assert head(server) == before and planned.commit is None and planned.tag is None
    assert all(one.method == "GET" or "validate-yaml" in one.path for one in server.requests[sent:])
    found = states(planned)
    assert found["config.json"] == "changed" and found["more.json"] == "new"
    assert found["receipts/mini.json"] == "deleted" and found["README.md"] == "unchanged"
    done = dspine_hub.push(folder, REPO, tag="v2", check=passes)
    assert states(done) == found and done.tag == "v2"


def test_a_dry_run_reports_what_the_hub_would_refuse(server, folder):
    """Catches a dry run that calls a push fine which the Hub then refuses, or ends it with a traceback."""
    dspine_hub.push(folder, REPO, tag="v1", check=passes)
    (folder / "more.json").write_text("{}")
    result = dspine_hub.push(seal(folder), REPO, tag="v1", dry_run=True, check=passes)
    assert [finding.rule for finding in result.report.findings if finding.severity == "error"] == ["hub"]
    assert "`tag` must be new" in result.report.lines()[-1] and set(states(result).values()) == {"unsent"}


def test_a_plan_is_pure(server, folder):
    """Catches a comparison that asks or changes something: the same inputs give the same plan, without a Hub."""
    dspine_hub.push(folder, REPO, check=passes)
    seen = look(client(None), REPO)
    bundle = Bundle.read(folder)
    files = {**bundle.files, "README.md": MemoryFile("README.md", b"another card")}
    requests = len(server.requests)
    plans = [make_plan(files, seen, REPO, tag="v9") for _ in range(2)]
    assert plans[0] == plans[1] and len(server.requests) == requests
    assert plans[0].paths("changed") == ["README.md"] and plans[0].tag == "v9" and plans[0].head == seen.head
    assert set(make_plan(files, None, REPO).paths("new")) == set(files)


@pytest.fixture
def opened(monkeypatch):
    """Count the times each file is opened by Python code."""
    counts, real = collections.Counter(), io.open

    def counted(file, *args, **kwargs):
        if isinstance(file, str | Path):
            counts[Path(file).resolve()] += 1
        return real(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", counted)
    monkeypatch.setattr(io, "open", counted)
    return counts


@pytest.mark.parametrize("form", ["plain", "receipt", "quantised"])
def test_every_file_is_read_once(server, mini_bundle, tmp_path, monkeypatch, opened, form):
    """Catches a check, a card or a plan that reads again what another has read: weights are gigabytes.

    What loads the model is left out: a clean process and transformers read it for themselves.
    """
    monkeypatch.setattr("dspine_hub.publish.verify.check_clean_load", lambda report, folder: None)
    folder = tmp_path / "bundle"
    if form == "quantised":
        dspine_hub.convert(mini_bundle, folder, quantize="fp8")
    else:
        shutil.copytree(mini_bundle, folder)
    (folder / "card.toml").write_text('license = "apache-2.0"\n')
    if form != "plain":
        add_receipt(folder)
    seal(folder)
    opened.clear()
    bundle = Bundle.read(folder)
    card, report = examine(bundle, REPO)
    assert report.ok, report.lines()
    files = {**bundle.files, "README.md": MemoryFile("README.md", card.encode())}
    plan = make_plan(files, look(client(None), REPO), REPO)
    assert set(plan.paths("new")) == names_in(folder)
    inside = {path.relative_to(folder.resolve()).as_posix(): n for path, n in opened.items() if folder in path.parents}
    assert inside == dict.fromkeys(names_in(folder), 1)


def add_receipt(folder):
    from helpers.receipts import RECEIPT

    config = json.loads((folder / "config.json").read_text())
    receipt = json.loads(json.dumps(RECEIPT))
    receipt["drafter"]["weights_sha256"] = Bundle.read(folder).weights_sha256
    receipt["target"] = {name: config["target"][name] for name in ("id", "revision")}
    block = receipt["decoding"]["block"] = config["block_size"]
    receipt["acceptance"]["per_slot"] = [0.5] * (block - 1)
    (folder / "receipts").mkdir(exist_ok=True)
    (folder / "receipts" / "mini.json").write_text(json.dumps(receipt))


def test_the_command_shows_the_plan(server, folder, monkeypatch):
    """Catches a dry run on the command line that hides a deletion."""
    from click.testing import CliRunner

    from dspine_hub.findings import Report

    monkeypatch.setattr("dspine_hub.publish.verify.verify_bundle", lambda bundle, target=None: Report())
    dspine_hub.push(folder, REPO, check=passes)
    (folder / "receipts" / "mini.json").unlink()
    shown = CliRunner().invoke(push_command, [str(seal(folder)), REPO, "--dry-run"]).stdout
    assert "deleted    receipts/mini.json" in shown and "unchanged  README.md" in shown
