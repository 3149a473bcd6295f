"""Publish a bundle, fetch it, compare two: the only module that writes to a Hub.

A push is one commit on the parent it was planned for. Files are checked before anything is sent, large ones are stored
before the commit names them, and the tag comes last: killed anywhere, the repository is as it was or complete, and the
same push run again does what is left.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import CommitOperationDelete, HfApi, constants, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from dspine_hub.errors import DSpineHubError
from dspine_hub.evaluation.receipts import load_receipts, weights_sha256
from dspine_hub.findings import Report
from dspine_hub.folders import check_free, new_folder
from dspine_hub.publish.bundle import PICKLES
from dspine_hub.publish.card_checks import check_folder
from dspine_hub.publish.cards import PLACEHOLDER
from dspine_hub.publish.compare import Difference, compare_folders, hash_files, read_flat, walk
from dspine_hub.publish.hub_client import (
    CountedAddition,
    blob_id,
    client,
    endpoint,
    hub_bars,
    is_same,
    patiently,
    remote_files,
    uses_xet,
)
from dspine_hub.publish.hub_errors import check_repo_id, readable

# the Hub writes the first itself; the second is where it looks for results
HIDDEN_ALLOWED = (".gitattributes", ".eval_results")
# the card is made anew after the hashes were taken, and the Hub may edit it
UNHASHED = ("README.md",)
TAG = re.compile(r"[A-Za-z0-9][\w.+-]*")


@dataclass(frozen=True)
class FileEntry:
    """A file of a push; `state` is `"new"`, `"changed"`, `"unchanged"`, `"deleted"`, or `"planned"` in a dry run."""

    path: str
    size: int
    state: str


@dataclass
class PushResult:
    """What a push did, or would send.

    Args:
        repo_id (`str`): The repository.
        files (`list[FileEntry]`): Every file of the folder, then every deleted file of the repository.
        report ([`Report`]): Findings of the checks.
        card (`str`): The `README.md` sent.
        dry_run (`bool`): Nothing was sent.
        committed (`bool`): A commit was made; `False` when the repository held all of it already.
        commit (`str`, *optional*): Commit that holds these files.
        url (`str`, *optional*): Where to look at it.
        pull_request (`str`, *optional*): Address of the pull request.
        tag (`str`, *optional*): Tag at the commit.
    """

    repo_id: str
    files: list[FileEntry]
    report: Report
    card: str
    dry_run: bool = False
    committed: bool = False
    commit: str | None = None
    url: str | None = None
    pull_request: str | None = None
    tag: str | None = None

    def as_dict(self) -> dict:
        """Return the fields for JSON."""
        fields = {name: value for name, value in vars(self).items() if name not in ("files", "report")}
        return {**fields, "files": [vars(entry) for entry in self.files], **self.report.as_dict()}


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    pr: bool = False,
    tag: str | None = None,
    message: str | None = None,
    collection: str | None = None,
    target: str | Path | None = None,
    dry_run: bool = False,
    token: str | None = None,
    check: Callable[[Path], Report] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> PushResult:
    """Publish a bundle folder as exactly one commit.

    Args:
        folder (`str` or `Path`): The bundle; a snapshot of the Hub's cache, made of links, will do.
        repo_id (`str`): `org/name`; created when it does not exist.
        private (`bool`): Create it private; refused when it exists and is public.
        pr (`bool`): Open a pull request instead of committing to main.
        tag (`str`, *optional*): Tag of the commit. One that exists elsewhere is refused before any upload.
        message (`str`, *optional*): Title of the commit.
        collection (`str`, *optional*): Slug of a collection to put the repository into, `org/name-id`.
        target (`str` or `Path`, *optional*): Target the pair and its acceptance are checked with.
        dry_run (`bool`): Check and list, send nothing.
        token (`str`, *optional*): Token instead of the stored one.
        check (*optional*): `check(folder) -> Report`; `dspine_hub.publish.verify.verify` by default.
        progress (*optional*): Called as `progress(path, sent, size)`, in bytes, from the uploading threads.

    Returns:
        [`PushResult`]. A dry run returns errors in its report instead of raising.

    Raises:
        DSpineHubError: When a check fails (nothing is sent then) or the Hub refuses; the message ends with a remedy.
    """
    folder = Path(folder)
    command = f"dspine-hub push {folder} {repo_id}" + (f" --tag {tag}" if tag else "") + (" --pr" if pr else "")
    command += f" --target {target}" if target is not None else ""
    check_repo_id(repo_id, command)
    if tag is not None and pr:
        raise DSpineHubError(
            "`tag` and `pr` exclude each other, got both: a tag belongs on the merged commit. After the merge run "
            f"`dspine-hub push {folder} {repo_id} --tag {tag}`"
        )
    if tag is not None and (not TAG.fullmatch(tag) or tag == "main"):
        raise DSpineHubError(f"`tag` must be a name like `v1.0`, got {tag!r}.")
    if not folder.is_dir():
        raise DSpineHubError(f"`folder` must name a bundle folder, got `{folder}`. Run `dspine-hub bundle`")
    files, report = list_files(folder)
    card = _card_of(folder, repo_id, report)
    if report.ok:
        report.extend(_verify(folder, target) if check is None else check(folder))
    planned = [FileEntry(name, path.stat().st_size, "planned") for name, path in files.items()]
    result = PushResult(repo_id, planned, report, card, dry_run)
    if dry_run:
        return result
    if not report.ok:
        errors = "\n".join(line for line in report.lines() if line.startswith("error"))
        raise DSpineHubError(
            f"`{folder}` must pass every check, and nothing was sent:\n{errors}\nSee everything with "
            f"`{command} --dry-run`"
        )
    with (
        tempfile.TemporaryDirectory() as scratch,
        readable(repo_id, command, token),
        hub_bars(progress is not None and uses_xet()),
    ):
        # the folder keeps its placeholder: the same bundle may go to several repositories
        files["README.md"] = Path(scratch) / "README.md"
        files["README.md"].write_text(card, encoding="utf-8")
        _send(result, files, private, pr, tag, message, token, progress)
        if collection is not None:
            patiently(client(token).add_collection_item, collection, repo_id, "model", exists_ok=True)
    return result


def _card_of(folder: Path, repo_id: str, report: Report) -> str:
    """Read the card with the repository's name in it, and check it."""
    path = folder / "README.md"
    if not path.is_file():
        report.add("error", "card", f"`{path}` must exist.", f"dspine-hub card {folder} --write")
        return ""
    card = path.read_text(encoding="utf-8", errors="replace").replace(PLACEHOLDER, repo_id)
    try:
        report.extend(check_folder(folder, card))
    except DSpineHubError as error:
        report.add("error", "receipt", str(error))
        return card
    _check_quantised(folder, report)
    return card


