"""Files and folders: a hash, a JSON object, a folder that appears whole or not at all."""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from dspine_hub.errors import DSpineHubError

# what a clone without git-lfs leaves in place of a file
GIT_LFS = "fetch the file itself with `git lfs pull`."


def file_sha256(path: Path) -> str:
    """Hash a file in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def walk(folder: Path) -> dict[str, Path]:
    """List all files of a folder by their paths in it."""
    paths = (Path(place) / name for place, _, names in os.walk(folder) for name in names)
    return {path.relative_to(folder).as_posix(): path for path in sorted(paths)}


def hash_files(files: dict[str, Path]) -> dict[str, str]:
    """Hash files, several at once."""
    with ThreadPoolExecutor(max_workers=4) as threads:
        return dict(zip(files, threads.map(file_sha256, files.values()), strict=True))


def parse_json(text: str | bytes, place: str) -> dict:
    """Read a JSON object; `place` names it in the `DSpineHubError` that says what else it is.

    A key given twice and a number that is none are refused: readers differ in what they make of them.
    """
    try:
        # some editors put a byte order mark in front
        text = (text.decode("utf-8") if isinstance(text, bytes) else text).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DSpineHubError(f"`{place}` must be UTF-8 text, got byte {error.start} that is not.") from None
    if text.startswith("version https://git-lfs."):
        raise DSpineHubError(f"`{place}` must be valid JSON, got a git-lfs pointer: {GIT_LFS}")
    try:
        value = json.loads(text, object_pairs_hook=_once(place), parse_constant=_no_number(place))
    except ValueError as error:
        comma = re.search(r",\s*[}\]]", text)
        line = text.count("\n", 0, comma.start()) + 1 if comma else 0
        hint = f" The comma before a closing bracket in line {line} must go." if comma else ""
        raise DSpineHubError(f"`{place}` must be valid JSON: {error}.{hint}") from None
    except RecursionError:
        raise DSpineHubError(f"`{place}` must be JSON of a sane depth, got one nested too deeply.") from None
    if not isinstance(value, dict):
        raise DSpineHubError(f"`{place}` must be a JSON object, got {type(value).__name__}.")
    return value


def _once(place: str):
    def build(pairs: list) -> dict:
        built = {}
        for key, value in pairs:
            if key in built:
                raise DSpineHubError(
                    f"`{key}` in `{place}` must be given once, got {built[key]!r} and {value!r}: delete the wrong one."
                )
            built[key] = value
        return built

    return build


def _no_number(place: str):
    def refuse(name: str):
        raise DSpineHubError(f"`{place}` must hold finite numbers, got {name}, which is no JSON.")

    return refuse


def write_json(path: Path, value: dict) -> None:
    """Write a JSON object as every file of a bundle is written."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


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
