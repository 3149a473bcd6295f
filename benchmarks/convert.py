"""Conversion of a drafter of Qwen3-8B's shape: time against a plain copy of its files, and memory, in one run.

`python benchmarks/convert.py --out benchmarks/results/convert.json`. The drafter is random, in SpecForge's layout, one
file, 2.5 GB in bfloat16; it becomes a bundle with every check and hash. Each step runs in a fresh process that reports
its seconds until everything is on disk, those until it returned, imports not counted, and its peak memory, imports
counted. Copy and conversion take turns, whoever begins changes, and each waits for an idle machine. A time is printed
only when the bundle's tensors have the sha256 of the source's.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from report import out_option, write_report

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"hidden": 4096, "layers": 5, "heads": 32, "kv": 8, "dim": 128, "mlp": 12288, "taps": 5}
TRANSFER = {"vocabulary": 151936, "rank": 1024, "message": 512}
PIECE = 1 << 24

MEASURE = """
import json, os, sys, time
def peak():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return int(lines["VmHWM"].split()[0]) * 1024
source, out = sys.argv[1:]
"""
STEPS = {
    "copy": """
import shutil
start = time.perf_counter()
shutil.copytree(source, out)
""",
    "convert": """
from dspine_hub.api import convert
import dspine_hub.publish.bundle, dspine_hub.conversion.convert, dspine_hub.modeling_dspine
import dspine_hub.checkpoints.pairing
start = time.perf_counter()
convert(source, out)
""",
}
REPORT = """
returned = time.perf_counter() - start
os.sync()
print(json.dumps({"seconds": time.perf_counter() - start, "returned": returned, "peak_bytes": peak()}))
"""


def shapes() -> dict[str, list[int]]:
    """List the tensors of such a drafter."""
    hidden, rank, message = SIZES["hidden"], TRANSFER["rank"], TRANSFER["message"]
    queries, keys = SIZES["heads"] * SIZES["dim"], SIZES["kv"] * SIZES["dim"]
    found = {"fc.weight": [hidden, SIZES["taps"] * hidden], "hidden_norm.weight": [hidden], "norm.weight": [hidden]}
    for layer in range(SIZES["layers"]):
        name = f"layers.{layer}."
        found |= {name + f"{norm}_layernorm.weight": [hidden] for norm in ("input", "post_attention")}
        found |= {name + f"self_attn.{norm}_norm.weight": [SIZES["dim"]] for norm in "qk"}
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            found[name + f"self_attn.{part}_proj.weight"] = [rows, hidden]
        found[name + "self_attn.o_proj.weight"] = [hidden, queries]
        found |= {name + f"mlp.{part}_proj.weight": [SIZES["mlp"], hidden] for part in ("gate", "up")}
        found[name + "mlp.down_proj.weight"] = [hidden, SIZES["mlp"]]
        found[f"injection.readouts.{layer}.weight"] = [rank, hidden]
        found[f"injection.writes.{layer}.weight"] = [hidden, message]
    found |= {f"injection.{part}.weight": [message, rank] for part in ("message", "receiver_gate", "predecessor_gate")}
    return found | {"injection.bias": [message], "transfer_codes": [TRANSFER["vocabulary"], rank]}


def write_drafter(folder: Path) -> int:
    """Write the random drafter; returns the bytes of its weights."""
    import numpy as np

    folder.mkdir()
    header, end = {}, 0
    for name, shape in shapes().items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header["transfer_ready"] = {"dtype": "BOOL", "shape": [], "data_offsets": [end, end + 1]}
    text, generator = json.dumps(header).encode(), np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for first in range(0, end, PIECE):
            count = min(PIECE, end - first) // 2
            values = generator.standard_normal(count, dtype=np.float32) * 0.02
            # the upper half of a float32 is a bfloat16
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        file.write(b"\x01")
    (folder / "config.json").write_text(json.dumps(config()))
    # writing it back must not slow down whoever comes first
    os.sync()
    return end + 1


def config() -> dict:
    """Write a config as SpecForge does, with the target's record, so that no target is needed."""
    record = {"id": "Qwen/Qwen3-8B", "revision": None, "hidden_size": SIZES["hidden"], "num_hidden_layers": 36}
    record |= {"vocab_size": 151669, "padded_vocab_size": TRANSFER["vocabulary"], "tokenizer_sha256": None}
    record |= {"lm_head_sha256": None, "chat_template_sha256": None, "enable_thinking": False}
    fields = {"architectures": ["DSpineDraftModel"], "model_type": "qwen3", "block_size": 16, "is_causal": True}
    fields |= {"hidden_size": SIZES["hidden"], "intermediate_size": SIZES["mlp"], "head_dim": SIZES["dim"]}
    fields |= {"num_attention_heads": SIZES["heads"], "num_key_value_heads": SIZES["kv"]}
    fields |= {"num_hidden_layers": SIZES["layers"], "num_target_layers": 36, "max_position_embeddings": 40960}
    fields |= {"vocab_size": TRANSFER["vocabulary"], "rope_theta": 1000000.0, "rms_norm_eps": 1e-6}
    fields["dflash_config"] = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
    fields["dspine_config"] = {"transfer_rank": TRANSFER["rank"], "message_size": TRANSFER["message"], "top_k": 16}
    return fields | {"dspine_hub": {"target": record}}


