"""`dspine-hub pull`."""

import sys

import click

from dspine_hub.cli._errors import readable_errors


@click.command("pull")
@click.argument("repo")
@click.argument("dest", type=click.Path())
@click.option("--revision", metavar="R", help="Branch, tag or commit; main by default.")
@click.option("--quiet", is_flag=True, help="Show no progress.")
@readable_errors
def command(repo, dest, revision, quiet):
    """Download the repository REPO into the new folder DEST and check every hash.

    Example:

    \b
        dspine-hub pull org/mini-dspine bundle/mini --revision v1.0

    With HF_HUB_OFFLINE=1 the local cache is the source.
    """
    from dspine_hub.publish.pull import pull

    folder = pull(repo, dest, revision=revision, progress=sys.stderr.isatty() and not quiet)
    from dspine_hub.conversion.inspection import advice

    if text := advice(folder):
        click.echo(text, err=True)
    click.echo(folder)
