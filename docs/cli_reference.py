"""The page of commands, from their `--help`: `python docs/cli_reference.py` writes docs/cli.md, `--check` compares."""

from pathlib import Path

import click

from dspine_hub.cli import COMMANDS, main

PAGE = Path(__file__).with_name("cli.md")
HEAD = """# Commands

Rendered from `--help` by `python docs/cli_reference.py`; CI fails when this page is stale. `hf-dspine` is another name
of the same program. Data goes to stdout, everything else to stderr; the exit code is 1 after an error or a failed
check.
"""


def help_of(command: click.Command, name: str) -> str:
    """Render what `name --help` prints, at a fixed width."""
    context = click.Context(command, info_name=name, terminal_width=100, max_content_width=100)
    return f"```text\n{command.get_help(context)}\n```"


def page() -> str:
    """Render the page."""
    parts = [HEAD.strip(), help_of(main, "dspine-hub")]
    for name in COMMANDS:
        command = main.commands[name]
        parts += [f"## {name}", help_of(command, f"dspine-hub {name}")]
        for inner in getattr(command, "commands", {}).values():
            parts.append(help_of(inner, f"dspine-hub {name} {inner.name}"))
    return "\n\n".join(parts) + "\n"


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; fail when the page is stale.")
def write(check):
    """Bring docs/cli.md in step with the commands."""
    if not check:
        PAGE.write_text(page())
    elif page() != PAGE.read_text():
        raise click.ClickException("docs/cli.md is stale: run `python docs/cli_reference.py`.")


if __name__ == "__main__":
    write()
