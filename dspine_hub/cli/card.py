"""`dspine-hub card`."""

import click

from dspine_hub.cli._errors import readable_errors
from dspine_hub.errors import DSpineHubError


@click.command("card")
@click.argument("path", type=click.Path())
@click.option("--repo", metavar="OWNER/NAME", help="Repository the usage snippets name.")
@click.option("--write", is_flag=True, help="Write PATH/README.md instead of printing.")
@readable_errors
def command(path, repo, write):
    """Render the model card of the bundle folder PATH from its config, receipts, card.toml and training.json.

    Example:

    \b
        dspine-hub card bundle/mini --write
    """
    from dspine_hub.publish.bundle import Bundle
    from dspine_hub.publish.card_checks import check_bundle_card
    from dspine_hub.publish.cards import render_card, write_card

    bundle = Bundle.read(path)
    text = render_card(bundle, repo)
    report = check_bundle_card(bundle, text)
    for line in report.lines():
        click.echo(line, err=True)
    # a licence is the author's to add before a push; anything else must not be written at all
    wrong = [finding for finding in report.findings if finding.severity == "error" and finding.rule != "license"]
    if wrong:
        raise DSpineHubError(f"the card of `{path}` must pass its own check, got {len(wrong)} error(s), listed above.")
    if write:
        click.echo(write_card(bundle, text))
    else:
        click.echo(text, nl=False)