def wait_until_idle(limit_s: float = 30) -> None:
    """Wait until other work leaves the processors alone for a second: the conversion uses two, the copy one."""

    def ticks():
        values = [int(value) for value in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        return values[3], sum(values)

    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        idle, total = ticks()
        time.sleep(1)
        now_idle, now_total = ticks()
        if now_idle - idle > 0.95 * (now_total - total):
            return


def run_step(step: str, source: Path, out: Path) -> dict:
    """Run one step in a fresh process, with the source in the page cache and everything written back before."""
    with (source / "model.safetensors").open("rb") as file:
        while file.read(PIECE):
            pass
    os.sync()
    wait_until_idle()
    command = [sys.executable, "-c", MEASURE + STEPS[step] + REPORT, str(source), str(out)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{step} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def check_equal(source: Path, out: Path) -> None:
    """Stop unless both hold the same tensors, by their bytes."""
    from dspine_hub.publish.compare import diff

    changes = diff(source, out).tensors
    if changes:
        raise SystemExit(f"the conversion changed {sorted(changes)}")


@click.command()
@click.option("--rounds", default=6, show_default=True, type=click.IntRange(min=2), help="Turns of each; even.")
@out_option
def main(rounds, out):
    """Compare conversion and copy, and print one JSON object."""
    if rounds % 2:
        raise click.BadParameter(f"`--rounds` must be even, got {rounds}: each comes first in half of the turns.")
    runs = {step: [] for step in STEPS}
    with tempfile.TemporaryDirectory() as place:
        source = Path(place) / "source"
        size = write_drafter(source)
        for turn in range(rounds):
            for step in list(STEPS)[:: 1 if turn % 2 == 0 else -1]:
                runs[step].append(run_step(step, source, Path(place) / step))
                click.echo(f"round {turn + 1}, {step}: {runs[step][-1]}", err=True)
            if turn == 0:
                check_equal(source, Path(place) / "convert")
            for step in STEPS:
                shutil.rmtree(Path(place) / step)
    turns = {key: {step: [run[key] for run in runs[step]] for step in STEPS} for key in ("seconds", "returned")}
    # totals: a disk that wrote much lately may slow down, and each comes first in half of the turns
    ratios = {key: sum(of["convert"]) / sum(of["copy"]) for key, of in turns.items()}
    peak, bound = max(run["peak_bytes"] for run in runs["convert"]), 1.2 * size + 500e6
    report = {
        "gigabytes": size / 1e9,
        "rounds": rounds,
        "time_ratio": ratios["seconds"],
        "time_ratio_until_returned": ratios["returned"],
        "seconds": turns["seconds"],
        "seconds_until_returned": turns["returned"],
        "peak_megabytes": peak / 1e6,
        "peak_bound_megabytes": bound / 1e6,
    }
    write_report(report, out)


if __name__ == "__main__":
    main()
