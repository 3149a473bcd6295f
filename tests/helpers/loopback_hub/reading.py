"""Routes that read: facts of a repository, its tree, its files."""

import json
import re
import urllib.parse

from .storage import Blob
from .wire import Answer, Wire
from .xet import xet_download


class Reading(Wire):
    """Routes that change nothing."""

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
            raise Answer(404, f"{path} does not exist on {rev}", "EntryNotFound")
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
            xet_download(self.hub.folder, blob, path)
        self._send(status, headers={**headers, "Content-Length": str(stop - start)}, data=b"")
        with path.open("rb") as file:
            self.connection.sendfile(file, start, stop - start)
        return None

    def auth_check(self, body, repo):
        self._repository(repo)
        self._send(200, {})

    def whoami(self, body):
        user = self._user()
        if user is None:
            raise Answer(401, "Invalid credentials in Authorization header")
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

    def collection(self, body, slug):
        if slug not in self.hub.collections:
            raise Answer(404, "Collection not found")
        items = [
            {"_id": str(number), "id": repo, "type": "model", "position": number}
            for number, repo in enumerate(self.hub.collections[slug])
        ]
        facts = {"slug": slug, "title": slug, "owner": slug.split("/")[0], "items": items, "position": 0}
        extra = {"lastUpdated": "2026-01-01T00:00:00.000Z", "private": False, "theme": "blue", "upvotes": 0}
        self._send(200, facts | extra)
