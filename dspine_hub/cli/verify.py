"""`dspine-hub verify`."""

import json
import sys
import tempfile
from pathlib import Path

import click

from dspine_hub.cli._errors import readable_errors


@click.command("verify")
@click.argument("path")
@click.option("--target", help="Folder or repository of the target: check the pair and its acceptance too.")
@click.option("--revision", help="Branch, tag or commit, when PATH is a repository.")
@click.option("--allow-custom-code", is_flag=True, help="Run modelling code that is not this release's.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@readable_errors
def command(path, target, revision, allow_custom_code, as_json):
    """Open a bundle (a folder or a repository) as a stranger would and report what is wrong; exit code 1 on errors.

    Example:

    \b
        dspine-hub verify bundle/mini --target examples/mini/target
    """
    from transformers.utils import logging

    from dspine_hub.publish.verify import verify

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(path)
        if not folder.is_dir():
            from dspine_hub.publish.pull import pull

            folder = pull(path, Path(scratch) / "pulled", revision=revision)
        report = verify(folder, target, allow_custom_code)
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        for line in report.lines():
            click.echo(line)
        click.echo("ok" if report.ok else "not ok")
    sys.exit(0 if report.ok else 1)
