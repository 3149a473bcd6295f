"""`dspine-hub serve`."""

import os
import shlex

import click

from dspine_hub.cli._errors import readable_errors


@click.command("serve", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.option("--target", required=True, metavar="T", help="Target: a folder or a repository.")
@click.option("--drafter", required=True, metavar="D", help="Its drafter: a folder or a repository.")
@click.option("--print", "only_print", is_flag=True, help="Print the command and do not run it.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@readable_errors
def command(target, drafter, only_print, flags):
    """Serve a target with its drafter in SGLang, after checking pair and version.

    Example:

    \b
        dspine-hub serve --target Qwen/Qwen3-8B --drafter org/qwen3-8b-dspine --port 30000

    FLAGS are those of SGLang's server.
    """
    from dspine_hub.sglang_plugin.command import launch_command, require_sglang

    require_sglang()
    command = launch_command(target, drafter, flags)
    click.echo(shlex.join(command), err=not only_print)
    if not only_print:
        # signals and the exit code are the server's own
        os.execv(command[0], command)
