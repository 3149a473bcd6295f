"""Command line: thin commands, one file each; nothing here imports torch before a command runs."""

import click

from dspine_hub._version import __version__
from dspine_hub.cli.bench import bench
from dspine_hub.cli.bundle import bundle
from dspine_hub.cli.card import card
from dspine_hub.cli.convert import convert
from dspine_hub.cli.demo import demo
from dspine_hub.cli.diff import diff
from dspine_hub.cli.doctor import doctor
from dspine_hub.cli.inspect import inspect
from dspine_hub.cli.list import list_entries
from dspine_hub.cli.pull import pull
from dspine_hub.cli.push import push
from dspine_hub.cli.serve import serve
from dspine_hub.cli.show import show
from dspine_hub.cli.train import train
from dspine_hub.cli.verify import verify


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dspine-hub")
def main():
    """Publish, load, check, serve and reproduce DSpine speculative-decoding drafters."""


COMMANDS = (
    demo,
    list_entries,
    show,
    train,
    bundle,
    convert,
    inspect,
    card,
    verify,
    push,
    pull,
    diff,
    serve,
    doctor,
    bench,
)
for command in COMMANDS:
    main.add_command(command)
