"""Routes by which files arrive and become a commit."""

import base64
import fnmatch
import hashlib
import json
import threading
import time

from .storage import Blob
from .wire import Answer, Wire
from .xet import xet_hashes

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


LFS_FROM_BYTES = 10_000_000


class Writing(Wire):
    """Routes by which an upload ends in a commit."""

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
            raise Answer(400, "size mismatch")
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
                raise Answer(400, "sha256 mismatch")
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
            raise Answer(400, "sha256 mismatch")
        whole.rename(self.hub.object(sha))
        self._send(200, {})

    def commit(self, body, repo, rev):
        repository = self._repository(repo, write=True)
        if rev not in repository.branches:
            raise Answer(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        head = repository.branches[rev]
        tree, title = dict(repository.commits[head].tree), ""
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                title = value["summary"]
                if value.get("parentCommit") not in (None, head):
                    raise Answer(412, "A commit has happened since. Please refresh and try again.")
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
                xet = xet_hashes(self.hub.folder).get(sha)
            stored = self.hub.object(sha)
            if xet is None and not stored.is_file():
                raise Answer(400, f"LFS pointer pointed to a file that does not exist: {path}")
            tree[path] = Blob(value.get("size") or stored.stat().st_size, sha256=sha, xet=xet)
        elif key == "deletedFile":
            if tree.pop(path, None) is None:
                raise Answer(404, "A file with this name doesn't exist", "EntryNotFound")
        elif key == "deletedFolder":
            for name in [name for name in tree if name.startswith(path.rstrip("/") + "/")]:
                del tree[name]

    def xet_token(self, body, repo, kind, rev):
        self._repository(repo, write=kind == "write")
        if not self.hub.xet:
            raise Answer(404, "Not Found")
        # hf_xet takes a folder in place of a storage server
        address, expiry = f"local://{self.hub.folder}/xet", int(time.time()) + 3600
        headers = {
            "X-Xet-Cas-Url": address,
            "X-Xet-Access-Token": "t",
            "X-Xet-Token-Expiration": str(expiry),
        }
        self._send(200, {"casUrl": address, "exp": expiry, "accessToken": "t"}, headers)
