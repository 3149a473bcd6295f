"""What must not be published, and arguments that make no sense: nothing is sent."""

import re
from pathlib import Path

import pytest
from helpers.hub import REPO, passes, seal
from helpers.tiny import tiny_bundle
from huggingface_hub import snapshot_download

import dspine_hub
from dspine_hub.errors import DSpineHubError


def _link_out(path):
    outside = path.parent / "outside.json"
    outside.write_text("{}")
    (path / "outside.json").symlink_to(outside)


def _link_folder(path):
    (path.parent / "elsewhere").mkdir()
    (path / "elsewhere").symlink_to(path.parent / "elsewhere")


def _with_card(text):
    return lambda path: (path / "README.md").write_text(text)


def _file(name):
    def change(path):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(b"x")

    return change


# change -> rule
REFUSED = {
    "pickle-bin": (_file("pytorch_model.bin"), "pickle"),
    "pickle-pt": (_file("receipts/optimizer.PT"), "pickle"),
    "pickle-ckpt": (_file("last.ckpt"), "pickle"),
    "hidden-env": (_file(".env"), "hidden-file"),
    "hidden-git": (_file(".git/config"), "hidden-file"),
    "hidden-nested": (_file("receipts/.secret"), "hidden-file"),
    "pycache": (_file("__pycache__/kernels.cpython-311.pyc"), "cache-file"),
    "backslash": (_file("a\\b.json"), "name"),
    "newline": (_file("a\nb.json"), "name"),
    "case": (_file("Config.json"), "name-case"),
    "link-out": (_link_out, "link"),
    "link-folder": (_link_folder, "link"),
    "link-dangling": (lambda path: (path / "x.json").symlink_to("nowhere"), "link"),
    "no-card": (lambda path: (path / "README.md").unlink(), "card"),
    "no-metadata": (_with_card("# Drafter\n"), "front-matter"),
    "broken-yaml": (_with_card("---\nbase_model: [a\n---\n"), "front-matter"),
    "list-yaml": (_with_card("---\n- a\n---\n"), "front-matter"),
    "local-base-model": (_with_card("---\nbase_model: /data/Qwen3-8B\nlicense: mit\n---\n"), "base-model"),
    "relative-base-model": (_with_card("---\nbase_model: ./Qwen3-8B\nlicense: mit\n---\n"), "base-model"),
    "deep-base-model": (_with_card("---\nbase_model: out/run/Qwen3-8B\nlicense: mit\n---\n"), "base-model"),
    "windows-base-model": (_with_card("---\nbase_model: C:\\Qwen3-8B\nlicense: mit\n---\n"), "base-model"),
    "local-dataset": (_with_card("---\ndatasets: [org/data, ../train.jsonl]\nlicense: mit\n---\n"), "datasets"),
    "invented-relation": (_with_card("---\nbase_model_relation: draft\nlicense: mit\n---\n"), "base-model-relation"),
    "bad-license": (_with_card("---\nlicense: Apache License 2.0\n---\n"), "license"),
    "bad-tags": (_with_card("---\ntags: [1, ok]\nlicense: mit\n---\n"), "metadata"),
}


@pytest.mark.parametrize(("change", "rule"), REFUSED.values(), ids=REFUSED)
def test_unfit_folder_is_refused_and_nothing_is_sent(server, folder, change, rule):
    """Catches code or secrets in public, names other systems lose, and a 400 after a long upload (hub#1927)."""
    change(folder)
    result = dspine_hub.push(folder, REPO, dry_run=True, check=passes)
    assert [finding.rule for finding in result.report.findings if finding.severity == "error"] == [rule]
    with pytest.raises(DSpineHubError, match=rf"\[{rule}\]"):
        dspine_hub.push(folder, REPO, check=passes)
    assert server.requests == []


def test_hub_refuses_a_card_before_the_repository_exists(server, folder, monkeypatch):
    """Catches metadata only the Hub can judge, judged after the upload."""
    (folder / "README.md").write_text("---\nbase_model: ./local\n---\n")
    monkeypatch.setattr("dspine_hub.publish.push.check_bundle_card", lambda bundle, card: passes(bundle))
    with pytest.raises(DSpineHubError, match=r'"base_model" with value "./local" is not valid'):
        dspine_hub.push(seal(folder), REPO, check=passes)
    assert [request.path for request in server.requests] == ["/api/validate-yaml"]


def test_cached_snapshot_made_of_links_is_published_as_files(server, folder, tmp_path):
    """Catches link targets sent as text, and the refusal of the folder users have."""
    dspine_hub.push(folder, REPO, check=passes)
    snapshot = Path(snapshot_download(REPO, endpoint=server.url))
    assert (snapshot / "config.json").is_symlink()
    dspine_hub.push(snapshot, "org/copy", check=passes)
    files = server.repositories["org/copy"].files()
    assert {name: blob.etag for name, blob in files.items()} == {
        name: blob.etag for name, blob in server.repositories[REPO].files().items()
    }


BAD_ARGUMENTS = {
    "no-namespace": ({"repo_id": "mini"}, "named like `org/name`"),
    "path": ({"repo_id": "./out/mini"}, "named like `org/name`"),
    "space": ({"repo_id": "org/my drafter"}, "named like `org/name`"),
    "tag-and-pr": ({"tag": "v1", "pr": True}, "exclude each other"),
    "bad-tag": ({"tag": "v 1"}, "`tag` must be a name"),
    "no-folder": ({"folder": "nowhere"}, "must be the folder of a bundle"),
}


@pytest.mark.parametrize(("fields", "match"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_argument_is_refused_and_nothing_is_sent(server, folder, fields, match):
    """Catches a typo that becomes a repository."""
    with pytest.raises(DSpineHubError, match=match):
        dspine_hub.push(**{"folder": folder, "repo_id": REPO, "check": passes, **fields})
    assert server.requests == []


CARDS = {
    "no-license": (lambda text: re.sub(r"(?m)^license:.*\n", "", text), "license"),
    "claim": (lambda text: text + "\nDecodes 9.9x faster.\n", "9.9"),
}


@pytest.mark.parametrize(("edit", "named_by"), CARDS.values(), ids=CARDS)
def test_push_refuses_a_card_without_license_or_with_numbers_of_nobody(
    server, target, tmp_path, monkeypatch, edit, named_by
):
    """Catches a card that does not say what it must (speculators#1055), or says what nobody measured."""
    # loads in a process of its own, which tests of `verify` cover
    monkeypatch.setattr("dspine_hub.publish.verify.check_clean_load", lambda report, folder: None)
    folder = tiny_bundle(target, tmp_path / "bundle")
    card = (folder / "README.md").read_text().replace("---\n", "---\nlicense: apache-2.0\n", 1)
    (folder / "README.md").write_text(card)
    sound = dspine_hub.push(folder, "org/tiny", dry_run=True).report
    assert sound.ok, sound.lines()
    (folder / "README.md").write_text(edit(card))
    report = dspine_hub.push(folder, "org/tiny", dry_run=True).report
    errors = [finding.message for finding in report.findings if finding.severity == "error"]
    assert len(errors) == 1 and named_by in errors[0].lower()
