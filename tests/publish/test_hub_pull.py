"""A pull appears whole or not at all, and says what was in its way."""

import errno
from pathlib import Path

import pytest
from helpers.hub import CARD, REPO, TOKEN, names_in, passes
from huggingface_hub import constants, snapshot_download

import dspine_hub
from dspine_hub.errors import DSpineHubError
from dspine_hub.folders import file_sha256


def test_pull_appears_whole_or_not_at_all(server, folder, tmp_path, sleeps):
    """Catches a folder that looks complete after a broken download, and litter beside it."""
    dspine_hub.push(folder, REPO, check=passes)
    fault = server.fault("GET", r"/resolve/.*00002-of", status=403, times=100)
    place = tmp_path / "place"
    with pytest.raises(DSpineHubError, match=r"may not do that.*`hf auth login`$"):
        dspine_hub.pull(REPO, place / "out")
    assert list(place.iterdir()) == []
    fault.times = 0
    assert names_in(dspine_hub.pull(REPO, place / "out")) == names_in(folder) | {".gitattributes"}
    assert [path.name for path in place.iterdir()] == ["out"]


def test_pull_refuses_bytes_damaged_on_the_way(server, folder, tmp_path):
    """Catches damage that sizes do not show."""
    dspine_hub.push(folder, REPO, check=passes)
    stored = server.object(file_sha256(folder / "model-00001-of-00002.safetensors"))
    stored.write_bytes(b"\0" * stored.stat().st_size)
    with pytest.raises(DSpineHubError, match="differs from what the Hub announced"):
        dspine_hub.pull(REPO, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pull_refuses_a_repository_edited_behind_its_hashes(server, folder, tmp_path):
    """Catches code or weights replaced after they were checked; the card alone may change."""
    (folder / "README.md").write_text(CARD + "edited")
    dspine_hub.push(folder, REPO, check=passes)
    dspine_hub.pull(REPO, tmp_path / "card")
    (folder / "config.json").write_text("{}")
    dspine_hub.push(folder, REPO, check=passes)
    with pytest.raises(DSpineHubError, match="`config.json` differs from its hash in `provenance.json`"):
        dspine_hub.pull(REPO, tmp_path / "out")
    assert not (tmp_path / "out").exists()


PULL_REFUSED = {
    "missing-repository": ("org/nothing", {}, r"no such repository.*`hf auth whoami`$"),
    "missing-revision": (REPO, {"revision": "v9"}, r"no such repository or revision.*`hf auth whoami`$"),
    "bad-name": ("nothing", {}, r"named like `org/name`"),
}


@pytest.mark.parametrize(("repo_id", "fields", "match"), PULL_REFUSED.values(), ids=PULL_REFUSED)
def test_pull_of_nothing_is_readable(server, folder, tmp_path, repo_id, fields, match):
    """Catches a traceback for a typo."""
    dspine_hub.push(folder, REPO, check=passes)
    with pytest.raises(DSpineHubError, match=f"(?is){match}"):
        dspine_hub.pull(repo_id, tmp_path / "out", **fields)
    assert not (tmp_path / "out").exists()


def test_pull_keeps_a_taken_folder(server, folder):
    """Catches an overwritten checkpoint."""
    before = names_in(folder)
    with pytest.raises(DSpineHubError, match="`dest` must not exist yet"):
        dspine_hub.pull(REPO, folder)
    assert names_in(folder) == before and server.requests == []


def test_private_repository_needs_its_token(server, folder, tmp_path, monkeypatch):
    """Catches a private drafter served to strangers, and an error that tells them it exists."""
    dspine_hub.push(folder, REPO, private=True, check=passes)
    assert dspine_hub.pull(REPO, tmp_path / "mine").is_dir()
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    with pytest.raises(DSpineHubError, match="(?i)no such repository or revision, or it is private"):
        dspine_hub.pull(REPO, tmp_path / "theirs")
    assert dspine_hub.pull(REPO, tmp_path / "given", token=TOKEN).is_dir()


def test_offline_uses_the_cache_or_says_so(server, folder, tmp_path, monkeypatch):
    """Catches a request in offline mode, and a message that blames the network."""
    dspine_hub.push(folder, REPO, check=passes)
    snapshot_download(REPO, endpoint=server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    count = len(server.requests)
    assert dspine_hub.diff(dspine_hub.pull(REPO, tmp_path / "out"), folder).identical
    assert not (tmp_path / "out" / "config.json").is_symlink()
    with pytest.raises(DSpineHubError, match=r"not complete in the local cache.*`HF_HUB_OFFLINE=0 dspine-hub pull"):
        dspine_hub.pull("org/other", tmp_path / "other")
    with pytest.raises(DSpineHubError, match=r"(?i)offline mode forbids.*`HF_HUB_OFFLINE=0 dspine-hub push"):
        dspine_hub.push(folder, REPO, check=passes)
    assert len(server.requests) == count


def test_full_disk_is_named_and_leaves_nothing(server, folder, tmp_path, monkeypatch):
    """Catches half a download that fills the disk for good."""
    dspine_hub.push(folder, REPO, check=passes)

    def fill(repo_id, local_dir, **keywords):
        (Path(local_dir) / "part").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dspine_hub.publish.pull.snapshot_download", fill)
    with pytest.raises(DSpineHubError, match=r"The disk is full.*`HF_HOME=\S+ dspine-hub pull"):
        dspine_hub.pull(REPO, tmp_path / "place" / "out")
    assert list((tmp_path / "place").iterdir()) == []
