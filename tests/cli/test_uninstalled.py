"""A checkout nobody installed, and a package far from any checkout: one line says what to do."""

import subprocess
import sys

import pytest
from helpers.paths import ROOT

# what an editable install adds to the search for modules
BARE = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '')]"


def run_bare(code: str, folder, *arguments: str):
    """Run code where this package is not installed, only lies in a checkout."""
    command = [sys.executable, "-c", f"{BARE}; sys.path.insert(0, {str(ROOT)!r})\n{code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


MAIN = "import runpy; runpy.run_module('dspine_hub', run_name='__main__')"


@pytest.mark.parametrize("arguments", [("list",), ("convert", "a", "b"), ("verify", "a")])
def test_a_bare_checkout_says_how_to_install_it(tmp_path, arguments):
    """Catches a traceback about `dspine_hub.conversion`, which nobody can find."""
    done = run_bare(MAIN, tmp_path, *arguments)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "run `pip install -e .` in" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_bare_checkout_shows_its_help_and_draws_the_line_in_python_too(tmp_path):
    assert run_bare(MAIN, tmp_path, "--help").returncode == 0
    done = run_bare("import dspine_hub; dspine_hub.DSpineHubError; dspine_hub.load", tmp_path)
    assert "DSpineHubError: `dspine_hub` must be installed" in done.stderr


def test_a_missing_dependency_is_named(tmp_path):
    """Catches the first thing a stranger sees being a traceback: click is not installed yet."""
    done = run_bare(f"sys.modules['click'] = None; {MAIN}", tmp_path, "list")
    assert (
        done.returncode == 1 and done.stderr.startswith("`click` must be installed") and "Traceback" not in done.stderr
    )


def test_the_demo_outside_a_checkout_names_what_it_needs(tmp_path):
    """Catches a default that only exists in a checkout, met as a missing file deep inside."""
    code = "import pathlib, dspine_hub.cli.demo as demo; demo.MINI = pathlib.Path('nowhere')\n"
    code += "from dspine_hub.cli import main; main(['demo', '--prompt', 'x', '--drafter', 'nowhere/drafter'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "`--target` and `--drafter` must be given outside a checkout" in done.stderr
