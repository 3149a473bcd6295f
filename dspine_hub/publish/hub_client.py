"""Calls to a Hub: what a repository holds, uploads that report progress, checksums, patience."""

import contextlib
import importlib.util
import io
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
    get_session,
    hf_raise_for_status,
)

from dspine_hub._version import __version__
from dspine_hub.errors import DSpineHubError
from dspine_hub.publish.bundle import BundleFile
from dspine_hub.publish.hub_errors import retry_after

# the Hub refused these before doing anything, so asking again repeats nothing
BUSY = (429, 503)
ATTEMPTS = 4
WAIT_LIMIT_S = 300


class CountedAddition(CommitOperationAdd):
    """A file to add, whose hash is known, that reports how much of it was read for the upload.

    Args:
        file ([`BundleFile`]): What is kept in memory is sent from there; the rest is read anew, and only then.
        progress (*optional*): Called as `progress(path, sent, size)`.
    """

    def __init__(self, file: BundleFile, progress: Callable[[str, int, int], None] | None = None):
        super().__init__(file.name, file.data if file.is_kept else str(file.path))
        self.upload_info.sha256 = bytes.fromhex(file.sha256)
        self.progress = progress

    @contextlib.contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[io.BufferedIOBase]:
        if not with_tqdm or self.progress is None or isinstance(self.path_or_fileobj, bytes):
            with super().as_file() as file:
                yield file
            return
        with _CountedFile(self.path_or_fileobj) as file:
            size = self.upload_info.size
            file.on_read = lambda sent: self.progress(self.path_in_repo, min(sent, size), size)
            yield file


class _CountedFile(io.BufferedReader):
    """A file that reports its position after each read; a retry seeks back and is reported so."""

    def __init__(self, path: str):
        super().__init__(io.FileIO(path), 1 << 20)
        self.on_read = None

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.on_read is not None:
            self.on_read(self.tell())
        return data


def endpoint() -> str:
    """Return the Hub's address."""
    # the client reads it once, when it is imported
    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def client(token: str | None) -> HfApi:
    """Make a client that says who asks."""
    return HfApi(endpoint=endpoint(), token=token, library_name="dspine-hub", library_version=__version__)


def uses_xet() -> bool:
    """Tell whether large files travel by the Xet protocol."""
    return not constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet") is not None


@dataclass(frozen=True)
class HubRepository:
    """What a repository holds at one commit.

    Args:
        head (`str`): The commit.
        private (`bool`, *optional*): Whether it is private, where the Hub says.
        files (`dict[str, RepoFile]`): By path.
        tags (`dict[str, str]`): Tag -> commit.
    """

    head: str
    private: bool | None
    files: dict[str, RepoFile]
    tags: dict[str, str]


def look(api: HfApi, repo_id: str, revision: str = "main") -> HubRepository | None:
    """Ask what a repository holds; `None` when there is no such repository."""
    try:
        info = patiently(api.repo_info, repo_id, revision=revision)
    except RepositoryNotFoundError:
        return None
    refs = patiently(api.list_repo_refs, repo_id)
    tags = {ref.name: ref.target_commit for ref in refs.tags}
    return HubRepository(info.sha, info.private, remote_files(api, repo_id, info.sha), tags)


def remote_files(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    """List the files of a repository by their paths."""
    entries = patiently(lambda: list(api.list_repo_tree(repo_id, recursive=True, revision=revision)))
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def same_content(file: BundleFile, theirs: RepoFile | None) -> bool:
    """Tell whether the Hub holds this very file, by its checksum."""
    if theirs is None or theirs.size != file.size:
        return False
    return theirs.lfs.sha256 == file.sha256 if theirs.lfs is not None else theirs.blob_id == file.blob_id


def commit_files(
    api: HfApi,
    repo_id: str,
    files: list[BundleFile],
    deleted: list[str],
    parent: str,
    title: str,
    pr: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
):
    """Upload files, then change a repository in one commit on `parent`; returns the Hub's `CommitInfo`."""
    additions = [CountedAddition(file, progress) for file in files]
    if additions:
        # an ignore file of the repository must not leave files out of a release
        api.preupload_lfs_files(repo_id, additions, create_pr=pr, gitignore_content="", revision="main")
    return patiently(
        api.create_commit,
        repo_id,
        [*additions, *(CommitOperationDelete(name, is_folder=False) for name in deleted)],
        commit_message=title,
        parent_commit=parent,
        create_pr=pr,
    )


def validate_card(api: HfApi, card: str, token: str | None) -> None:
    """Ask the Hub for its own verdict on a card; `DSpineHubError` when it refuses."""

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


def patiently(call, *arguments, **keywords):
    """Repeat a call the Hub refused as busy; its client does so for uploads and reads, not for these calls."""
    for attempt in range(ATTEMPTS):
        try:
            return call(*arguments, **keywords)
        except HfHubHTTPError as error:
            if error.response.status_code not in BUSY or attempt == ATTEMPTS - 1:
                raise
            wait = retry_after(error)
            time.sleep(min(2**attempt if wait is None else wait, WAIT_LIMIT_S))
    raise AssertionError("unreachable")


@contextlib.contextmanager
def hub_bars(show: bool):
    """Show or hide the client's own progress bars."""
    hidden = are_progress_bars_disabled()
    # the user's own setting stands
    change = constants.HF_HUB_DISABLE_PROGRESS_BARS is None and hidden == show
    if change:
        (enable_progress_bars if show else disable_progress_bars)()
    try:
        yield
    finally:
        if change:
            (disable_progress_bars if show else enable_progress_bars)()
