"""Command line: thin commands, one file each; nothing here imports torch before a command runs."""

import importlib

import click

from dspine_hub._version import __version__
from dspine_hub.cli._errors import readable_errors
from dspine_hub.environment import require_installed

# in the order of `--help`; each is the `command` of the file of its name
COMMANDS = (
    "demo",
    "list",
    "show",
    "train",
    "bundle",
    "convert",
    "inspect",
    "card",
    "verify",
    "push",
    "pull",
    "diff",
    "serve",
    "doctor",
    "bench",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dspine-hub")
def main():
    """Publish, load, check, serve and reproduce DSpine speculative-decoding drafters."""
    readable_errors(require_installed)()


for name in COMMANDS:
    main.add_command(importlib.import_module(f"dspine_hub.cli.{name}").command)
