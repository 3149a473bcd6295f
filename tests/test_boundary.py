"""The files that ship inside a hub repository must stand alone there."""

import ast
import re
import subprocess
import sys

import pytest

from dspine_hub.publish.shipped import SHIPPED

THIRD_PARTY = {"torch", "triton", "transformers", "huggingface_hub"}
# the pattern by which transformers finds relative imports, in docstrings and comments too
SCANNED = re.compile(r"^\s*from\s+\.(\S+)\s+import", re.MULTILINE)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_file_imports_only_siblings_and_the_stack(name):
    """Catches an import that works in the package and breaks every published repository."""
    source = SHIPPED[name].read_text()
    relative = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and node.module and "." not in node.module, f"line {node.lineno}: not flat"
            assert f"{node.module}.py" in SHIPPED, f"line {node.lineno}: `{node.module}.py` is not shipped"
            relative.append(node.module)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for module in [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]:
                root = module.split(".")[0]
                assert root in THIRD_PARTY or root in sys.stdlib_module_names, f"line {node.lineno}: `{root}`"
    assert sorted(set(SCANNED.findall(source))) == sorted(set(relative))


@pytest.mark.parametrize("name", SHIPPED)
def test_triton_is_only_imported_inside_try(name):
    """Catches a hard requirement: transformers refuses a file whose plain imports are not installed."""
    tree = ast.parse(SHIPPED[name].read_text())
    guarded = {id(node) for tried in ast.walk(tree) if isinstance(tried, ast.Try) for node in ast.walk(tried)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            if any(name.split(".")[0] == "triton" for name in names):
                assert id(node) in guarded


def test_every_kernel_file_is_shipped():
    """Catches a new operation that works here and is missing from bundles."""
    folder = SHIPPED["kernels_dspine.py"].parent
    assert set(folder.glob("*.py")) <= set(SHIPPED.values())


@pytest.mark.parametrize("statement", ["import dspine_hub", "from dspine_hub.cli import main"])
def test_import_loads_neither_torch_nor_transformers(statement):
    """Catches a slow `--help` and work at import."""
    code = f"{statement}; import sys; print(sorted({{'torch', 'transformers', 'sglang'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_public_names_resolve():
    """Catches a lazy name whose module or attribute does not exist."""
    import dspine_hub

    for name in dspine_hub.__all__:
        assert getattr(dspine_hub, name) is not None
    with pytest.raises(AttributeError, match="no attribute `nothing`"):
        dspine_hub.nothing  # noqa: B018
