"""A request on the wire, whatever it asks for."""

import json
import time
import urllib.parse
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler

from .faults import Fault
from .storage import Commit, Repository, User

BLOCK = 1 << 20


@dataclass
class Request:
    """A request as it was answered; `status` is `None` while it runs and after a dropped connection."""

    method: str
    path: str
    token: str | None
    status: int | None = None
    received: int = 0


class Answer(Exception):
    """Ends a request with an error status."""

    def __init__(self, status: int, message: str, code: str | None = None):
        self.status, self.message, self.code = status, message, code


class Wire(BaseHTTPRequestHandler):
    """A request on its way in and out: faults, bodies, answers, and who may do what."""

    # the server, and `(method, pattern, name of the method that serves it)`: the first match serves
    hub = None
    routes = ()
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
        except Answer as answer:
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
        served = ((name, pattern.fullmatch(path)) for verb, pattern, name in self.routes if verb == method)
        name, match = next((found for found in served if found[1]), (None, None))
        if match is None:
            raise Answer(404, f"no route {self.command} {path}")
        values = {key: urllib.parse.unquote(value) for key, value in match.groupdict().items() if value}
        # an upload or download may take long and touches no repository's state
        if name in ("lfs_put", "resolve"):
            getattr(self, name)(**values)
        else:
            body = b"".join(self.pieces)
            with self.hub.lock:
                getattr(self, name)(body, **values)

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
            raise Answer(401, "Invalid credentials in Authorization header")
        return self.hub.users.get(self.token)

    def _repository(self, name: str, write: bool = False) -> Repository:
        user, repository = self._user(), self.hub.repositories.get(name)
        owner = user is not None and user.name == name.split("/")[0]
        if repository is None or (repository.private and not owner):
            raise Answer(404 if user else 401, "Repository not found", "RepoNotFound")
        if write:
            self._may_write(name)
        return repository

    def _may_write(self, name: str):
        user = self._user()
        if user is None:
            raise Answer(401, "Invalid credentials in Authorization header")
        # whoever can read may propose
        if "create_pr" in self.query:
            return
        if user.role != "write" or user.name != name.split("/")[0]:
            raise Answer(403, f"You don't have the rights to write to {name}")

    def _commit_of(self, repository: Repository, revision: str) -> Commit:
        oid = repository.resolve(revision)
        if oid is None:
            raise Answer(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repository.commits[oid]
