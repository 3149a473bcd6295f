"""Numbers of README and docs, rendered from `benchmarks/results/`: `python benchmarks/tables.py` rewrites them."""

import hashlib
import json
import textwrap
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


def speed_paragraph(result: dict) -> str:
    """Render speed and memory on a CPU."""
    protocol, spread = result["protocol"], result["speedup_by_prompt"]
    low, high = spread["quartiles"]
    return (
        f"Speed on a CPU, same target and prompts in one run ({protocol['prompts']} HumanEval prompts, "
        f"{protocol['max_new_tokens']} new tokens, float32, {protocol['threads']} threads, prompt included): "
        f"**{result['speedup']:.2f}x** plain cached decoding (by prompt: median {spread['median']:.2f}x, quartiles "
        f"{low:.2f}x and {high:.2f}x). Peak memory on the longest prompt: {result['memory']['ratio']:.2f} times "
        f"target, drafter and caches. {origin(result)}."
    )


def transfer_paragraph(result: dict) -> str:
    """Render speed and memory of publishing."""
    ours = result["dspine_hub"]
    peak = max(ours["push_peak_megabytes_above_interpreter"], ours["pull_peak_megabytes_above_interpreter"])
    return (
        f"Push and pull of a sharded {result['gigabytes']:g} GB bundle over loopback, checks of the bundle itself not "
        f"counted: {result['throughput_ratio']:.2f} times the throughput of plain huggingface_hub in the same run "
        f"({result['rounds']} rounds), at most {peak:.0f} MB above the interpreter. {origin(result)}."
    )


