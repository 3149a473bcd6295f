"""`dspine-hub show`."""

import json

import click

from dspine_hub.cli._errors import readable_errors


@click.command("show")
@click.argument("name")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else; unknown facts are null."
)
@readable_errors
def command(name, as_json):
    """Show what the catalog knows about the target NAME: facts with sources, public drafters, how to make one.

    Example:

    \b
        dspine-hub show qwen3-8b
    """
    from dspine_hub.publish.catalog import find

    entry = find(name)
    if as_json:
        click.echo(json.dumps(entry.as_dict()))
        return
    from dspine_hub.publish.cards import render_entry

    click.echo(render_entry(entry), nl=False)
