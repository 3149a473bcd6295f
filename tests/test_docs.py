"""What README and docs tell people to type: every block of code is run, or named here with the reason why not."""

import re
import shlex
import shutil

import pytest
from click.testing import CliRunner
from helpers.paths import MINI, ROOT

from dspine_hub.cli import COMMANDS, main

PAGES = ["README.md", "docs/load.md", "docs/publish.md", "docs/convert.md", "docs/serve.md", "docs/train.md"]
# first words of a command that no test runs -> why
NOT_RUN = {
    "make": "CI calls them itself",
    "pip install": "installs from the registry",
    "python -m sglang.launch_server": "needs an 8B target and a GPU; what `serve` prints is tested with real engines",
    "dspine-hub serve": "tests/sglang_plugin starts it in an environment that has SGLang",
    "dspine-hub doctor": "reports on the machine it runs on; tests/sglang_plugin",
    "dspine-hub train": "its corpus is not committed; tests/training runs the trainer",
    "torchrun": "needs several GPUs",
}
# what a page names and this machine cannot fetch -> a pair in the same layout
STAND_INS = {"jiapingW/Qwen3-8b-dspine-SpecForge": "specforge/stand-in", "Qwen/Qwen3-8B": "examples/mini/target"}


def blocks(page: str) -> list[tuple[str, str]]:
    """Return language and text of every fenced block of a page."""
    return re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Split a block of shell into commands, comments left out."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"\s+#.*", "", line).strip() for line in lines) if line]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that holds the examples, as a checkout does, and a stand-in for what lies on the Hub."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(MINI, tmp_path / "examples" / "mini")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.parametrize(
    "page", [page if page == "README.md" else pytest.param(page, marks=pytest.mark.slow) for page in PAGES]
)
def test_every_block_runs(server, place, page):
    """Catches a command or a snippet that does not do what the page says."""
    namespace = {}
    invoke("convert", "examples/mini/drafter", "specforge/stand-in", "--to", "specforge")
    # pages follow the README, whose bundle they name
    if page != "docs/load.md":
        invoke("bundle", "examples/mini/drafter", "bundle/mini", "--target", "examples/mini/target")
    if page != "docs/convert.md":
        shutil.rmtree(place / "specforge" / "mini", ignore_errors=True)
    for language, text in blocks(page):
        if language == "python":
            for name, own in STAND_INS.items():
                text = text.replace(name, own)
            exec(compile(text, page, "exec"), namespace)
        elif language == "bash":
            for command in commands(text):
                if not command.startswith(tuple(NOT_RUN)):
                    run(place, command)
        else:
            assert language in ("text", "toml"), f"{page}: nobody knows how to run `{language}`"
    if page == "README.md":
        # it drafts: the pair of the page, not just any objects
        assert namespace["drafter"].is_bound_to(namespace["target"])


def run(place, command: str) -> None:
    program, *arguments = shlex.split(command)
    assert program == "dspine-hub", f"`{command}` is neither run nor in NOT_RUN"
    if arguments[0] == "bundle" and (place / arguments[2]).exists():
        shutil.rmtree(place / arguments[2])
    invoke(*arguments)


def invoke(*arguments: str) -> None:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 0, f"{arguments}: {result.output}{result.exception!r}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented(name):
    """Catches a command without help or example, and a page of commands that is not what `--help` prints."""
    command = main.commands[name]
    assert command.help.split("\n")[0].endswith(".") and f"dspine-hub {name}" in command.help
    assert f"## {name}\n" in (ROOT / "docs" / "cli.md").read_text()


def test_pages_name_what_exists():
    """Catches a link to a page that moved, in README, CONTRIBUTING and docs."""
    for page in ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / link).exists(), f"{page}: {link}"