def ops_table(result: dict) -> str:
    """Render what DSpine's own work in a round costs on a GPU."""
    names = {
        "batch": ("batch", "{:d}"),
        "ours_us": ("DSpine, µs", "{:.0f}"),
        "over_floor": ("over its floor", "{:.1f}x"),
        "share_of_cycle": ("of a cycle", "{:.1%}"),
        "compile_us": ("torch.compile, µs", "{:.0f}"),
        "eager_us": ("reference, µs", "{:.0f}"),
        "dflash2_us": ("DFlash2's parts, µs", "{:.0f}"),
        "max_rel_err": ("error", "{:.1e}"),
    }
    lines = ["| " + " | ".join(head for head, _ in names.values()) + " |", "|" + "---|" * len(names)]
    for row in result["rows"]:
        cells = ["-" if row.get(name) is None else shape.format(row[name]) for name, (_, shape) in names.items()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ops_paragraph(result: dict) -> str:
    """Say what the table of operations was measured on, and what the transition alone gains."""
    shape, last = result["protocol"]["shape"], result["rows"][-1]
    gain = last["transition_hidden_space_us"] / last["transition_us"]
    blocks = sum(row["blocks"] for row in result["rows"])
    equal = sum(row["blocks"] * row["paths_equal"] for row in result["rows"])
    choice = ""
    if "candidates_us" in last:
        choice = ", the choice of candidates {candidates_us:.0f} µs (torch.topk: {candidates_torch_us:.0f})".format(
            **last
        )
    return (
        f"DSpine's own work in a round on a GPU: {shape['L']} injections, transition scores and walk of a Qwen3-8B "
        f"drafter's shapes (H {shape['H']}, R {shape['R']}, M {shape['M']}, block {shape['N']}, {shape['K']} "
        "candidates, random weights, bfloat16), one CUDA graph, weights cold. The floor is the larger of the bytes at "
        f"the measured copy bandwidth ({result['ceilings']['bytes_per_s'] / 1e12:.2f} TB/s) and the operations at the "
        f"measured matrix rate ({result['ceilings']['flops_per_s'] / 1e12:.0f} TFLOP/s); a cycle is backbone, LM "
        "head, top-16 and an 8B-shaped target's verification, without context. Error: against float64, largest of "
        f"states and scores. At batch {last['batch']} the transition takes 1/{gain:.0f} of its hidden-space form"
        f"{choice}. "
        f"Chosen tokens equal those of float64 scores in {equal / blocks:.2%} of {blocks} random blocks; the widest "
        f"tie broken the other way spans {max(row['widest_tie'] for row in result['rows']):.1e} of the scores' root "
        f"mean square. {origin(result)}."
    )


def ops_plot(result: dict, path: Path) -> None:
    """Draw the table of operations, marked with the result it was drawn from."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ops"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    batches = [row["batch"] for row in result["rows"]]
    lines = {
        "reference, eager": "eager_us",
        "reference, torch.compile": "compile_us",
        "DFlash2: convolutions and selector": "dflash2_us",
        "DSpine's kernels": "ours_us",
        "DSpine's floor": "floor_us",
    }
    for label, name in lines.items():
        values = [row.get(name) for row in result["rows"]]
        if all(value is not None for value in values):
            axes.plot(batches, values, marker="o", label=label, linestyle="--" if name == "floor_us" else "-")
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="µs a round", xticks=batches, xticklabels=batches)
    axes.set_title(f"What is added to a backbone's round, {result['machine']['device']}", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, format="svg", metadata={"Date": None, "Description": plot_mark(result)})
    pyplot.close(figure)


def plot_mark(result: dict) -> str:
    """Return the mark of a result inside its plot: figures of another result are stale."""
    return hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()


def conversion_paragraph(result: dict) -> str:
    """Render time and memory of a conversion."""
    return (
        f"Conversion of a {result['gigabytes']:.1f} GB drafter of Qwen3-8B's shape from SpecForge's layout to a "
        f"bundle, every tensor checked and hashed: {result['time_ratio']:.2f} times a plain copy of its files in the "
        f"same run ({result['rounds']} rounds, totals, until all is on disk, imports not counted), at most "
        f"{result['peak_megabytes']:.0f} MB of memory, interpreter and torch included. {origin(result)}."
    )


def forms_table(result: dict) -> str:
    """Render size, acceptance and speed of the mini drafter's stored forms."""
    lines = ["| mini drafter stored as | MB | τ pooled | τ per request | speed-up |", "|---|---|---|---|---|"]
    for name, form in result["forms"].items():
        means = f"{form['tau_pooled']:.2f} | {form['tau_per_request']:.2f} | {form['speedup']:.2f}x"
        lines.append(f"| {name} | {form['bytes'] / 1e6:.2f} | {means} |")
    protocol = result["protocol"]
    note = (
        f"Same run, {protocol['prompts']} HumanEval prompts, {protocol['max_new_tokens']} new tokens, greedy, "
        f"{protocol['dtype']}, {protocol['threads']} threads; transformers turns quantised weights back at load. "
        f"{origin(result)}."
    )
    return "\n".join([*lines, "", textwrap.fill(note, 118)])


def serving_parts(result: dict) -> list[str]:
    """Render what was seen of DSPINE in SGLang, as far as it was measured."""
    parts = []
    if "greedy" in result:
        parts.append(textwrap.fill(texts_paragraph(result), 118))
    if "round_us" in result:
        head = (
            "A draft-verify round in the engine at Qwen3-8B's shapes, random weights, one run: how much longer than "
            "with a DFlash drafter of the same backbone."
        )
        parts += [textwrap.fill(head, 118), rounds_table(result["round_us"])]
        if result["round_profile"]:
            parts.append(textwrap.fill(profile_paragraph(result["round_profile"]), 118))
    if "throughput" in result:
        # of the same run and the same concurrency
        first, tau = result["throughput"][0], result["greedy"]["by_concurrency"][0]["tau"]
        head = (
            "Tokens a second in the same run, against plain decoding. At "
            f"concurrency {first['concurrency']} a pass of the mini target takes {1e3 / first['plain']:.1f} ms, a "
            f"round with its draft {1e3 * tau / first['dspine']:.1f}."
        )
        parts += [textwrap.fill(head, 118), throughput_table(result["throughput"])]
    if "soak" in result:
        parts.append(textwrap.fill(soak_paragraph(result["soak"]), 118))
    places: dict[str, list[str]] = {}
    for name, own in result["origins"].items():
        places.setdefault(f"SGLang {own['versions']['sglang']}, {origin(own)}", []).append(f"`{name}`")
    listed = "".join(f" {', '.join(names)}: {place}." for place, names in places.items())
    file = "`benchmarks/results/sglang-h200.json`"
    return [*parts, textwrap.fill(f"The parts of {file} and where they were measured.{listed}", 118)]


def texts_paragraph(result: dict) -> str:
    """Render losslessness and acceptance in an engine."""
    greedy, tau, ranks = result["greedy"], result["tau"], result.get("greedy_tp2")
    levels = ", ".join(str(row["concurrency"]) for row in greedy["by_concurrency"])
    text = (
        "DSPINE in SGLang with the mini pair, CUDA graphs on: texts equal to the same engine's without a drafter for "
        f"at least {greedy['equal']} of {greedy['prompts']} HumanEval prompts of {greedy['max_new_tokens']} tokens at "
        f"concurrency {levels} ({greedy['dtype']}). A text that differs is judged where it first does: the float32 "
        f"target's logits of the two tokens lie {greedy['largest_gap']:.1e} apart at most"
    )
    right = [one["right"] for row in greedy["by_concurrency"] for one in row["divergences"]]
    text += f", and it prefers the text with the drafter in {right.count('speculative')} of {len(right)} cases. "
    control = [row["plain_beside_plain"] for row in greedy["by_concurrency"] if "plain_beside_plain" in row]
    if control:
        text += (
            "Plain decoding at the other levels, against plain decoding at the first: at least "
            f"{min(row['equal'] for row in control)} texts equal, {max(row['largest_gap'] for row in control):.1e} "
            "apart at most. "
        )
    text += f"Acceptance length {tau['sglang']:.2f}"
    text += f", in transformers' loop {tau['transformers']:.2f}." if "transformers" in tau else "."
    if ranks:
        text += (
            f" On two GPUs: {ranks['equal']} of {ranks['prompts']}, {ranks['by_concurrency'][0]['tau']:.2f}, gap at "
            f"most {ranks['largest_gap']:.1e}."
        )
    return text


def soak_paragraph(soak: dict) -> str:
    """Render an endurance run."""
    probes = [run["probe"] for run in soak["runs"]]
    # a result whose host memory was counted otherwise says how
    host = f" ({soak['host_memory']})" if "host_memory" in soak else ""
    return (
        f"{soak['minutes']:.0f} minutes of mixed load (prompts of 1 to 4,000 tokens, temperatures, aborts): "
        f"{soak['requests']} requests, {soak['aborted']} of them aborted, {soak['failed']} failed, GPU memory "
        f"{soak['memory_growth_mb']:+.0f} MB, host memory {soak['host_growth_mb']:+.0f} MB{host}; of "
        f"{probes[0]['prompts']} texts decoded before and after, {min(probe['equal'] for probe in probes)} are equal."
    )


# drafters that add to DFlash's round, and their names in results
ADDED = (("DFlash2", "dflash2"), ("DSpine", "dspine"))


def rounds_table(rows: list[dict]) -> str:
    """Render the cost of a round by drafter."""
    lines = [f"| batch | DFlash, ms | {' | '.join(name for name, _ in ADDED)} |", "|---|---|---|---|"]
    for row in rows:
        ratios = " | ".join(f"{row[f'{key}_over_dflash'] - 1:+.1%}" for _, key in ADDED)
        lines.append(f"| {row['batch']} | {row['dflash'] / 1000:.2f} | {ratios} |")
    return "\n".join(lines)


def profile_paragraph(profiles: list[dict]) -> str:
    """Render how much longer kernels run in a round, whatever the host does."""
    found = []
    for profile in profiles:
        base = profile["dflash"]["busy_us"]
        shown = [(name, profile[key]["busy_us"]) for name, key in ADDED if key in profile]
        ratios = (f"{name} {busy / base - 1:+z.1%}" for name, busy in shown)
        found.append(f"at batch {profile['batch']} {' and '.join(ratios)}")
    return f"The time in which a kernel runs, by a profile of the same engines: {', '.join(found)}."


def throughput_table(rows: list[dict]) -> str:
    """Render throughput as a ratio to plain decoding."""
    lines = ["| concurrency | its DFlash backbone alone | DSpine |", "|---|---|---|"]
    for row in rows:
        ratios = " | ".join(f"{row[name] / row['plain']:.2f}x" for name in ("dflash", "dspine"))
        lines.append(f"| {row['concurrency']} | {ratios} |")
    return "\n".join(lines)


def history_table(entries: list[dict], shape: str) -> str:
    """Render a figure over time, a row a measured commit, the newest first."""
    batches = list(entries[-1]["values"])
    lines = [f"| measured on | date | {' | '.join(f'batch {batch}' for batch in batches)} |"]
    lines.append("|" + "---|" * (2 + len(batches)))
    for entry in reversed(entries):
        values = [entry["values"].get(batch) for batch in batches]
        cells = ["-" if value is None else shape.format(value) for value in values]
        lines.append(f"| `{entry['commit']}` | {entry['date']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def acceptance_parts() -> list[str]:
    """Render what the mini drafter accepts, and against which control."""
    acceptance = load("mini-acceptance.json")
    equal = ", ".join(f"{name} {count}" for name, count in acceptance["equal_to_plain"].items())
    protocol = (
        "Acceptance length τ of the mini pair (accepted drafts + the target's own token), greedy, float32, "
        f"{acceptance['protocol']['max_new_tokens']} new tokens, raw prompts. Texts equal to plain decoding, token "
        f"for token: {equal}. {origin(acceptance)}."
    )
    return [textwrap.fill(protocol, 118), acceptance_table(acceptance)]


def history_parts() -> list[str]:
    """Render earlier results."""
    history = load("history.json")
    return [
        "Microseconds of a round of the operations, by batch size. The kernels of `6f8d8f667150` and later keep what "
        "tells candidates apart in higher precision.",
        history_table(history["ops_us"], "{:.0f}"),
        "A draft-verify round in the engine, over one with a DFlash drafter of the same backbone.",
        history_table(history["round_over_dflash"], "{:.3f}x"),
    ]


def sections() -> dict[str, list[str]]:
    """Render the page of results: heading -> paragraphs, tables and plots."""
    ops = load("ops-h200.json")
    return {
        "Acceptance": acceptance_parts(),
        "On a CPU": [
            textwrap.fill(speed_paragraph(load("mini-cpu.json")), 118),
            forms_table(load("mini-quantized.json")),
        ],
        "Operations on a GPU": [
            textwrap.fill(ops_paragraph(ops), 118),
            ops_table(ops),
            "![microseconds a round by batch size](../benchmarks/results/ops-h200.svg)",
        ],
        "In SGLang": serving_parts(load("sglang-h200.json")),
        "Publishing and converting": [
            textwrap.fill(transfer_paragraph(load("push.json")), 118),
            textwrap.fill(conversion_paragraph(load("convert.json")), 118),
        ],
        "History": history_parts(),
    }


def results_page() -> str:
    """Render everything between the markers of docs/results.md."""
    parts = [""]
    for heading, body in sections().items():
        parts += [f"## {heading}", *body]
    return "\n\n".join([*parts, ""])


def headline() -> str:
    """Render the README's three numbers, each with its context."""
    tables, cpu, served = load("mini-acceptance.json"), load("mini-cpu.json"), load("sglang-h200.json")
    ours, control = (tables["drafters"][name]["humaneval"]["tau_pooled"] for name in ("dspine", "backbone"))
    first, last = served["round_us"][0], served["round_us"][-1]
    plain = served["throughput"][0]["plain"]
    lines = [
        f"- **{cpu['speedup']:.2f}x** plain decoding on two CPU cores, the mini pair over "
        f"{cpu['protocol']['prompts']} HumanEval prompts, texts equal token for token. Its target is a toy of 10 M "
        f"parameters that answers in {1e3 / plain:.1f} ms on an H200: this is not your 8B.",
        f"- **τ {ours:.2f} against {control:.2f}** tokens a round with and without DSpine's two parts on the same "
        "backbone, data and steps (one seed, the same prompts).",
        f"- **{first['dspine_over_dflash'] - 1:+.1%} at batch {first['batch']}, {last['dspine_over_dflash'] - 1:+.1%} "
        f"at {last['batch']}**: what that costs a draft-verify round over a DFlash drafter, in SGLang on an H200 at "
        "Qwen3-8B's shapes (random weights).",
    ]
    wrapped = [textwrap.fill(line, 118, subsequent_indent="  ") for line in lines]
    return "\n" + "\n".join(wrapped) + "\n"


# page -> what stands between its markers
PAGES = {"README.md": headline, "docs/results.md": results_page}


def rendered(path: Path, body: str) -> str:
    """Return a page with what lies between its markers replaced."""
    head, rest = path.read_text().split(BEGIN)
    return f"{head}{BEGIN}{body}{END}{rest.split(END)[1]}"


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; fail when a page is stale.")
def main(check):
    """Bring README and docs in step with benchmarks/results."""
    ops, plot = load("ops-h200.json"), RESULTS / "ops-h200.svg"
    for name, body in PAGES.items():
        text = rendered(ROOT / name, body())
        if check and text != (ROOT / name).read_text():
            raise click.ClickException(f"{name} is stale: run `python benchmarks/tables.py`.")
        (ROOT / name).write_text(text)
    if not check:
        ops_plot(ops, plot)
    elif not plot.exists() or plot_mark(ops) not in plot.read_text():
        raise click.ClickException(f"{plot.name} is stale: run `python benchmarks/tables.py`.")


if __name__ == "__main__":
    main()
