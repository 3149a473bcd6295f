"""The Hub itself: its users, its routes, and a server that answers them."""

import re
import threading
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path

from .faults import Fault
from .keeping import Keeping
from .reading import Reading
from .storage import Repository, User
from .wire import Request
from .writing import Writing

USERS = {
    "hf_owner": User("org"),
    "hf_reader": User("org", "read"),
    "hf_stranger": User("someone"),
}

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


class Handler(Reading, Writing, Keeping):
    """Everything this Hub answers."""

    routes = ROUTES


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
        handler = type("Handler", (Handler,), {"hub": self})
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


def copy_repository(hub: HubServer, name: str, fork: str):
    """Duplicate a repository on the server, as the Hub's own button does."""
    source = hub.repositories[name]
    copy = Repository(fork)
    copy.commits = {oid: replace(commit) for oid, commit in source.commits.items()}
    copy.branches, copy.tags = dict(source.branches), dict(source.tags)
    hub.repositories[fork] = copy
