"""`dspine-hub bench`."""

import json

import click

from dspine_hub.cli._errors import readable_errors


@click.group("bench")
def command():
    """Measure this package on this machine.

    Example:

    \b
        dspine-hub bench ops
    """


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--batch", "batches", type=click.IntRange(min=1), multiple=True, help="Batch size; repeat for several.")
@click.option("--no-baselines", is_flag=True, help="Only DSpine's own work and its eager reference.")
@readable_errors
def ops(as_json, batches, no_baselines):
    """Measure what DSpine adds to a round on this GPU, after checking it against float64.

    Example:

    \b
        dspine-hub bench ops --json > ops.json
    """
    from dspine_hub.evaluation.ops.bench import BATCHES, bench_ops

    result = bench_ops(tuple(batches) or BATCHES, not no_baselines, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps(result))
        return
    click.echo(f"{result['machine']['device']}: microseconds of a round, and of what it is compared with")
    names = ("batch", "ours_us", "floor_us", "eager_us", "compile_us", "dflash2_us", "cycle_us", "max_rel_err")
    click.echo("  ".join(f"{name:>11}" for name in names))
    for row in result["rows"]:
        values = [row.get(name) for name in names]
        click.echo("  ".join(f"{'-' if value is None else f'{value:.4g}':>11}" for value in values))
