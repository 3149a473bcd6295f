"""What a Hub's client raises, turned into one message: what it means, and the command that helps."""

import contextlib
import errno
import os
import re
import traceback
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from dspine_hub.checkpoints.sources import is_repo_id
from dspine_hub.errors import DSpineHubError

# what went wrong -> what it means, the command that helps; one line for each
REMEDIES = {
    400: ("the Hub refused the request as malformed", "{command} --dry-run"),
    401: ("the Hub does not accept this token, or there is none", "hf auth login"),
    403: ("this token may not do that: use one with the write role, or propose the change", "{propose}"),
    404: ("no such repository or revision, or it is private and this token may not see it", "hf auth whoami"),
    409: ("the Hub has something else under this name, or is busy with it", "hf repos tag list {repo_id}"),
    412: ("someone else committed meanwhile; nothing of this run was published. Run it again", "{command}"),
    413: ("a file or request is larger than this Hub accepts. Write smaller shards, then run", "{command}"),
    429: ("the Hub limits the rate of requests. Wait {retry_after}, then run", "{command}"),
    503: ("the Hub is unavailable. Nothing half-done is visible there; later run", "{command}"),
    "namespace": ("this token may not create repositories under that name", "hf auth whoami"),
    "connection": ("the connection failed. What was uploaded is kept; run", "{command}"),
    "disk-full": ("the disk is full: free space in the destination, or keep the cache elsewhere", "{elsewhere}"),
    "gated": ("its owner must grant access first; ask on its page, then run", "{command}"),
    "not-cached": ("it is not complete in the local cache, and offline mode forbids a download", "{online}"),
    "offline": ("offline mode forbids asking the Hub", "{online}"),
    "repo-id": ("a repository is named like `org/name`, of letters, digits, `-`, `_` and `.`", "{command}"),
    "no-xet": ("this Hub offers no xet storage (404 on the xet token). Use plain LFS", "{no_xet}"),
    "xet": ("the xet client failed. Use plain LFS", "{no_xet}"),
}
SAME_AS_503 = (500, 502, 504)


def check_repo_id(repo_id: str, command: str) -> None:
    """Raise `DSpineHubError` unless a repository can have this name."""
    if not is_repo_id(repo_id):
        raise explain("repo-id", repo_id, command.replace(repo_id, "org/name"))


@contextlib.contextmanager
def readable(repo_id: str, command: str, token: str | None):
    """Turn what the Hub's client raises into one message that ends with a remedy and shows no token."""
    try:
        yield
    except DSpineHubError:
        raise
    except Exception as error:
        kind, cause = _classify(error)
        if kind is None:
            raise
        detail = f"{cause}".strip().splitlines()
        message = explain(kind, repo_id, command, cause, detail[0] if detail else type(cause).__name__)
        raise DSpineHubError(_without_tokens(str(message), token)) from None


def _classify(error: Exception) -> tuple[int | str | None, Exception]:
    """Return the row of `REMEDIES` for an error or for what caused it, and that cause."""
    chain, seen = [], error
    while seen is not None and seen not in chain:
        chain.append(seen)
        seen = seen.__cause__
    # the client wraps: what the Hub answered says more than what was made of it
    for cause in chain:
        if isinstance(cause, OfflineModeIsEnabled):
            offline = isinstance(chain[0], LocalEntryNotFoundError)
            return ("not-cached" if offline else "offline"), cause
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            return _kind_of_answer(cause), cause
    for cause in chain:
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return "disk-full", cause
        if isinstance(cause, LocalEntryNotFoundError):
            return ("not-cached" if constants.HF_HUB_OFFLINE else "connection"), cause
        if isinstance(cause, HFValidationError):
            return "repo-id", cause
        if isinstance(cause, OSError | RuntimeError) and _is_from_xet(cause):
            return _kind_of_xet_error(str(cause)), cause
        if isinstance(cause, HTTPError | ConnectionError | TimeoutError):
            return "connection", cause
    return None, error


def _is_from_xet(error: Exception) -> bool:
    """Tell whether the xet client raised this: it uses plain built-in errors, so the place says more than the text."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = [f"{code.co_name} {Path(code.co_filename).name}" for code in frames]
    return "xet" in " ".join([*places, type(error).__module__, str(error)]).lower()


def _kind_of_answer(error: HfHubHTTPError) -> int | str | None:
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        return "gated"
    if status == 404 and "/xet-write-token/" in str(error.response.url):
        return "no-xet"
    if status == 403 and str(error.response.url).endswith("/api/repos/create"):
        return "namespace"
    # the Hub answers 401 for what does not exist, whoever asks
    if isinstance(error, RepositoryNotFoundError) and "authorization" in error.response.request.headers:
        return 404
    status = 503 if status in SAME_AS_503 else status
    return status if status in REMEDIES else None


def _kind_of_xet_error(text: str) -> int | str:
    # its own client keeps the Hub's answer only as text
    match = re.search(r"HTTP status (?:client|server) error \((\d{3})", text)
    status = int(match[1]) if match else None
    if status == 404:
        return "no-xet"
    return status if status in REMEDIES else "xet"


def explain(kind, repo_id: str, command: str, cause: Exception | None = None, detail: str = "") -> DSpineHubError:
    """Return the error of a row of `REMEDIES`, its remedy written out for `command`."""
    meaning, remedy = REMEDIES[kind]
    wait = retry_after(cause) if kind == 429 else None
    words = {
        "repo_id": repo_id,
        "command": command,
        "propose": f"{command} --pr" if " push " in command and "--pr" not in command else "hf auth login",
        "online": f"HF_HUB_OFFLINE=0 {command}",
        "no_xet": f"HF_HUB_DISABLE_XET=1 {command}",
        "elsewhere": f"HF_HOME=/other/disk {command}",
        "retry_after": "a few minutes" if wait is None else f"{wait:.0f} s",
    }
    said = f"{detail.rstrip('.')}. " if detail else ""
    meaning = meaning.format(**words)
    return DSpineHubError(f"`{repo_id}`: {said}{meaning[0].upper()}{meaning[1:]}: `{remedy.format(**words)}`")


def _without_tokens(text: str, token: str | None) -> str:
    for secret in filter(None, (token, os.environ.get("HF_TOKEN"), os.environ.get("HUGGING_FACE_HUB_TOKEN"))):
        text = text.replace(secret, "***")
    return re.sub(r"\bhf_[A-Za-z0-9]{6,}", "***", text)


def retry_after(error: HfHubHTTPError) -> float | None:
    """Return the seconds a busy Hub asked to wait, if it said."""
    value = error.response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else None
