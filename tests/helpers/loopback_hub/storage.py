"""What a Hub holds: repositories, and in them commits, files, branches, tags and pull requests."""

import hashlib
import json
import time
from dataclasses import dataclass

GIT_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


@dataclass(frozen=True)
class User:
    """Who a token belongs to and what it may do."""

    name: str
    role: str = "write"


def git_oid(data: bytes) -> str:
    """Return the id git gives a blob."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class Blob:
    """A file: its bytes when it is small, its sha256 when it lies in LFS."""

    size: int
    data: bytes | None = None
    sha256: str | None = None
    xet: str | None = None

    @property
    def pointer(self) -> bytes:
        """The file git keeps in place of a large one."""
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size}\n".encode()

    @property
    def oid(self) -> str:
        """The id of the git blob."""
        return git_oid(self.data if self.sha256 is None else self.pointer)

    @property
    def etag(self) -> str:
        """What the client compares with the content: sha256 in LFS, git's id otherwise."""
        return self.sha256 or self.oid

    def entry(self, path: str) -> dict:
        """Describe the file as the tree route does."""
        entry = {"type": "file", "path": path, "size": self.size, "oid": self.oid}
        if self.sha256 is not None:
            entry["lfs"] = {"oid": self.sha256, "size": self.size, "pointerSize": len(self.pointer)}
        if self.xet is not None:
            entry["xetHash"] = self.xet
        return entry


@dataclass(frozen=True)
class Commit:
    """One state of a repository."""

    oid: str
    parent: str | None
    tree: dict[str, Blob]
    title: str
    date: str


class Repository:
    """Branches, tags and pull requests over commits; a pull request is the branch `refs/pr/N`."""

    def __init__(self, name: str, private: bool = False):
        self.name, self.private = name, private
        self.commits: dict[str, Commit] = {}
        self.tags: dict[str, str] = {}
        self.pulls: dict[int, str] = {}
        first = self.commit(None, {".gitattributes": Blob(len(GIT_ATTRIBUTES), GIT_ATTRIBUTES)}, "initial commit")
        self.branches = {"main": first}

    @property
    def head(self) -> str:
        """The commit of main."""
        return self.branches["main"]

    def files(self, revision: str = "main") -> dict[str, Blob]:
        """Return path -> file of a revision."""
        return self.commits[self.resolve(revision)].tree

    def commit(self, parent: str | None, tree: dict[str, Blob], title: str) -> str:
        """Record a commit and return its id; no branch moves."""
        state = json.dumps([parent, title, time.time_ns(), {path: blob.oid for path, blob in sorted(tree.items())}])
        oid = hashlib.sha1(state.encode()).hexdigest()
        date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        self.commits[oid] = Commit(oid, parent, tree, title, date)
        return oid

    def resolve(self, revision: str) -> str | None:
        """Return the commit a branch, tag, pull request or commit id names."""
        named = self.branches.get(revision) or self.tags.get(revision)
        return named or (revision if revision in self.commits else None)

    def open_pull(self, oid: str, title: str) -> int:
        """Open a pull request at a commit."""
        number = len(self.pulls) + 1
        self.pulls[number] = title
        self.branches[f"refs/pr/{number}"] = oid
        return number
