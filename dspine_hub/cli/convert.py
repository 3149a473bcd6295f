"""`dspine-hub convert`."""

import json

import click

from dspine_hub.checkpoints.formats import FORMATS, QUANTIZATIONS, TAP_MEANINGS
from dspine_hub.cli._errors import readable_errors

READS = ["auto", *(name for name, entry in FORMATS.items() if entry.reads)]
WRITES = [name for name, entry in FORMATS.items() if entry.writes]


@click.command("convert")
@click.argument("src")
@click.argument("dst", type=click.Path())
@click.option("--from", "source", type=click.Choice(READS), default="auto", show_default=True, help="Format of SRC.")
@click.option("--to", "to", type=click.Choice(WRITES), default="hub", show_default=True, help="Format of DST.")
@click.option("--target", metavar="T", help="Folder or repository of the target: recorded, and compared with.")
@click.option("--revision", metavar="R", help="Branch, tag or commit, when SRC is a repository.")
@click.option("--compact", "storage", flag_value="basis", help="Store a basis instead of the code table.")
@click.option("--expand", "storage", flag_value="codes", help="Store the code table a basis stands for.")
@click.option("--quantize", type=click.Choice(list(QUANTIZATIONS)), help="Store the layers' linears in 8 bits.")
@click.option("--tap-ids", type=click.Choice(list(TAP_MEANINGS)), help="What SRC's ids of tapped layers mean.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@readable_errors
def command(src, dst, source, to, target, revision, storage, quantize, tap_ids, as_json):
    """Convert the drafter SRC, a folder or repository of any known format, into the new folder DST.

    Example:

    \b
        dspine-hub convert specforge/export bundle/mini --target examples/mini/target

    Every tensor is accounted for; SRC is only read, and DST appears whole or not at all.
    """
    from dspine_hub.api import convert

    result = convert(
        src,
        dst,
        from_format=source,
        to_format=to,
        target=target,
        storage=storage,
        tap_ids=tap_ids,
        quantize=quantize,
        revision=revision,
    )
    if as_json:
        fields = {"folder": str(dst), "from": result.detection.format, "to": to}
        fields |= {"reasons": list(result.detection.reasons), "notes": result.notes, **result.report.as_dict()}
        click.echo(json.dumps(fields))
        return
    click.echo(f"{src} is {result.detection.format}: {'; '.join(result.detection.reasons)}", err=True)
    for line in [*(f"note: {note}" for note in result.notes), *result.report.lines()]:
        click.echo(line, err=True)
    click.echo(dst)
