"""`dspine-hub train`."""

import json

import click

from dspine_hub.cli._errors import readable_errors


@click.command("train")
@click.argument("config", type=click.Path())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a setting; dotted keys.")
@readable_errors
def command(config, overrides):
    """Train a drafter (or a small target) as CONFIG says, resuming from its newest checkpoint.

    Example:

    \b
        dspine-hub train examples/mini/recipe/drafter.yaml --set steps=200

    Several GPUs: `torchrun --nproc_per_node 8 -m dspine_hub train CONFIG`.
    """
    from dspine_hub.training.config import load_config

    run = load_config(config, overrides)
    from dspine_hub.training.loop import Trainer

    trainer = Trainer(run)
    evaluation = trainer.run()
    if trainer.accelerator.is_main_process:
        click.echo(json.dumps({"output": str(run.output), **evaluation}, indent=2))
