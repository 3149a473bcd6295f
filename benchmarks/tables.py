"""The README's results, rendered from `benchmarks/results/`: `python benchmarks/tables.py` rewrites them in place."""

import json
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def load(name: str) -> dict:
    """Read one committed result."""
    return json.loads((RESULTS / name).read_text())


def origin(result: dict) -> str:
    """Say where a result comes from: machine, versions, commit."""
    versions = result["versions"]
    return (
        f"{result['machine']['device']}, {result['machine']['cpu_count']} cores, torch {versions['torch']}, "
        f"transformers {versions['transformers']}, commit `{result['commit']}`"
    )


def acceptance_table(result: dict) -> str:
    """Render acceptance of the mini drafter and of the same backbone without DSpine's parts."""
    names = {"dspine": "DSpine", "backbone": "same backbone, data and steps, no injection, no transition cache"}
    lines = ["| drafter | prompts | τ pooled | τ per request | τ token weighted |", "|---|---|---|---|---|"]
    for name, label in names.items():
        for suite, table in result["drafters"][name].items():
            means = " | ".join(f"{table[key]:.2f}" for key in ("tau_pooled", "tau_per_request", "tau_token_weighted"))
            lines.append(f"| {label} | {suite}, {result['protocol']['prompts'][suite]} | {means} |")
    return "\n".join(lines)


def render() -> str:
    """Render everything between the markers."""
    acceptance, cpu = load("mini-acceptance.json"), load("mini-cpu.json")
    protocol, memory = cpu["protocol"], cpu["memory"]
    equal = ", ".join(f"{name} {count}" for name, count in acceptance["equal_to_plain"].items())
    low, high = cpu["speedup_by_prompt"]["quartiles"]
    return f"""
Acceptance length τ of the mini pair (accepted drafts + the target's own token), greedy, float32,
{acceptance["protocol"]["max_new_tokens"]} new tokens, raw prompts. Texts equal to plain decoding, token for token: {equal}.

{acceptance_table(acceptance)}

{origin(acceptance)}.

Speed on a CPU, same target and prompts in one run ({protocol["prompts"]} HumanEval prompts,
{protocol["max_new_tokens"]} new tokens, float32, {protocol["threads"]} threads, prompt included): **{cpu["speedup"]:.2f}x** plain
cached decoding (by prompt: median {cpu["speedup_by_prompt"]["median"]:.2f}x, quartiles {low:.2f}x and {high:.2f}x). Peak memory of the longest
prompt: {memory["ratio"]:.2f} times target, drafter and caches. {origin(cpu)}.
"""


def main_text(readme: str) -> str:
    """Return the README with its results rendered anew."""
    head, rest = readme.split(BEGIN)
    return f"{head}{BEGIN}{render()}{END}{rest.split(END)[1]}"


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; fail when the README is stale.")
def main(check):
    """Bring the README's results in step with benchmarks/results."""
    path = ROOT / "README.md"
    text = main_text(path.read_text())
    if check and text != path.read_text():
        raise click.ClickException("README.md is stale: run `python benchmarks/tables.py`.")
    path.write_text(text)


if __name__ == "__main__":
    main()
