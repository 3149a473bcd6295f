"""The end of a benchmark: its result with machine, versions and commit, as one JSON object.

`serving.py` adds part after part to one file and so writes its own.
"""

import json
from pathlib import Path

import click

from dspine_hub.environment import describe_environment

# `--out` of a benchmark
out_option = click.option("--out", type=click.Path(path_type=Path), help="Also write the JSON here.")


def write_report(result: dict, out: Path | None) -> None:
    """Print a result, and keep it where `--out` says."""
    text = json.dumps(result | describe_environment(), indent=2)
    click.echo(text)
    if out is not None:
        out.write_text(text + "\n")