def _check_quantised(folder: Path, report: Report) -> None:
    """Ask for a result of the quantised weights themselves: nothing else shows that they still draft well."""
    config = read_flat(folder / "config.json" if (folder / "config.json").is_file() else None)
    if "quantization_config.quant_method" not in config:
        return
    weights = weights_sha256(folder)
    if all(receipt.drafter.weights_sha256 != weights for receipt in load_receipts(folder / "receipts")):
        message = (
            "`receipts` must hold a result measured with these quantised weights, got none: a quantised drafter stays "
            "lossless and may hardly be accepted."
        )
        report.add("error", "quantised", message, "measure the quantised bundle and put its receipt there")


def _verify(folder: Path, target: str | Path | None) -> Report:
    from dspine_hub.publish.verify import verify

    return verify(folder, target)


def _send(result, files, private, pr, tag, message, token, progress):
    """Bring the repository to `files`, recording in `result` what was done."""
    api, repo_id = client(token), result.repo_id
    _check_card_remotely(api, result.card, token)
    try:
        info = patiently(api.repo_info, repo_id, revision="main")
    except RepositoryNotFoundError:
        # `None` leaves an organisation its own default
        patiently(api.create_repo, repo_id, private=private or None, exist_ok=True)
        info = patiently(api.repo_info, repo_id, revision="main")
    if private and info.private is False:
        raise DSpineHubError(
            f"`{repo_id}` exists and is public, so `private` cannot hold. Nothing was sent. Make it private first: "
            f"`hf repos settings {repo_id} --private`"
        )
    head = info.sha
    remote = remote_files(api, repo_id, head)
    additions = [CountedAddition(name, str(path), progress) for name, path in files.items()]
    with ThreadPoolExecutor(max_workers=4) as threads:
        same = list(threads.map(lambda addition: is_same(addition, remote.get(addition.path_in_repo)), additions))
    changed = [addition for addition, equal in zip(additions, same, strict=True) if not equal]
    stale = sorted(set(remote) - set(files) - {".gitattributes"})
    result.files = _states(additions, changed, remote) + [FileEntry(n, remote[n].size, "deleted") for n in stale]
    refs = patiently(api.list_repo_refs, repo_id)
    tagged = {ref.name: ref.target_commit for ref in refs.tags}.get(tag)
    if tagged is not None and (changed or stale or tagged != head):
        raise DSpineHubError(
            f"`tag` must be new or name these files, got `{tag}` on commit {tagged[:12]} of `{repo_id}`. Nothing was "
            f"sent. Choose another, or remove it: `hf repos tag delete {repo_id} {tag}`"
        )
    result.commit, result.url = head, f"{api.endpoint}/{repo_id}/commit/{head}"
    if changed or stale:
        if changed:
            # an ignore file of the repository must not leave files out of a release
            api.preupload_lfs_files(repo_id, changed, create_pr=pr, gitignore_content="", revision="main")
        commit = patiently(
            api.create_commit,
            repo_id,
            [*changed, *(CommitOperationDelete(name, is_folder=False) for name in stale)],
            commit_message=message or "Publish with dspine-hub",
            parent_commit=head,
            create_pr=pr,
        )
        result.committed, result.commit, result.url = True, commit.oid, commit.commit_url
        result.pull_request = commit.pr_url
        _check_remote(remote_files(api, repo_id, commit.oid), additions, repo_id, commit.oid)
    if tag is not None and tagged is None:
        patiently(api.create_tag, repo_id, tag=tag, revision=result.commit)
    result.tag = tag


