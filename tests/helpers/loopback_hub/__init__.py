"""The Hub on loopback: model repositories over the routes that `huggingface_hub` and `transformers` use.

Commits, tags, branches, pull requests, LFS in one or several parts, private repositories, tokens with a role, and xet
through the on-disk store of `hf_xet`. Any route can be made to fail a number of times, and every request is recorded.
Repositories live in memory, large objects in a folder; only 127.0.0.1 is served.

Usage: `with HubServer(folder) as hub:`, or `python tests/helpers/hub_server.py PORT FOLDER`. Imports are relative, for
that command knows this folder under another name than the tests do.
"""

from .server import HubServer, copy_repository
from .storage import Blob
from .writing import Writing

__all__ = ["Blob", "HubServer", "Writing", "copy_repository"]
