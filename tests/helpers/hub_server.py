"""The Hub on loopback: model repositories over the routes that `huggingface_hub` and `transformers` use.

Commits, tags, branches, pull requests, LFS in one or several parts, private repositories, tokens with a role, and xet
through the on-disk store of `hf_xet`. Any route can be made to fail a number of times, and every request is recorded.
Repositories live in memory, large objects in a folder; only 127.0.0.1 is served.

Usage: `python tests/helpers/hub_server.py PORT FOLDER`, or `with HubServer(folder) as hub:`.
"""

import base64
import fnmatch
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.parse
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BLOCK = 1 << 20
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
LFS_FROM_BYTES = 10_000_000
GIT_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


@dataclass(frozen=True)
class User:
    """Who a token belongs to and what it may do."""

    name: str
    role: str = "write"


USERS = {
    "hf_owner": User("org"),
    "hf_reader": User("org", "read"),
    "hf_stranger": User("someone"),
}


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


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose method and path match.

    Args:
        method (`str`): HTTP method.
        pattern (`str`): Regular expression searched in the path.
        status (`int`, *optional*): Answer this instead of serving the request.
        headers (`dict`): Headers of that answer.
        message (`str`): Text of that answer.
        drop_after (`int`, *optional*): Read so many bytes of the body, then close the connection.
        delay (`float`): Seconds to wait before the request is served.
        mute (`bool`): Serve the request, then close the connection instead of answering.
        hold (`bool`): Set `reached`, wait for `release`, then close the connection; the request is never served.
        times (`int`): How many requests it hits.
    """

    method: str
    pattern: str
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "injected"
    drop_after: int | None = None
    delay: float = 0.0
    mute: bool = False
    hold: bool = False
    times: int = 1
    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


@dataclass
class Request:
    """A request as it was answered; `status` is `None` while it runs and after a dropped connection."""

    method: str
    path: str
    token: str | None
    status: int | None = None
    received: int = 0


class HubServer:
    """A running Hub.

    Args:
        folder (`str` or `Path`): Where large objects are kept.
        port (`int`): 0 takes a free one.
        xet (`bool`): Offer xet; without it the token route answers 404, as self-hosted Hubs do.
        part_size (`int`, *optional*): Ask for LFS objects above this size in parts.
        page_size (`int`): Entries of a tree answered at once.
        users (`dict`): token -> [`User`].
    """

    def __init__(self, folder, port=0, *, xet=False, part_size=None, page_size=1000, users=USERS):
        self.folder = Path(folder).resolve()
        (self.folder / "objects").mkdir(parents=True, exist_ok=True)
        self.xet, self.part_size, self.page_size, self.users = xet, part_size, page_size, dict(users)
        self.repositories: dict[str, Repository] = {}
        # slug -> repositories in it
        self.collections: dict[str, list[str]] = {}
        self.requests: list[Request] = []
        self.lock = threading.RLock()
        self._faults: list[Fault] = []
        handler = type("Handler", (_Handler,), {"hub": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *exception):
        for fault in self._faults:
            fault.release.set()
        self._http.shutdown()
        self._http.server_close()

    def serve_forever(self):
        """Serve in this thread."""
        self._http.serve_forever()

    def fault(self, method: str, pattern: str, **fields) -> Fault:
        """Make matching requests fail; see [`Fault`]."""
        fault = Fault(method, pattern, **fields)
        with self.lock:
            self._faults.append(fault)
        return fault

    def take_fault(self, method: str, path: str) -> Fault | None:
        """Return the fault that hits a request, counting it."""
        with self.lock:
            for fault in self._faults:
                if fault.times and fault.method == method and re.search(fault.pattern, path):
                    fault.times -= 1
                    return fault
        return None

    def seen(self, method: str = "", pattern: str = "") -> list[Request]:
        """Return the recorded requests that match."""
        return [r for r in self.requests if r.method.startswith(method) and re.search(pattern, r.path)]

    def object(self, sha256: str) -> Path:
        """Return where an LFS object lies."""
        return self.folder / "objects" / sha256


class _Answer(Exception):
    """Ends a request with an error status."""

    def __init__(self, status: int, message: str, code: str | None = None):
        self.status, self.message, self.code = status, message, code


REPOSITORY = r"(?P<repo>[\w.-]+/[\w.-]+)"
API = rf"/api/models/{REPOSITORY}"
SHA256 = r"(?P<sha>[0-9a-f]{64})"
# method, path, name of the handler's method; the first match serves
ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/validate-yaml", "validate_card"),
    ("POST", r"/api/collections/(?P<slug>[\w.-]+/[\w.-]+)/items", "add_to_collection"),
    ("GET", r"/api/collections/(?P<slug>[\w.-]+/[\w.-]+)", "collection"),
    ("POST", r"/api/repos/create", "create_repository"),
    ("DELETE", r"/api/repos/delete", "delete_repository"),
    ("POST", rf"/{REPOSITORY}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("POST", rf"/{REPOSITORY}\.git/info/lfs/objects/verify", "lfs_verify"),
    ("PUT", rf"/objects/{SHA256}(?:/(?P<part>\d+))?", "lfs_put"),
    ("POST", rf"/objects/{SHA256}", "lfs_complete"),
    ("GET", rf"{API}/xet-(?P<kind>read|write)-token/(?P<rev>[^/]+)", "xet_token"),
    ("POST", rf"{API}/preupload/(?P<rev>[^/]+)", "preupload"),
    ("POST", rf"{API}/commit/(?P<rev>[^/]+)", "commit"),
    ("GET", rf"{API}/commits/(?P<rev>[^/]+)", "commits"),
    ("GET", rf"{API}/tree/(?P<rev>[^/]+)/?(?P<path>.*)", "tree"),
    ("POST", rf"{API}/paths-info/(?P<rev>[^/]+)", "paths_info"),
    ("GET", rf"{API}/refs", "refs"),
    ("POST", rf"{API}/tag/(?P<rev>[^/]+)", "create_tag"),
    ("DELETE", rf"{API}/tag/(?P<rev>[^/]+)", "delete_tag"),
    ("POST", rf"{API}/branch/(?P<rev>[^/]+)", "create_branch"),
    ("POST", rf"{API}/discussions/(?P<number>\d+)/merge", "merge_pull"),
    ("GET", rf"{API}/auth-check", "auth_check"),
    ("GET", rf"{API}(?:/revision/(?P<rev>[^/]+))?", "info"),
    ("GET", rf"/{REPOSITORY}/resolve/(?P<rev>[^/]+)/(?P<path>.+)", "resolve"),
]
ROUTES = [(method, re.compile(pattern), name) for method, pattern, name in ROUTES]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    # headers and body leave in two writes; waiting to join them costs 40 ms a request
    disable_nagle_algorithm = True

    def log_message(self, *arguments):
        pass

    def serve(self):
        split = urllib.parse.urlsplit(self.path)
        self.query = urllib.parse.parse_qs(split.query)
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.request_record = Request(self.command, self.path, self.token)
        self.pieces = self._read_pieces()
        self.hub.requests.append(self.request_record)
        self.mute = False
        fault = self.hub.take_fault(self.command, self.path)
        try:
            if fault is not None and self._suffer(fault):
                return
            self._dispatch(split.path)
        except _Answer as answer:
            self._drain()
            headers = {"X-Error-Message": answer.message}
            if answer.code:
                headers["X-Error-Code"] = answer.code
            self._send(answer.status, {"error": answer.message}, headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = serve

    def _suffer(self, fault: Fault) -> bool:
        """Apply a fault; `True` when the request ends with it."""
        if fault.drop_after is not None:
            while self.request_record.received < fault.drop_after and next(self.pieces, None):
                pass
            self.close_connection = True
            return True
        if fault.delay:
            time.sleep(fault.delay)
        self.mute = fault.mute
        if fault.hold:
            self._drain()
            fault.reached.set()
            fault.release.wait()
            self.close_connection = True
            return True
        if fault.status is not None:
            self._drain()
            self._send(fault.status, {"error": fault.message}, {"X-Error-Message": fault.message, **fault.headers})
            return True
        return False

    def _dispatch(self, path: str):
        method = "GET" if self.command == "HEAD" else self.command
        served = ((name, pattern.fullmatch(path)) for verb, pattern, name in ROUTES if verb == method)
        name, match = next((found for found in served if found[1]), (None, None))
        if match is None:
            raise _Answer(404, f"no route {self.command} {path}")
        values = {key: urllib.parse.unquote(value) for key, value in match.groupdict().items() if value}
        # an upload or download may take long and touches no repository's state
        if name in ("lfs_put", "resolve"):
            getattr(self, name)(**values)
        else:
            body = b"".join(self.pieces)
            with self.hub.lock:
                getattr(self, name)(body, **values)

    # the wire

    def _read_pieces(self):
        """Yield the body in pieces, whatever way it was framed."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while True:
                line = self.rfile.readline()
                size = int(line.split(b";")[0] or b"0", 16)
                piece = self.rfile.read(size)
                if not self.rfile.readline() or not line:
                    raise ConnectionResetError("the client left in the middle of a body")
                if not size:
                    return
                yield self._count(piece)
        left = int(self.headers.get("Content-Length") or 0)
        while left:
            piece = self.rfile.read(min(left, BLOCK))
            if not piece:
                raise ConnectionResetError("the client left in the middle of a body")
            left -= len(piece)
            yield self._count(piece)

    def _count(self, piece: bytes) -> bytes:
        self.request_record.received += len(piece)
        return piece

    def _drain(self):
        for _ in self.pieces:
            pass

    def _send(self, status: int, value=None, headers=None, data: bytes | None = None):
        if self.mute:
            self.close_connection = True
            return
        self.request_record.status = status
        data = data if data is not None else (b"" if value is None else json.dumps(value).encode())
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        self.send_response(status)
        for name, content in headers.items():
            self.send_header(name, content)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # who may do what

    def _user(self) -> User | None:
        if self.token is not None and self.token not in self.hub.users:
            raise _Answer(401, "Invalid credentials in Authorization header")
        return self.hub.users.get(self.token)

    def _repository(self, name: str, write: bool = False) -> Repository:
        user, repository = self._user(), self.hub.repositories.get(name)
        owner = user is not None and user.name == name.split("/")[0]
        if repository is None or (repository.private and not owner):
            raise _Answer(404 if user else 401, "Repository not found", "RepoNotFound")
        if write:
            self._may_write(name)
        return repository

    def _may_write(self, name: str):
        user = self._user()
        if user is None:
            raise _Answer(401, "Invalid credentials in Authorization header")
        # whoever can read may propose
        if "create_pr" in self.query:
            return
        if user.role != "write" or user.name != name.split("/")[0]:
            raise _Answer(403, f"You don't have the rights to write to {name}")

    def _commit_of(self, repository: Repository, revision: str) -> Commit:
        oid = repository.resolve(revision)
        if oid is None:
            raise _Answer(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repository.commits[oid]

    # accounts and repositories

    def whoami(self, body):
        user = self._user()
        if user is None:
            raise _Answer(401, "Invalid credentials in Authorization header")
        access = {"role": user.role, "displayName": "test"}
        self._send(
            200,
            {
                "type": "user",
                "name": user.name,
                "orgs": [],
                "auth": {"type": "access_token", "accessToken": access},
            },
        )

    def validate_card(self, body):
        content = json.loads(body)["content"]
        match = re.match(r"---\n(.*?)\n---", content, re.DOTALL)
        errors = []
        for key, value in re.findall(r"^(base_model|datasets): *(\S+)$", match[1] if match else "", re.MULTILINE):
            if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", value.strip("\"'")):
                errors.append({"message": f'"{key}" with value "{value}" is not valid. Use a model id from the Hub.'})
        self._send(200, {"errors": errors, "warnings": []})

    def create_repository(self, body):
        fields = json.loads(body)
        user = self._user()
        name = f"{fields.get('organization') or (user.name if user else '')}/{fields['name']}"
        self._may_write(name)
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repositories:
            return self._send(409, {"error": "You already created this model repo", "url": url})
        self.hub.repositories[name] = Repository(name, fields.get("visibility") == "private")
        return self._send(200, {"url": url, "name": name, "id": name})

    def delete_repository(self, body):
        fields = json.loads(body)
        name = f"{fields['organization']}/{fields['name']}"
        self._repository(name, write=True)
        del self.hub.repositories[name]
        self._send(200, {})

    def auth_check(self, body, repo):
        self._repository(repo)
        self._send(200, {})

    # reading

    def info(self, body, repo, rev="main"):
        repository = self._repository(repo)
        commit = self._commit_of(repository, rev)
        fields = {
            "_id": repo,
            "id": repo,
            "modelId": repo,
            "author": repo.split("/")[0],
            "sha": commit.oid,
            "private": repository.private,
            "disabled": False,
            "gated": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "lastModified": commit.date,
            "createdAt": commit.date,
            "siblings": [{"rfilename": path} for path in sorted(commit.tree)],
        }
        self._send(200, fields)

    def tree(self, body, repo, rev, path=""):
        tree = self._commit_of(self._repository(repo), rev).tree
        prefix = path.rstrip("/") + "/" if path else ""
        recursive = self.query.get("recursive", [""])[0].lower() in ("true", "1")
        entries = {}
        for name in sorted(tree):
            if not name.startswith(prefix):
                continue
            parts = name[len(prefix) :].split("/")
            for depth in range(1, len(parts) if recursive else min(2, len(parts))):
                folder = prefix + "/".join(parts[:depth])
                entries.setdefault(folder, {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0})
            if recursive or len(parts) == 1:
                entries[name] = tree[name].entry(name)
        if prefix and not entries:
            raise _Answer(404, f"{path} does not exist on {rev}", "EntryNotFound")
        start = int(self.query.get("cursor", ["0"])[0])
        page, headers = list(entries.values())[start : start + self.hub.page_size], {}
        if start + self.hub.page_size < len(entries):
            query = urllib.parse.urlencode({"recursive": recursive, "cursor": start + self.hub.page_size})
            address = f"{self.hub.url}{urllib.parse.urlsplit(self.path).path}?{query}"
            headers["Link"] = f'<{address}>; rel="next"'
        self._send(200, page, headers)

    def paths_info(self, body, repo, rev):
        tree = self._commit_of(self._repository(repo), rev).tree
        if self.headers.get("Content-Type", "").startswith("application/json"):
            paths = json.loads(body)["paths"]
        else:
            paths = urllib.parse.parse_qs(body.decode()).get("paths", [])
        self._send(200, [tree[path].entry(path) for path in paths if path in tree])

    def commits(self, body, repo, rev):
        repository = self._repository(repo)
        commit, history = self._commit_of(repository, rev), []
        while commit is not None:
            authors = [{"user": repo.split("/")[0]}]
            fields = {"id": commit.oid, "title": commit.title, "message": "", "date": commit.date, "authors": authors}
            history.append(fields)
            commit = repository.commits.get(commit.parent)
        self._send(200, history)

    def refs(self, body, repo):
        repository = self._repository(repo)

        def listed(names, prefix):
            return [{"name": n, "ref": f"{prefix}{n}", "targetCommit": oid} for n, oid in names.items()]

        branches = {name: oid for name, oid in repository.branches.items() if not name.startswith("refs/")}
        answer = {
            "branches": listed(branches, "refs/heads/"),
            "tags": listed(repository.tags, "refs/tags/"),
            "converts": [],
        }
        if "include_prs" in self.query:
            pulls = {name: oid for name, oid in repository.branches.items() if name.startswith("refs/pr/")}
            answer["pullRequests"] = listed(pulls, "")
        self._send(200, answer)

    def resolve(self, repo, rev, path):
        self._drain()
        with self.hub.lock:
            repository = self._repository(repo)
            commit = self._commit_of(repository, rev)
        blob, headers = commit.tree.get(path), {"X-Repo-Commit": commit.oid}
        if blob is None:
            headers |= {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return self._send(404, {"error": "Entry not found"}, headers)
        headers |= {"ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if blob.sha256 is not None:
            headers |= {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(blob.size)}
        if blob.xet is not None:
            route = f"{self.hub.url}/api/models/{repo}/xet-read-token/{commit.oid}"
            headers |= {"X-Xet-Hash": blob.xet, "X-Xet-Refresh-Route": route, "Link": f'<{route}>; rel="xet-auth"'}
        return self._send_blob(blob, headers)

    def _send_blob(self, blob: Blob, headers: dict):
        start, stop, status = 0, blob.size, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            start, stop, status = int(asked[1]), min(int(asked[2]) + 1 if asked[2] else blob.size, blob.size), 206
            if start >= blob.size:
                return self._send(416, headers={"Content-Range": f"bytes */{blob.size}"})
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{blob.size}"
        if blob.data is not None or self.command == "HEAD":
            data = b"" if blob.data is None or self.command == "HEAD" else blob.data[start:stop]
            return self._send(status, headers={**headers, "Content-Length": str(stop - start)}, data=data)
        path = self.hub.object(blob.sha256)
        if not path.is_file():
            _xet_download(self.hub.folder, blob, path)
        self._send(status, headers={**headers, "Content-Length": str(stop - start)}, data=b"")
        with path.open("rb") as file:
            self.connection.sendfile(file, start, stop - start)
        return None

    # writing

    def preupload(self, body, repo, rev):
        repository = self._repository(repo, write=True)
        tree = self._commit_of(repository, rev).tree
        answers, fields = [], json.loads(body)
        stored = tree[".gitignore"].data.decode() if ".gitignore" in tree else ""
        ignored = fields.get("gitIgnore", stored).split()
        for file in fields["files"]:
            large = file["path"].endswith(LFS_SUFFIXES) or file["size"] > LFS_FROM_BYTES
            answer = {"path": file["path"], "uploadMode": "lfs" if large else "regular"}
            answer["shouldIgnore"] = any(fnmatch.fnmatch(file["path"], pattern) for pattern in ignored)
            if file["path"] in tree:
                answer["oid"] = tree[file["path"]].etag
            answers.append(answer)
        self._send(200, {"files": answers, "commitOid": repository.resolve(rev)})

    def lfs_batch(self, body, repo):
        self.query.setdefault("create_pr", ["1"])
        self._repository(repo, write=True)
        objects = []
        for item in json.loads(body)["objects"]:
            oid, size = item["oid"], item["size"]
            answer = {"oid": oid, "size": size}
            if not self.hub.object(oid).is_file():
                upload = {"href": f"{self.hub.url}/objects/{oid}"}
                if self.hub.part_size is not None and size > self.hub.part_size:
                    count = -(-size // self.hub.part_size)
                    parts = {str(number): f"{upload['href']}/{number}" for number in range(1, count + 1)}
                    upload["header"] = {"chunk_size": str(self.hub.part_size), **parts}
                verify = {"href": f"{self.hub.url}/{repo}.git/info/lfs/objects/verify"}
                answer["actions"] = {"upload": upload, "verify": verify}
            objects.append(answer)
        transfer = "basic" if self.hub.part_size is None else "multipart"
        self._send(200, {"transfer": transfer, "objects": objects})

    def lfs_verify(self, body, repo):
        item = json.loads(body)
        path = self.hub.object(item["oid"])
        if not path.is_file() or path.stat().st_size != item["size"]:
            raise _Answer(400, "size mismatch")
        self._send(200, {})

    def lfs_put(self, sha, part=None):
        suffix = f".part{part}" if part else f".{threading.get_ident()}"
        path = self.hub.object(sha + suffix)
        digest = hashlib.sha256()
        with path.open("wb") as file:
            for piece in self.pieces:
                digest.update(piece)
                file.write(piece)
        if part is None:
            if digest.hexdigest() != sha:
                path.unlink()
                raise _Answer(400, "sha256 mismatch")
            path.rename(self.hub.object(sha))
        self._send(200, headers={"ETag": f'"{digest.hexdigest()}"'})

    def lfs_complete(self, body, sha):
        parts = [self.hub.object(f"{sha}.part{part['partNumber']}") for part in json.loads(body)["parts"]]
        digest, whole = hashlib.sha256(), self.hub.object(f"{sha}.whole")
        with whole.open("wb") as file:
            for path in parts:
                data = path.read_bytes()
                digest.update(data)
                file.write(data)
                path.unlink()
        if digest.hexdigest() != sha:
            whole.unlink()
            raise _Answer(400, "sha256 mismatch")
        whole.rename(self.hub.object(sha))
        self._send(200, {})

    def commit(self, body, repo, rev):
        repository = self._repository(repo, write=True)
        if rev not in repository.branches:
            raise _Answer(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        head = repository.branches[rev]
        tree, title = dict(repository.commits[head].tree), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                title = value["summary"]
                if value.get("parentCommit") not in (None, head):
                    raise _Answer(412, "A commit has happened since. Please refresh and try again.")
            else:
                self._apply(tree, item["key"], value)
        oid = repository.commit(head, tree, title)
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo}/commit/{oid}"}
        if "create_pr" in self.query:
            number = repository.open_pull(oid, title)
            answer["pullRequestUrl"] = f"{self.hub.url}/{repo}/discussions/{number}"
        else:
            repository.branches[rev] = oid
        self._send(200, answer)

    def _apply(self, tree: dict[str, Blob], key: str, value: dict):
        path = value["path"]
        if key == "file":
            data = base64.b64decode(value["content"])
            tree[path] = Blob(len(data), data)
        elif key == "lfsFile":
            sha, xet = value["oid"], None
            if self.hub.xet:
                xet = _xet_hashes(self.hub.folder).get(sha)
            stored = self.hub.object(sha)
            if xet is None and not stored.is_file():
                raise _Answer(400, f"LFS pointer pointed to a file that does not exist: {path}")
            tree[path] = Blob(value.get("size") or stored.stat().st_size, sha256=sha, xet=xet)
        elif key == "deletedFile":
            if tree.pop(path, None) is None:
                raise _Answer(404, "A file with this name doesn't exist", "EntryNotFound")
        elif key == "deletedFolder":
            for name in [name for name in tree if name.startswith(path.rstrip("/") + "/")]:
                del tree[name]

    def create_tag(self, body, repo, rev):
        repository = self._repository(repo, write=True)
        commit, name = self._commit_of(repository, rev), json.loads(body)["tag"]
        if name in repository.tags:
            raise _Answer(409, "Tag reference exists already")
        repository.tags[name] = commit.oid
        self._send(200, {})

    def collection(self, body, slug):
        if slug not in self.hub.collections:
            raise _Answer(404, "Collection not found")
        items = [
            {"_id": str(number), "id": repo, "type": "model", "position": number}
            for number, repo in enumerate(self.hub.collections[slug])
        ]
        facts = {"slug": slug, "title": slug, "owner": slug.split("/")[0], "items": items, "position": 0}
        extra = {"lastUpdated": "2026-01-01T00:00:00.000Z", "private": False, "theme": "blue", "upvotes": 0}
        self._send(200, facts | extra)

    def add_to_collection(self, body, slug):
        self._may_write(slug)
        item = json.loads(body)["item"]["id"]
        if item in self.hub.collections.get(slug, ()):
            raise _Answer(409, "Item already exists in this collection")
        if slug in self.hub.collections:
            self.hub.collections[slug].append(item)
        self.collection(body, slug)

    def delete_tag(self, body, repo, rev):
        repository = self._repository(repo, write=True)
        if repository.tags.pop(rev, None) is None:
            raise _Answer(404, "Tag reference does not exist", "RevisionNotFound")
        self._send(200, {})

    def create_branch(self, body, repo, rev):
        repository = self._repository(repo, write=True)
        if rev in repository.branches:
            raise _Answer(409, "Reference already exists")
        start = json.loads(body or b"{}").get("startingPoint", "main")
        repository.branches[rev] = self._commit_of(repository, start).oid
        self._send(200, {})

    def merge_pull(self, body, repo, number):
        repository = self._repository(repo, write=True)
        merged = self._commit_of(repository, f"refs/pr/{number}")
        repository.branches["main"] = repository.commit(repository.head, merged.tree, f"Merge {number}")
        self._send(200, {})

    # xet

    def xet_token(self, body, repo, kind, rev):
        self._repository(repo, write=kind == "write")
        if not self.hub.xet:
            raise _Answer(404, "Not Found")
        # hf_xet takes a folder in place of a storage server
        address, expiry = f"local://{self.hub.folder}/xet", int(time.time()) + 3600
        headers = {
            "X-Xet-Cas-Url": address,
            "X-Xet-Access-Token": "t",
            "X-Xet-Token-Expiration": str(expiry),
        }
        self._send(200, {"casUrl": address, "exp": expiry, "accessToken": "t"}, headers)


def _merkle_hex(data: bytes) -> str:
    """Write a xet hash, which is four little-endian 64-bit numbers."""
    return "".join(data[start : start + 8][::-1].hex() for start in range(0, 32, 8))


def _xet_hashes(folder: Path) -> dict[str, str]:
    """Read sha256 -> xet hash from the shards that clients wrote.

    A shard opens with a 48-byte header; each file then has a 48-byte entry (hash, flags, segment count), 48 bytes a
    segment, as many again if bit 31 of the flags is set, and its sha256 if bit 30 is; a hash of ones ends them.
    """
    hashes = {}
    for path in (folder / "xet" / "xet" / "xorbs" / "shards").glob("*.mdb"):
        data, at = path.read_bytes(), 48
        while data[at : at + 32] != b"\xff" * 32:
            file_hash = _merkle_hex(data[at : at + 32])
            flags = int.from_bytes(data[at + 32 : at + 36], "little")
            segments = int.from_bytes(data[at + 36 : at + 40], "little")
            at += 48 + 48 * segments * (2 if flags & 1 << 31 else 1)
            if flags & 1 << 30:
                hashes[_merkle_hex(data[at : at + 32])] = file_hash
                at += 48
    return hashes


XET_DOWNLOAD = """
import sys, time, hf_xet
address, file_hash, size, path = sys.argv[1:]
session = hf_xet.XetSession()
with session.new_file_download_group(
    endpoint=address, token="t", token_expiry_unix_secs=int(time.time()) + 3600) as group:
    group.start_download_file(hf_xet.XetFileInfo(file_hash, int(size)), path)
"""


def _xet_download(folder: Path, blob: Blob, path: Path):
    """Rebuild a file that came in through xet, for clients without it."""
    # the store is locked by the process that opened it, so a short-lived one reads
    work = path.with_suffix(".xet")
    arguments = [f"local://{folder}/xet", blob.xet, str(blob.size), str(work)]
    subprocess.run([sys.executable, "-c", XET_DOWNLOAD, *arguments], check=True, capture_output=True)
    work.rename(path)


def copy_repository(hub: HubServer, name: str, fork: str):
    """Duplicate a repository on the server, as the Hub's own button does."""
    source = hub.repositories[name]
    copy = Repository(fork)
    copy.commits = {oid: replace(commit) for oid, commit in source.commits.items()}
    copy.branches, copy.tags = dict(source.branches), dict(source.tags)
    hub.repositories[fork] = copy


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {os.path.relpath(__file__)} PORT FOLDER")
    hub = HubServer(sys.argv[2], int(sys.argv[1]))
    print(hub.url, flush=True)
    hub.serve_forever()
