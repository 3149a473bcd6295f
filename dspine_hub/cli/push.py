"""`dspine-hub push`."""

import contextlib
import json

import click

from dspine_hub.cli._errors import readable_errors


@click.command("push")
@click.argument("path", type=click.Path())
@click.argument("repo")
@click.option("--private", is_flag=True, help="Create the repository private.")
@click.option("--pr", is_flag=True, help="Open a pull request instead of committing to main.")
@click.option("--tag", metavar="V", help="Tag the commit, like v1.0.")
@click.option("--message", metavar="M", help="Title of the commit.")
@click.option("--collection", metavar="SLUG", help="Put the repository into this collection too.")
@click.option("--dry-run", is_flag=True, help="Check, compare with the repository, send nothing.")
@click.option("--target", type=click.Path(), help="Target folder: also checks the pair and its acceptance.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--quiet", is_flag=True, help="Print only the address of the commit or pull request.")
@readable_errors
def command(path, repo, private, pr, tag, message, collection, dry_run, target, as_json, quiet):
    """Publish the bundle PATH as one commit of REPO, after checking everything about it.

    Example:

    \b
        dspine-hub push bundle/mini org/mini-dspine --tag v1.0 --dry-run

    Killed or refused anywhere, the repository stays as it was; the same command run again completes it.
    """
    from transformers.utils import logging

    from dspine_hub.publish.push import push

    logging.disable_progress_bar()
    with _byte_bars(hidden=as_json or quiet or dry_run) as progress:
        result = push(
            path,
            repo,
            private=private,
            pr=pr,
            tag=tag,
            message=message,
            collection=collection,
            dry_run=dry_run,
            target=target,
            progress=progress,
        )
    if as_json:
        click.echo(json.dumps(result.as_dict()))
    else:
        for line in [] if quiet else result.report.lines():
            click.echo(line, err=True)
        for line in [] if quiet else _summary(result):
            click.echo(line, err=not dry_run)
        if not dry_run:
            click.echo(result.pull_request or result.url)
    if not result.report.ok:
        click.get_current_context().exit(1)


@contextlib.contextmanager
def _byte_bars(hidden):
    """Yield a callback that draws a bar a file on stderr, or `None` when nobody would see it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    if hidden or not console.is_terminal:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    bars, tasks = Progress(*columns, console=console), {}

    def show(name, sent, size):
        if name not in tasks:
            # nothing to draw while the checks run
            bars.start()
            tasks[name] = bars.add_task(name, total=size)
        bars.update(tasks[name], completed=sent)

    try:
        yield show
    finally:
        bars.stop()


def _summary(result):
    width = max((len(entry.path) for entry in result.files), default=0)
    yield from (f"{entry.state:9}  {entry.path:{width}}  {entry.size:>13,} bytes" for entry in result.files)
    kept = [entry for entry in result.files if entry.state != "deleted"]
    yield f"{len(kept)} files, {sum(entry.size for entry in kept):,} bytes"
    if result.dry_run:
        yield f"\n{result.card}\nNothing was sent."
    elif not result.committed:
        yield "The repository holds all of it already; no commit was made."
    if result.tag:
        yield f"tag {result.tag} is on {result.commit}"
