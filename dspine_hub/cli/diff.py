"""`dspine-hub diff`."""

import json

import click

from dspine_hub.cli._errors import readable_errors


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@readable_errors
def command(a, b, as_json):
    """Show how the bundles A and B differ in config, tensors, receipts and files.

    Example:

    \b
        dspine-hub diff org/mini-dspine@v1.0 bundle/mini

    Each is a folder, a repository, or a repository at a revision.
    """
    from dspine_hub.publish.compare import diff

    result = diff(a, b)
    if as_json:
        click.echo(json.dumps(result.as_dict()))
    elif result.identical:
        click.echo("identical")
    else:
        for line in _lines(result):
            click.echo(line)


def _lines(result):
    for key, (old, new) in result.config.items():
        yield f"config   {key}: {json.dumps(old)} -> {json.dumps(new)}"
    for name, (old, new) in result.tensors.items():
        yield f"tensor   {name}: {_tensor(old)} -> {_tensor(new)}"
    for name, keys in result.receipts.items():
        for key, (old, new) in keys.items():
            yield f"receipt  {name} {key}: {json.dumps(old)} -> {json.dumps(new)}"
    for name, (old, new) in result.files.items():
        yield f"file     {name}: {(old or 'absent')[:12]} -> {(new or 'absent')[:12]}"


def _tensor(side):
    return "absent" if side is None else f"{side['dtype']} {side['shape']} {side['sha256'][:12]}"
