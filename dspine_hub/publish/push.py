"""Publish a bundle: check it, plan against what the repository holds, then apply the plan as one commit.

Everything is checked and planned before anything is sent. Large files are stored before the commit names them, and the
tag comes last: killed anywhere, the repository is as it was or complete, and the same push run again does what is
left.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dspine_hub.errors import DSpineHubError
from dspine_hub.findings import Report
from dspine_hub.publish.bundle import Bundle, BundleFile, MemoryFile
from dspine_hub.publish.card_checks import check_bundle_card
from dspine_hub.publish.cards import PLACEHOLDER
from dspine_hub.publish.hub_client import (
    HubRepository,
    client,
    commit_files,
    hub_bars,
    look,
    patiently,
    remote_files,
    same_content,
    uses_xet,
    validate_card,
)
from dspine_hub.publish.hub_errors import check_repo_id, readable

# the Hub writes it itself
KEPT_REMOTELY = (".gitattributes",)
TAG = re.compile(r"[A-Za-z0-9][\w.+-]*")


@dataclass(frozen=True)
class FileEntry:
    """A file of a push and what becomes of it: `new`, `changed`, `unchanged` or `deleted`.

    `unsent` where a check failed or the Hub refused: then nothing would happen to it.
    """

    path: str
    size: int
    state: str


@dataclass(frozen=True)
class PushPlan:
    """What a push would do to a repository as it was seen.

    Args:
        head (`str`, *optional*): Commit the plan was made for; `None` where the repository does not exist.
        entries (`tuple[FileEntry]`): Every file of the bundle, then every file that would be deleted.
        tag (`str`, *optional*): Tag to set; `None` when there is none to set, or it is there already.
    """

    head: str | None
    entries: tuple[FileEntry, ...]
    tag: str | None = None

    def paths(self, *states: str) -> list[str]:
        """List the files in one of these states."""
        return [entry.path for entry in self.entries if entry.state in states]


@dataclass
class PushResult:
    """What a push did, or would do.

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
    report: Report
    card: str
    files: list[FileEntry] = field(default_factory=list)
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
    check: Callable[[Bundle], Report] | None = None,
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
        dry_run (`bool`): Check, ask the repository what it holds, and say what would happen to every file.
        token (`str`, *optional*): Token instead of the stored one.
        check (*optional*): `check(bundle) -> Report`; `dspine_hub.verify` by default.
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
    _check_tag(tag, pr, f"dspine-hub push {folder} {repo_id}")
    bundle = Bundle.read(folder)
    card, report = examine(bundle, repo_id, target, check)
    result = PushResult(repo_id, report, card, dry_run=dry_run)
    if not report.ok:
        if not dry_run:
            report.raise_for_errors(
                f"`{folder}` must pass every check, and nothing was sent",
                f"See everything with `{command} --dry-run`",
            )
        result.files = _unsent(bundle.files)
        return result
    # the folder keeps its placeholder: the same bundle may go to several repositories
    files = {**bundle.files, "README.md": MemoryFile("README.md", card.encode())}
    api = client(token)
    try:
        with readable(repo_id, command, token):
            validate_card(api, card, token)
            plan = make_plan(files, look(api, repo_id), repo_id, private, tag)
    except DSpineHubError as error:
        if not dry_run:
            raise
        report.add("error", "hub", str(error))
        result.files = _unsent(files)
        return result
    result.files = list(plan.entries)
    if dry_run:
        return result
    with readable(repo_id, command, token), hub_bars(progress is not None and uses_xet()):
        apply(plan, files, result, api, private=private, pr=pr, message=message, progress=progress)
        result.tag = tag
        if collection is not None:
            patiently(api.add_collection_item, collection, repo_id, "model", exists_ok=True)
    return result


def _unsent(files: dict[str, BundleFile]) -> list[FileEntry]:
    return [FileEntry(name, file.size, "unsent") for name, file in files.items()]


def _check_tag(tag: str | None, pr: bool, command: str) -> None:
    if tag is not None and pr:
        raise DSpineHubError(
            "`tag` and `pr` exclude each other, got both: a tag belongs on the merged commit. After the merge run "
            f"`{command} --tag {tag}`"
        )
    if tag is not None and (not TAG.fullmatch(tag) or tag == "main"):
        raise DSpineHubError(f"`tag` must be a name like `v1.0`, got {tag!r}.")


def examine(
    bundle: Bundle, repo_id: str, target: str | Path | None = None, check: Callable[[Bundle], Report] | None = None
) -> tuple[str, Report]:
    """Check all of a bundle that is to be published.

    Args:
        bundle ([`Bundle`]): The bundle.
        repo_id (`str`): What its card will call it.
        target (`str` or `Path`, *optional*), check (*optional*): As of [`push`].

    Returns:
        `tuple[str, Report]`: The card with the repository's name in it, and what was found.
    """
    report = Report()
    report.extend(bundle.refused)
    card = _card_of(bundle, repo_id, report)
    # costly checks of what is refused anyway would be in vain
    if report.ok:
        report.extend(_verify(bundle, target) if check is None else check(bundle))
    return card, report


def _verify(bundle: Bundle, target: str | Path | None) -> Report:
    # loads torch, which a plan for checked files does without
    from dspine_hub.publish.verify import verify_bundle

    return verify_bundle(bundle, target)


