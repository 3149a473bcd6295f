"""`dspine-hub list`."""

import json

import click

from dspine_hub.cli._errors import readable_errors


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array and nothing else.")
@readable_errors
def command(as_json):
    """List the targets of the catalog, with status and number of known public drafters.

    Example:

    \b
        dspine-hub list
    """
    from dspine_hub.publish.catalog import load_catalog

    rows = [
        {"name": entry.name, "target": entry.target, "status": entry.status, "drafters": len(entry.public_drafters)}
        for entry in load_catalog()
    ]
    if as_json:
        click.echo(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "target", "status", "public drafters")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
