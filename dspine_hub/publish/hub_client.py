"""Calls to a Hub: its client, uploads that report progress, checksums, patience."""

import contextlib
import hashlib
import importlib.util
import io
import os
import time
from collections.abc import Callable, Iterator

from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from dspine_hub._version import __version__
from dspine_hub.publish.hub_errors import retry_after

# the Hub refused these before doing anything, so asking again repeats nothing
BUSY = (429, 503)
ATTEMPTS = 4
WAIT_LIMIT_S = 300


class CountedAddition(CommitOperationAdd):
    """A file to add that reports how much of it was read for the upload."""

    def __init__(self, path_in_repo: str, path: str, progress: Callable[[str, int, int], None] | None):
        super().__init__(path_in_repo, path)
        self.progress = progress

    @contextlib.contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[io.BufferedIOBase]:
        if not with_tqdm or self.progress is None:
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


def remote_files(api: HfApi, repo_id: str, revision: str) -> dict[str, RepoFile]:
    """List the files of a repository by their paths."""
    entries = patiently(lambda: list(api.list_repo_tree(repo_id, recursive=True, revision=revision)))
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def blob_id(data: bytes) -> str:
    """Return the name git gives a file of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_same(addition: CommitOperationAdd, theirs: RepoFile | None) -> bool:
    """Tell whether the Hub holds this very file, by its checksum."""
    if theirs is None or theirs.size != addition.upload_info.size:
        return False
    if theirs.lfs is not None:
        return theirs.lfs.sha256 == addition.upload_info.sha256.hex()
    # an upload frees its source, and only large files are uploaded
    with addition.as_file() as file:
        return theirs.blob_id == blob_id(file.read())


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