def _card_of(bundle: Bundle, repo_id: str, report: Report) -> str:
    """Read the card with the repository's name in it, and check it."""
    text = bundle.text("README.md")
    if text is None:
        report.add(
            "error", "card", f"`{bundle.folder}/README.md` must exist.", f"dspine-hub card {bundle.folder} --write"
        )
        return ""
    card = text.replace(PLACEHOLDER, repo_id)
    try:
        report.extend(check_bundle_card(bundle, card))
        _check_quantised(bundle, report)
    except DSpineHubError as error:
        report.add("error", "receipt", str(error))
    return card


def _check_quantised(bundle: Bundle, report: Report) -> None:
    """Ask for a result of the quantised weights themselves: nothing else shows that they still draft well."""
    if not (bundle.json("config.json") or {}).get("quantization_config"):
        return
    if all(receipt.drafter.weights_sha256 != bundle.weights_sha256 for receipt in bundle.receipts):
        message = (
            "`receipts` must hold a result measured with these quantised weights, got none: a quantised drafter stays "
            "lossless and may hardly be accepted."
        )
        report.add("error", "quantised", message, "measure the quantised bundle and put its receipt there")


def make_plan(
    files: dict[str, BundleFile],
    seen: HubRepository | None,
    repo_id: str,
    private: bool = False,
    tag: str | None = None,
) -> PushPlan:
    """Compare a bundle with a repository.

    Args:
        files (`dict[str, BundleFile]`): What to publish, by name.
        seen ([`HubRepository`], *optional*): What the repository holds; `None` where there is none.
        repo_id (`str`): Its name, for messages.
        private (`bool`), tag (`str`, *optional*): As of [`push`].

    Returns:
        [`PushPlan`].

    Raises:
        DSpineHubError: When it is public and must not be, or the tag names other files.
    """
    if seen is None:
        return PushPlan(None, tuple(FileEntry(name, file.size, "new") for name, file in files.items()), tag)
    if private and seen.private is False:
        raise DSpineHubError(
            f"`{repo_id}` exists and is public, so `private` cannot hold. Nothing was sent. Make it private first: "
            f"`hf repos settings {repo_id} --private`"
        )
    entries = [FileEntry(name, file.size, _state(file, seen)) for name, file in files.items()]
    stale = sorted(set(seen.files) - set(files) - set(KEPT_REMOTELY))
    plan = PushPlan(seen.head, (*entries, *(FileEntry(n, seen.files[n].size, "deleted") for n in stale)), tag)
    tagged = seen.tags.get(tag)
    if tagged is None:
        return plan
    if plan.paths("new", "changed", "deleted") or tagged != seen.head:
        raise DSpineHubError(
            f"`tag` must be new or name these files, got `{tag}` on commit {tagged[:12]} of `{repo_id}`. Nothing was "
            f"sent. Choose another, or remove it: `hf repos tag delete {repo_id} {tag}`"
        )
    return PushPlan(plan.head, plan.entries)


def _state(file: BundleFile, seen: HubRepository) -> str:
    theirs = seen.files.get(file.name)
    if theirs is None:
        return "new"
    return "unchanged" if same_content(file, theirs) else "changed"


def apply(
    plan: PushPlan,
    files: dict[str, BundleFile],
    result: PushResult,
    api,
    *,
    private: bool = False,
    pr: bool = False,
    message: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Bring the repository to a plan, on the very commit it was made for, recording in `result` what was committed.

    Args:
        plan ([`PushPlan`]): Of `files`.
        files (`dict[str, BundleFile]`): What to publish, by name.
        result ([`PushResult`]): Gains the commit and its address.
        api (`HfApi`): Client.
        private, pr, message, progress: As of [`push`].

    Raises:
        DSpineHubError: When the repository holds something else afterwards; it is not tagged then.
    """
    repo_id, head = result.repo_id, plan.head
    if head is None:
        head = _create(api, repo_id, private)
    result.commit, result.url = head, f"{api.endpoint}/{repo_id}/commit/{head}"
    changed, stale = plan.paths("new", "changed"), plan.paths("deleted")
    if changed or stale:
        title = message or "Publish with dspine-hub"
        commit = commit_files(api, repo_id, [files[name] for name in changed], stale, head, title, pr, progress)
        result.committed, result.commit, result.url = True, commit.oid, commit.commit_url
        result.pull_request = commit.pr_url
        _check_remote(remote_files(api, repo_id, commit.oid), files, repo_id, commit.oid)
    if plan.tag is not None:
        patiently(api.create_tag, repo_id, tag=plan.tag, revision=result.commit)


def _create(api, repo_id: str, private: bool) -> str:
    """Create the repository a plan found missing; returns its first commit."""
    # `None` leaves an organisation its own default
    patiently(api.create_repo, repo_id, private=private or None, exist_ok=True)
    made = look(api, repo_id)
    others = sorted(set(made.files) - set(KEPT_REMOTELY))
    if others:
        raise DSpineHubError(
            f"`{repo_id}` must be new, as it was a moment ago, got {others}: someone else created it meanwhile. "
            "Nothing was sent; run the same push again."
        )
    return made.head


def _check_remote(remote: dict, files: dict[str, BundleFile], repo_id: str, commit: str) -> None:
    """Compare the committed files with the local ones, by checksum and by name."""
    wrong = [name for name, file in files.items() if not same_content(file, remote.get(name))]
    wrong += sorted(set(remote) - set(files) - set(KEPT_REMOTELY))
    if wrong:
        raise DSpineHubError(
            f"`{repo_id}` must hold the files that were sent, got others at commit {commit[:12]}: {wrong}. It was not "
            "tagged; run the same push again."
        )
