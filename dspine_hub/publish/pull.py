"""Fetch a bundle: whole, into a folder whose hashes are right, or what a load reads of it, into the client's cache."""

import shutil
from pathlib import Path

from huggingface_hub import constants, snapshot_download

from dspine_hub.errors import DSpineHubError
from dspine_hub.folders import check_free, hash_files, new_folder, parse_json, walk
from dspine_hub.publish.bundle import UNHASHED, git_blob_id
from dspine_hub.publish.hub_client import client, endpoint, hub_bars, patiently, remote_files
from dspine_hub.publish.hub_errors import check_repo_id, readable


def pull(
    repo_id: str, dest: str | Path, *, revision: str | None = None, token: str | None = None, progress: bool = False
) -> Path:
    """Download a repository into a folder that appears when it is complete and its hashes are right.

    Args:
        repo_id (`str`): `org/name`.
        dest (`str` or `Path`): Folder to create; must not exist or be empty.
        revision (`str`, *optional*): Branch, tag or commit; main by default.
        token (`str`, *optional*): Token instead of the stored one.
        progress (`bool`): Show the client's byte bars on stderr.

    Returns:
        `Path`: `dest`.

    Raises:
        DSpineHubError: When `dest` is taken, a hash is wrong or the Hub refuses. In offline mode the local cache is
            the source, and must hold all of it.
    """
    dest = Path(dest)
    command = f"dspine-hub pull {repo_id} {dest}" + (f" --revision {revision}" if revision else "")
    check_repo_id(repo_id, command)
    check_free(dest, "dest")
    with readable(repo_id, command, token), hub_bars(progress), new_folder(dest) as work:
        _fetch(repo_id, work, revision, token)
    return dest


def fetch_weights(repo_id: str, revision: str | None = None, *, token: str | None = None) -> Path:
    """Download config, weights and receipts of a repository, and none of its code, into the Hub client's cache.

    Args:
        repo_id (`str`): `org/name`.
        revision (`str`, *optional*): Branch, tag or commit; main by default.
        token (`str`, *optional*): Token instead of the stored one.

    Returns:
        `Path`: The snapshot's folder, named after its commit.

    Raises:
        DSpineHubError: When the Hub refuses.
    """
    command = f"dspine-hub pull {repo_id} DEST" + (f" --revision {revision}" if revision else "")
    check_repo_id(repo_id, command)
    patterns = ["*.json", "*.safetensors", "card.toml"]
    with readable(repo_id, command, token), hub_bars(False):
        folder = snapshot_download(
            repo_id, revision=revision, endpoint=endpoint(), token=token, allow_patterns=patterns
        )
    return Path(folder)


def _fetch(repo_id: str, work: Path, revision: str | None, token: str | None):
    api, expected = client(token), {}
    if constants.HF_HUB_OFFLINE:
        snapshot = snapshot_download(repo_id, revision=revision, local_files_only=True)
        shutil.copytree(snapshot, work, dirs_exist_ok=True)
    else:
        commit = patiently(api.repo_info, repo_id, revision=revision or "main").sha
        expected = remote_files(api, repo_id, commit)
        # straight into the folder: through the cache it would take the space twice
        snapshot_download(repo_id, revision=commit, local_dir=work, endpoint=api.endpoint, token=token)
        shutil.rmtree(work / ".cache", ignore_errors=True)
    files = walk(work)
    digests = hash_files(files)
    problems = [f"`{name}` is missing" for name in sorted(set(expected) - set(files))]
    for name in sorted(set(expected) & set(files)):
        theirs = expected[name]
        # what is not in LFS is small
        ours = digests[name] if theirs.lfs else git_blob_id(files[name].read_bytes())
        if ours != (theirs.lfs.sha256 if theirs.lfs else theirs.blob_id):
            problems.append(f"`{name}` differs from what the Hub announced")
    problems += _provenance_problems(work, digests)
    if problems:
        raise DSpineHubError(
            f"`{repo_id}` must arrive as it was published, got: {'; '.join(problems)}. Nothing was kept; if a second "
            f"try says the same, tell its owner: `{client(token).endpoint}/{repo_id}/discussions`"
        )


def _provenance_problems(folder: Path, digests: dict[str, str]) -> list[str]:
    path = folder / "provenance.json"
    if not path.is_file():
        return []
    try:
        listed = dict(parse_json(path.read_bytes(), path.name)["files"])
    except (DSpineHubError, ValueError, KeyError, TypeError):
        return ["`provenance.json` cannot be read"]
    return [
        f"`{name}` differs from its hash in `provenance.json`" if name in digests else f"`{name}` is missing"
        for name, digest in sorted(listed.items())
        if name not in UNHASHED and digests.get(name) != digest
    ]


def fetch_snapshot(repo_id: str, revision: str | None, command: str, token: str | None = None) -> Path:
    """Download a whole repository into the Hub client's cache; `command` is what a remedy repeats."""
    check_repo_id(repo_id, command)
    with readable(repo_id, command, token), hub_bars(False):
        return Path(snapshot_download(repo_id, revision=revision or None, endpoint=endpoint(), token=token))
