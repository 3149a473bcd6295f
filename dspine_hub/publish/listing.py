"""Which files of a folder may be published, and why others may not."""

import os
from pathlib import Path, PurePosixPath

from dspine_hub.checkpoints.tensors import PICKLES
from dspine_hub.findings import Report

# the Hub writes the first itself; the second is where it looks for results
HIDDEN_ALLOWED = (".gitattributes", ".eval_results")


def list_files(folder: Path) -> tuple[dict[str, Path], Report]:
    """List what a folder publishes: name in the repository -> file, links resolved, and what must not be sent.

    Args:
        folder (`Path`): The bundle.

    Returns:
        `tuple[dict[str, Path], Report]`.
    """
    folder = folder.resolve()
    roots = [folder]
    # in the Hub's cache a snapshot is a folder of links into one of two neighbours
    if folder.parent.name == "snapshots":
        roots += [folder.parents[1] / "blobs", folder.parents[2] / "blobs"]
    files, report, folded = {}, Report(), {}
    for place, folders, names in os.walk(folder):
        linked = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in sorted(names + linked):
            path = Path(place) / name
            relative = path.relative_to(folder).as_posix()
            if problem := _refusal(relative, path, roots):
                report.add("error", *problem)
                continue
            twin = folded.setdefault(relative.casefold(), relative)
            if twin != relative:
                text = f"`{relative}` and `{twin}` must differ in more than case: some systems keep only one."
                report.add("error", "name-case", text, "rename one")
            files[relative] = path.resolve()
    return dict(sorted(files.items())), report


def _refusal(name: str, path: Path, roots: list[Path]) -> tuple[str, str, str] | None:
    """Return rule, message and remedy when a file must not be published."""
    parts = PurePosixPath(name).parts
    if "\\" in name or any(ord(letter) < 32 for letter in name):
        return "name", f"{name!r} must not hold backslashes or control characters.", "rename it"
    if any(part.startswith(".") for part in parts) and parts[0] not in HIDDEN_ALLOWED:
        return "hidden-file", f"`{name}` is hidden and must not be published.", f"rm -r {path}"
    if "__pycache__" in parts:
        return "cache-file", f"`{name}` is a by-product and must not be published.", f"rm -r {path.parent}"
    if name.lower().endswith(PICKLES):
        return "pickle", f"`{name}` must not be published: loading a pickle runs its code.", "store safetensors"
    if path.is_symlink():
        target = path.resolve()
        if not target.is_file():
            return "link", f"`{name}` must point to a file, got `{target}`.", f"rm {path}"
        if not any(target.is_relative_to(root) for root in roots):
            text = f"`{name}` must not point out of the folder, got `{target}`."
            return "link", text, "copy the folder with cp -rL"
    elif not path.is_file():
        return "special-file", f"`{name}` must be a regular file.", f"rm {path}"
    return None