def _states(additions, changed, remote) -> list[FileEntry]:
    names = {addition.path_in_repo for addition in changed}
    entries = []
    for addition in additions:
        name = addition.path_in_repo
        state = "unchanged" if name not in names else "changed" if name in remote else "new"
        entries.append(FileEntry(name, addition.upload_info.size, state))
    return entries


def _check_remote(remote: dict[str, RepoFile], additions: list, repo_id: str, commit: str):
    """Compare the committed files with the local ones, by checksum and by name."""
    names = {addition.path_in_repo for addition in additions}
    wrong = [a.path_in_repo for a in additions if not is_same(a, remote.get(a.path_in_repo))]
    wrong += sorted(set(remote) - names - {".gitattributes"})
    if wrong:
        raise DSpineHubError(
            f"`{repo_id}` must hold the files that were sent, got others at commit {commit[:12]}: {wrong}. It was not "
            "tagged; run the same push again."
        )


def list_files(folder: Path) -> tuple[dict[str, Path], Report]:
    """List what a push sends: name in the repository -> file, links resolved, and what must not be sent.

    Args:
        folder (`Path`): The bundle.

    Returns:
        `tuple[dict[str, Path], Report]`.
    """
    folder = folder.resolve()
    roots = [folder]
    # in the Hub's cache a snapshot is a folder of links into one of two neighbours
    if folder.parent.name == "snapshots":
        roots += [folder.parents[1] / "blobs", folder.parents[2] / "blobs"]
    files, report, folded = {}, Report(), {}
    for place, folders, names in os.walk(folder):
        linked = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in sorted(names + linked):
            path = Path(place) / name
            relative = path.relative_to(folder).as_posix()
            if problem := _refusal(relative, path, roots):
                report.add("error", *problem)
                continue
            twin = folded.setdefault(relative.casefold(), relative)
            if twin != relative:
                text = f"`{relative}` and `{twin}` must differ in more than case: some systems keep only one."
                report.add("error", "name-case", text, "rename one")
            files[relative] = path.resolve()
    return dict(sorted(files.items())), report


