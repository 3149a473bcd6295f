"""A push, step by step: one commit, then the tag; what is unchanged is not sent."""

import re

import pytest
import torch
from helpers.hub import CARD, REPO, assert_holds, head, names_in, passes, seal, write_shards
from helpers.loopback_hub import Blob, Writing
from safetensors.torch import save_file

import dspine_hub
from dspine_hub.errors import DSpineHubError
from dspine_hub.findings import Report
from dspine_hub.folders import file_sha256


def test_push_makes_one_commit_then_the_tag(server, folder):
    """Catches several commits for one release, and a tag on anything but the checked commit."""
    result = dspine_hub.push(folder, REPO, tag="v1", message="First", check=passes)
    assert_holds(server, folder)
    repository = server.repositories[REPO]
    assert len(server.seen("POST", "/commit/")) == 1
    assert repository.commits[repository.head].title == "First"
    assert repository.tags == {"v1": repository.head} and result.commit == repository.head
    assert {entry.path: entry.state for entry in result.files} == dict.fromkeys(names_in(folder), "new")
    matches = [re.search(r"validate|/create$|preupload|batch|/commit/|/tag/", r.path) for r in server.requests]
    steps = list(dict.fromkeys(match[0].strip("/") for match in matches if match))
    assert steps == ["validate", "create", "preupload", "batch", "commit", "tag"]


def test_unchanged_push_sends_no_content_and_makes_the_missing_tag(server, folder):
    """Catches an empty commit, a second upload, and a release left untagged by an interruption."""
    first = dspine_hub.push(folder, REPO, check=passes)
    count = len(server.requests)
    again = dspine_hub.push(folder, REPO, tag="v1", check=passes)
    assert not again.committed and again.commit == first.commit
    assert server.repositories[REPO].tags == {"v1": first.commit}
    sent = server.requests[count:]
    assert not [r for r in sent if re.search(r"/commit/|/preupload/|/objects/", r.path)]


def test_changed_file_alone_is_uploaded(server, folder):
    """Catches an upload of every shard for a change of one."""
    dspine_hub.push(folder, REPO, check=passes)
    count = len(server.requests)
    save_file({"layers.0.weight": torch.zeros(256, 1024)}, folder / "model-00001-of-00002.safetensors")
    result = dspine_hub.push(seal(folder), REPO, check=passes)
    puts = [request for request in server.requests[count:] if request.method == "PUT"]
    assert len(puts) == 1 and file_sha256(folder / "model-00001-of-00002.safetensors") in puts[0].path
    changed = {entry.path for entry in result.files if entry.state == "changed"}
    assert changed == {"model-00001-of-00002.safetensors", "provenance.json"}
    assert_holds(server, folder)


def test_fewer_shards_leave_no_ghosts(server, folder):
    """Catches old shards beside new ones, which a loader without the index would read."""
    write_shards(folder, 3)
    dspine_hub.push(seal(folder), REPO, check=passes)
    write_shards(folder, 1)
    result = dspine_hub.push(seal(folder), REPO, check=passes)
    assert len([entry for entry in result.files if entry.state == "deleted"]) == 3
    assert_holds(server, folder)
    assert len(server.seen("POST", "/commit/")) == 2


def test_parts_and_progress_cover_every_byte(server, folder):
    """Catches a file object that the client's slices or retries cannot rewind, and bars that end short."""
    save_file({"big": torch.rand(2000, 1024)}, folder / "model.safetensors")
    seen = {}
    dspine_hub.push(
        seal(folder), REPO, check=passes, progress=lambda name, sent, size: seen.setdefault(name, []).append(sent)
    )
    assert_holds(server, folder)
    assert len(server.seen("PUT", r"/objects/\w+/\d+$")) == 3
    assert set(seen) == {name for name in names_in(folder) if name.endswith(".safetensors")}
    for name, sent in seen.items():
        assert max(sent) == (folder / name).stat().st_size


def test_many_files_and_pages(server, folder):
    """Catches a listing cut at its first page, which would delete or re-send the rest."""
    server.page_size = 5
    (folder / "notes").mkdir()
    for number in range(30):
        (folder / "notes" / f"{number}.json").write_text(str(number))
    dspine_hub.push(seal(folder), REPO, check=passes)
    assert_holds(server, folder)
    assert not dspine_hub.push(folder, REPO, check=passes).committed


def test_ignore_file_of_the_repository_leaves_nothing_out(server, folder):
    """Catches a release without its receipts because someone once ignored JSON."""
    dspine_hub.push(folder, REPO, check=passes)
    repository = server.repositories[REPO]
    tree = {**repository.files(), ".gitignore": Blob(7, b"*.json\n")}
    repository.branches["main"] = repository.commit(repository.head, tree, "ignore")
    (folder / "config.json").write_text("{}")
    dspine_hub.push(seal(folder), REPO, check=passes)
    assert_holds(server, folder)


