"""`dspine-hub doctor`."""

import json

import click

from dspine_hub.cli._errors import readable_errors


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@readable_errors
def command(as_json):
    """Report versions, the SGLang plugin's state and GPUs, and what would fail; exit code 1 on errors.

    Example:

    \b
        dspine-hub doctor --json
    """
    from dspine_hub.findings import Finding, Report
    from dspine_hub.sglang_plugin.doctor import examine

    result = examine()
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        for name, version in result["versions"].items():
            click.echo(f"{name:18} {version}")
        click.echo(f"{'GPUs':18} {', '.join(result['gpus']) or 'none'}")
        click.echo(f"{'plugin':18} {result['plugin']['entry_point'] or 'not installed'}")
        for line in Report([Finding(**finding) for finding in result["findings"]]).lines():
            click.echo(line)
        click.echo("ok" if result["ok"] else "not ok")
    click.get_current_context().exit(0 if result["ok"] else 1)
