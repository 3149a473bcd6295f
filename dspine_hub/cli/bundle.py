"""`dspine-hub bundle`."""

import click

from dspine_hub.cli._errors import readable_errors


@click.command("bundle")
@click.argument("checkpoint", type=click.Path())
@click.argument("out", type=click.Path())
@click.option("--target", help="Folder or repository of the target: record drafts on a few prompts for `verify`.")
@readable_errors
def command(checkpoint, out, target):
    """Write the hub folder OUT of a drafter CHECKPOINT: weights, code and provenance, ready for AutoModel.

    Example:

    \b
        dspine-hub bundle examples/mini/drafter bundle/mini --target examples/mini/target
    """
    from dspine_hub.publish.build import build_bundle

    click.echo(build_bundle(checkpoint, out, target))
