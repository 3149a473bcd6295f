"""`dspine-hub demo`."""

import json
from pathlib import Path

import click

from dspine_hub.cli._errors import readable_errors
from dspine_hub.errors import DSpineHubError

MINI = Path(__file__).resolve().parents[2] / "examples" / "mini"
NO_MINI = (
    "`--target` and `--drafter` must be given outside a checkout of dspine-hub, where `examples/mini` lies, got none: "
    "`dspine-hub demo --target TARGET --drafter DRAFTER --prompt TEXT`"
)
PROMPTS = 4
JSON_FIELDS = (
    "identical",
    "tau_pooled",
    "tau_per_request",
    "tau_token_weighted",
    "speedup",
    "tokens",
    "rounds",
    "acceptance_per_slot",
)


@click.command("demo")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--prompt", help="Text to continue, instead of held-out prompts.")
@click.option("--prompts", "prompt_file", type=click.Path(), help="A .jsonl file of prompts.")
@click.option("--temperature", default=0.0, show_default=True, help="0 decodes greedily.")
@click.option("--max-new-tokens", default=64, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--target", default=MINI / "target", type=click.Path(), help="Target folder; the mini target by default."
)
@click.option("--drafter", default=MINI / "drafter", type=click.Path(), help="Drafter checkpoint or bundle.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), help="By default float32 on a CPU, bfloat16 on a GPU."
)
@readable_errors
def command(as_json, prompt, prompt_file, temperature, max_new_tokens, target, drafter, dtype):
    """Watch a target decode with its drafter, and compare speed and text with plain decoding.

    Example:

    \b
        dspine-hub demo --prompt "def fibonacci(n):"
    """
    if temperature < 0:
        raise DSpineHubError(f"`--temperature` must be >= 0, got {temperature}.")
    if prompt is not None and prompt_file is not None:
        raise DSpineHubError("`--prompt` and `--prompts` exclude each other, got both.")
    if prompt == "":
        raise DSpineHubError("`--prompt` must hold at least one token, got an empty text.")
    if not MINI.is_dir() and (Path(target) == MINI / "target" or Path(drafter) == MINI / "drafter"):
        raise DSpineHubError(NO_MINI)
    from rich.console import Console
    from transformers.utils import logging

    from dspine_hub.evaluation.pair import Pair, compare

    prompts = _prompts(prompt, prompt_file)
    logging.disable_progress_bar()
    pair = Pair(target, drafter, dtype)
    console = Console(highlight=False)
    if not as_json:
        for text in prompts:
            stream(console, pair, text, max_new_tokens, temperature)
    result = compare(pair, prompts, max_new_tokens, temperature)
    if as_json:
        click.echo(json.dumps({name: result[name] for name in JSON_FIELDS}))
    else:
        print_table(console, result)


def _prompts(prompt, prompt_file):
    from dspine_hub.evaluation.prompts import read_prompts

    if prompt is not None:
        return [prompt]
    if prompt_file is not None:
        return read_prompts(prompt_file)
    if not MINI.is_dir():
        raise DSpineHubError("`--prompt` or `--prompts` must be given outside a checkout of dspine-hub, got neither.")
    held_out = read_prompts(MINI / "heldout.jsonl")
    return held_out[:: len(held_out) // PROMPTS][:PROMPTS]


def stream(console, pair, prompt, max_new_tokens, temperature):
    """Print a prompt and the text that follows it as it is decoded, accepted drafts in green."""
    from rich.text import Text

    console.print(Text(prompt, style="dim"), end="", soft_wrap=True)
    ids, shown = [], ""

    def show(tokens, style):
        nonlocal shown
        ids.extend(tokens)
        text = pair.tokenizer.decode(ids, skip_special_tokens=True)
        # a character may span tokens: hold its first bytes back
        if not text.endswith("\ufffd"):
            console.print(Text(text[len(shown) :], style=style), end="", soft_wrap=True)
            shown = text

    def on_round(drafted, own):
        show(drafted, "bold green")
        if own is not None:
            show([own], "")

    pair.speculative(pair.encode(prompt), max_new_tokens, temperature, on_round)
    console.print("\n")


def print_table(console, result):
    """Print what both ways of decoding did."""
    from rich.table import Table

    table = Table("measure", "value", title="green: drafted and accepted; plain: the target's own tokens")
    for name in ("tau_pooled", "tau_per_request", "tau_token_weighted"):
        table.add_row(f"acceptance length τ, {name.removeprefix('tau_').replace('_', ' ')}", f"{result[name]:.2f}")
    slots = " ".join("-" if share is None else f"{share:.0%}" for share in result["acceptance_per_slot"])
    table.add_row("acceptance by slot, given all before", slots)
    table.add_row("plain tokens/s", f"{result['plain_tokens_per_second']:.1f}")
    table.add_row("speculative tokens/s", f"{result['speculative_tokens_per_second']:.1f}")
    table.add_row("speed-up, same run", f"{result['speedup']:.2f}x")
    same = {True: "yes", False: "NO", None: "sampled: equal in distribution"}[result["identical"]]
    table.add_row("texts identical", same)
    console.print(table)