def _refusal(name: str, path: Path, roots: list[Path]) -> tuple[str, str, str] | None:
    """Return rule, message and remedy when a file must not be published."""
    parts = PurePosixPath(name).parts
    if "\\" in name or any(ord(letter) < 32 for letter in name):
        return "name", f"{name!r} must not hold backslashes or control characters.", "rename it"
    if any(part.startswith(".") for part in parts) and parts[0] not in HIDDEN_ALLOWED:
        return "hidden-file", f"`{name}` is hidden and must not be published.", f"rm -r {path}"
    if "__pycache__" in parts:
        return "cache-file", f"`{name}` is a by-product and must not be published.", f"rm -r {path.parent}"
    if name.lower().endswith(PICKLES):
        return "pickle", f"`{name}` must not be published: loading a pickle runs its code.", "store safetensors"
    if path.is_symlink():
        target = path.resolve()
        if not target.is_file():
            return "link", f"`{name}` must point to a file, got `{target}`.", f"rm {path}"
        if not any(target.is_relative_to(root) for root in roots):
            text = f"`{name}` must not point out of the folder, got `{target}`."
            return "link", text, "copy the folder with cp -rL"
    elif not path.is_file():
        return "special-file", f"`{name}` must be a regular file.", f"rm {path}"
    return None


def _check_card_remotely(api: HfApi, card: str, token: str | None):
    """Ask the Hub for its own verdict on the card, before the repository exists."""

    def ask():
        body = {"content": card, "repoType": "model"}
        address = f"{api.endpoint}/api/validate-yaml"
        response = get_session().post(address, json=body, headers=build_hf_headers(token=token))
        # a self-hosted Hub may not offer the check
        if response.status_code != 404:
            hf_raise_for_status(response)
            return response.json()
        return {}

    problems = [error.get("message") for error in patiently(ask).get("errors", [])]
    if problems:
        raise DSpineHubError(
            f"`README.md` must satisfy the Hub, and nothing was sent: {'; '.join(map(str, problems))}. Edit its "
            "metadata, or write it anew: `dspine-hub card`"
        )


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
        ours = digests[name] if theirs.lfs else blob_id(files[name].read_bytes())
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
        listed = dict(json.loads(path.read_text(encoding="utf-8"))["files"])
    except (ValueError, KeyError, TypeError):
        return ["`provenance.json` cannot be read"]
    return [
        f"`{name}` differs from its hash in `provenance.json`" if name in digests else f"`{name}` is missing"
        for name, digest in sorted(listed.items())
        if name not in UNHASHED and digests.get(name) != digest
    ]


def diff(a: str | Path, b: str | Path, *, token: str | None = None) -> Difference:
    """Compare config, tensors, receipts and files of two bundles.

    Args:
        a (`str` or `Path`): A folder, or `org/name`, or `org/name@revision`.
        b (`str` or `Path`): The other.
        token (`str`, *optional*): Token instead of the stored one.

    Returns:
        [`Difference`].

    Raises:
        DSpineHubError: When one cannot be read.
    """
    return compare_folders(*(_local(side, token, f"dspine-hub diff {a} {b}") for side in (a, b)))


def _local(side: str | Path, token: str | None, command: str) -> Path:
    if Path(side).is_dir():
        return Path(side).resolve()
    repo_id, _, revision = str(side).partition("@")
    check_repo_id(repo_id, command)
    with readable(repo_id, command, token), hub_bars(False):
        return Path(snapshot_download(repo_id, revision=revision or None, endpoint=endpoint(), token=token))
