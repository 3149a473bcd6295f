"""`dspine-hub inspect`."""

import json

import click

from dspine_hub.cli._errors import readable_errors


@click.command("inspect")
@click.argument("path")
@click.option("--revision", metavar="R", help="Branch, tag or commit, when PATH is a repository.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@readable_errors
def command(path, revision, as_json):
    """Show what the folder or repository PATH holds, from its config and its tensors' headers alone.

    Example:

    \b
        dspine-hub inspect examples/mini/drafter
    """
    from dspine_hub.conversion.inspection import inspect

    found = inspect(path, revision)
    if as_json:
        click.echo(json.dumps(found))
        return
    for line in _lines(found):
        click.echo(line)


def _lines(found):
    yield f"{'format':18} {found['format'] or 'unknown'}"
    hidden = ("name", "format", "reasons", "notes", "problems", "dtypes")
    yield from (f"{name:18} {value}" for name, value in found.items() if name not in hidden and value is not None)
    yield f"{'dtypes':18} {', '.join(f'{dtype} x {count:,}' for dtype, count in found['dtypes'].items()) or 'none'}"
    for kind in ("reasons", "notes", "problems"):
        yield from (f"{kind.removesuffix('s'):18} {text}" for text in found[kind])
