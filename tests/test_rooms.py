"""The rooms of the package: what each may import, and that CONTRIBUTING's table of them is true."""

import ast
import re
import subprocess
import sys

import pytest
from helpers.paths import ROOT

PACKAGE = ROOT / "dspine_hub"
# packages that lie beside `dspine_hub` and install into it
BESIDE = {"dspine_hub.conversion": ROOT / "convert", "dspine_hub.model_cards": ROOT / "model_cards"}
SHARED = {"_version", "environment", "errors", "findings", "folders"}
BELOW = {"ships", "shared"}
# room -> rooms it may import from, beside itself
MAY_IMPORT = {
    "ships": set(),
    "shared": set(),
    "model_cards": set(),
    "checkpoints": BELOW,
    "conversion": BELOW | {"checkpoints"},
    "evaluation": BELOW | {"checkpoints"},
    "sglang_plugin": BELOW | {"checkpoints"},
    "training": BELOW | {"checkpoints", "evaluation"},
    "publish": BELOW | {"checkpoints", "evaluation", "model_cards"},
    "api": BELOW | {"checkpoints", "conversion", "publish"},
    "cli": BELOW | {"checkpoints", "conversion", "evaluation", "publish", "training", "sglang_plugin", "api"},
}


def modules() -> dict:
    """Every module of the package by its name."""
    folders = {"dspine_hub": PACKAGE, **BESIDE}
    found = {}
    for name, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([name, *(part for part in parts if part != "__init__")])] = path
    return found


MODULES = modules()


def room(name: str) -> str:
    """The room of a module."""
    first = name.split(".")[1] if "." in name else "front"
    if first.endswith("_dspine") or first in ("kernels_dspine", "custom_generate"):
        return "ships"
    return "shared" if first in SHARED else "cli" if first == "__main__" else first


def imports(name: str) -> set[str]:
    """The modules of the package that a module imports, anywhere in its text."""
    path, found = MODULES[name], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                inside = name if path.name == "__init__.py" else name.rpartition(".")[0]
                base = f"{inside}.{base}".rstrip(".")
            found |= {f"{base}.{alias.name}" for alias in node.names} | {base}
    return {one for one in found if one in MODULES and one not in ("dspine_hub", name)}


def test_every_module_has_a_room():
    """Catches a module dropped into `dspine_hub/` because nobody knew where it belongs."""
    assert {room(name) for name in MODULES} == {*MAY_IMPORT, "front"}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "dspine_hub"])
def test_arrows_point_one_way(name):
    """Catches an import from a higher room: there a reader has to know everything to know anything."""
    mine = room(name)
    assert {room(one) for one in imports(name)} <= MAY_IMPORT[mine] | {mine}


def test_there_is_no_circle():
    """Catches modules that need each other, also where one import hides in a function."""
    graph = {name: imports(name) for name in MODULES}
    # a package's own `__init__` is imported with each of its modules
    order, done = [], set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for one in sorted(graph[name]):
                visit(one, [*path, name])
            done.add(name)
            order.append(name)

    for name in graph:
        visit(name, [])
    assert len(order) == len(MODULES)


def test_functions_of_the_package_are_not_hidden():
    """Catches a module that takes the name of a function users call, once something imports it."""
    import dspine_hub

    # the plugin needs sglang
    loaded = [name for name in MODULES if "sglang_plugin" not in name and not name.endswith("__main__")]
    code = f"""
import importlib, types
for name in {loaded}:
    importlib.import_module(name)
import dspine_hub
print([name for name in dspine_hub.__all__ if isinstance(getattr(dspine_hub, name), types.ModuleType)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr[-2000:]
    functions = ("push", "pull", "verify", "diff", "convert", "load", "generate", "summarize")
    assert all(callable(getattr(dspine_hub, name)) for name in functions)


def contributing_rows() -> list[tuple[str, str, str]]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("## Where things go")[1].split("##")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return [tuple(cell.strip() for cell in row) for row in rows if row[0].strip() not in ("to change", "---")]


@pytest.mark.parametrize("row", contributing_rows(), ids=lambda row: row[0][:40])
def test_the_table_of_places_is_true(row):
    """Catches a path that moved, a name that is gone, and a test nobody wrote."""
    paths = [path for path in re.findall(r"`([\w./*-]+\.\w+|[\w./-]+/)`", row[1] + row[2]) if "NAME" not in path]
    assert paths, row
    for path in paths:
        assert list(ROOT.glob(path.rstrip("/"))), f"`{path}` of the row `{row[0]}` does not exist"
    for file, name in re.findall(r"`([\w./]+\.py)`(?:,|:)? `(\w+)`", row[1]):
        assert re.search(rf"\b{name}\b", (ROOT / file).read_text()), f"`{name}` is not in `{file}`"
