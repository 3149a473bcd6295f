"""Routes about repositories, tags, branches, pull requests and collections."""

import json

from .storage import Repository
from .wire import Answer, Wire


class Keeping(Wire):
    """Routes that make, move and delete what commits hang on."""

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

    def create_tag(self, body, repo, rev):
        repository = self._repository(repo, write=True)
        commit, name = self._commit_of(repository, rev), json.loads(body)["tag"]
        if name in repository.tags:
            raise Answer(409, "Tag reference exists already")
        repository.tags[name] = commit.oid
        self._send(200, {})

    def delete_tag(self, body, repo, rev):
        repository = self._repository(repo, write=True)
        if repository.tags.pop(rev, None) is None:
            raise Answer(404, "Tag reference does not exist", "RevisionNotFound")
        self._send(200, {})

    def create_branch(self, body, repo, rev):
        repository = self._repository(repo, write=True)
        if rev in repository.branches:
            raise Answer(409, "Reference already exists")
        start = json.loads(body or b"{}").get("startingPoint", "main")
        repository.branches[rev] = self._commit_of(repository, start).oid
        self._send(200, {})

    def merge_pull(self, body, repo, number):
        repository = self._repository(repo, write=True)
        merged = self._commit_of(repository, f"refs/pr/{number}")
        repository.branches["main"] = repository.commit(repository.head, merged.tree, f"Merge {number}")
        self._send(200, {})

    def add_to_collection(self, body, slug):
        self._may_write(slug)
        item = json.loads(body)["item"]["id"]
        if item in self.hub.collections.get(slug, ()):
            raise Answer(409, "Item already exists in this collection")
        if slug in self.hub.collections:
            self.hub.collections[slug].append(item)
        self.collection(body, slug)
