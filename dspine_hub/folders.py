"""A folder that appears whole or not at all, and the hash of a file."""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dspine_hub.errors import DSpineHubError


def file_sha256(path: Path) -> str:
    """Hash a file in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_free(folder: str | Path, name: str) -> Path:
    """Return the folder to create, or raise `DSpineHubError` when something lies there already."""
    folder = Path(folder)
    if folder.is_symlink() or folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DSpineHubError(
            f"`{name}` must not exist yet or be an empty folder, got `{folder}`. Name another, or remove it: "
            f"`rm -r {folder}`"
        )
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a working folder beside `folder`, renamed to it at the end and removed after an exception."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield work
        work.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