def test_commit_that_holds_other_files_is_not_tagged(server, folder, monkeypatch):
    """Catches a release taken for good because the Hub said 200."""
    apply = Writing._apply

    def forget_one(handler, tree, key, value):
        if value["path"] != "config.json":
            apply(handler, tree, key, value)

    monkeypatch.setattr(Writing, "_apply", forget_one)
    with pytest.raises(DSpineHubError, match=r"got others at commit \w{12}: \['config.json'\]"):
        dspine_hub.push(folder, REPO, tag="v1", check=passes)
    assert server.repositories[REPO].tags == {}


def test_pull_request_leaves_main_alone(server, folder):
    """Catches a proposal that publishes."""
    dspine_hub.push(folder, REPO, check=passes)
    before = head(server)
    (folder / "config.json").write_text("{}")
    result = dspine_hub.push(seal(folder), REPO, pr=True, check=passes)
    assert head(server) == before
    assert result.pull_request.endswith("/discussions/1") and result.commit != before
    assert_holds(server, folder, "refs/pr/1")


def test_reader_of_a_repository_may_propose(server, folder, monkeypatch):
    """Catches a pull request that asks for rights it does not need, and a refusal without that way out."""
    dspine_hub.push(folder, REPO, check=passes)
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    with pytest.raises(DSpineHubError, match=r"`dspine-hub push \S+ org/mini-dspine --pr`$"):
        dspine_hub.push(seal(folder), REPO, check=passes)
    assert dspine_hub.push(folder, REPO, pr=True, check=passes).pull_request is not None


def test_tag_elsewhere_is_refused_before_any_upload(server, folder):
    """Catches a release whose tag names other files, noticed after hours of upload."""
    dspine_hub.push(folder, REPO, tag="v1", check=passes)
    (folder / "config.json").write_text("{}")
    write_shards(folder, 1, seed=5)
    before, count = head(server), len(server.requests)
    with pytest.raises(DSpineHubError, match="`tag` must be new"):
        dspine_hub.push(seal(folder), REPO, tag="v1", check=passes)
    assert head(server) == before
    assert not [r for r in server.requests[count:] if re.search(r"/preupload/|/objects/|/commit/", r.path)]


def test_private_repository(server, folder):
    """Catches weights meant to be private in a repository that was public all along."""
    dspine_hub.push(folder, REPO, private=True, check=passes)
    assert server.repositories[REPO].private
    dspine_hub.push(folder, "org/open", check=passes)
    with pytest.raises(DSpineHubError, match="exists and is public"):
        dspine_hub.push(folder, "org/open", private=True, check=passes)


def test_dry_run_sends_nothing_and_lists_everything(server, folder):
    """Catches a dry run that creates the repository, or hides findings behind an exception."""

    def check(path):
        report = Report()
        report.add("error", "finite", "`norm` must hold finite numbers.")
        return report

    result = dspine_hub.push(folder, REPO, tag="v1", dry_run=True, check=check)
    assert server.requests == []
    assert {entry.path: entry.size for entry in result.files} == {
        name: (folder / name).stat().st_size for name in names_in(folder)
    }
    assert not result.report.ok and result.card == CARD and result.commit is None


def test_failed_check_sends_nothing(server, folder):
    """Catches a broken drafter in public."""

    def check(path):
        report = Report()
        report.add("error", "finite", "`norm` must hold finite numbers.")
        return report

    with pytest.raises(DSpineHubError, match=r"(?s)`norm` must hold finite.*--dry-run`$"):
        dspine_hub.push(folder, REPO, check=check)
    assert server.requests == []


def test_receipt_of_other_weights_is_pointed_out(server, folder):
    """Catches a number beside weights it was not measured with."""
    report = dspine_hub.push(folder, REPO, dry_run=True, check=passes).report
    assert [finding.rule for finding in report.findings] == ["receipt-weights"]
    assert report.ok


def test_collection_gains_the_repository_once(server, folder):
    """Catches a second push that fails because the repository is in the collection already."""
    server.collections["org/drafters-1"] = ["org/other"]
    for _ in range(2):
        dspine_hub.push(folder, REPO, collection="org/drafters-1", check=passes)
    assert server.collections["org/drafters-1"] == ["org/other", REPO]
    with pytest.raises(DSpineHubError, match="404"):
        dspine_hub.push(folder, REPO, collection="org/none-2", check=passes)
