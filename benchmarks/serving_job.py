"""Run one SGLang engine: `python benchmarks/serving_job.py ARGUMENTS.json`, steps on stdin, one JSON a line.

A process of its own, since an engine that fails takes its parents along. A step is `{"kind": KIND, "out": FILE, ...}`;
see `STEPS` for the kinds, and their functions for other fields. Its result appears in `FILE`, whole, when it is done.
"""

import asyncio
import collections
import gzip
import json
import random
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil


def host_bytes(process: psutil.Process) -> int:
    """Return the host memory a process holds, its part of what several share; 0 where it has ended since.

    Pages of files are left out: a library's count for less while other programs of the machine have it open.
    """
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # an engine compiles kernels in short-lived children
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def memory_megabytes() -> dict[str, float]:
    """Return what the processes of this engine hold: GPU memory (0 without a GPU) and host memory."""
    import torch

    me = psutil.Process()
    processes = (me, *me.children(recursive=True))
    host = sum(map(host_bytes, processes)) / 2**20
    if not torch.cuda.is_available():
        return {"gpu": 0.0, "host": host}
    # of the driver, not of the device, which other engines may share
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    rows = (line.split(", ") for line in subprocess.check_output(query, text=True).splitlines())
    held = {int(pid): float(used) for pid, used in rows}
    own = [held[process.pid] for process in processes if process.pid in held]
    if not own:
        raise RuntimeError(f"nvidia-smi lists none of this engine's processes, only {sorted(held)}.")
    return {"gpu": sum(own), "host": host}


def summary(output: dict) -> dict:
    """Keep what results need of one request."""
    meta = output["meta_info"]
    return {"ids": output["output_ids"], "rounds": meta.get("spec_verify_ct"), "prompt": meta["prompt_tokens"]}


async def generate(engine, step: dict) -> dict:
    """Decode prompts, never more than `concurrency` at a time.

    Fields: `prompts` (lists of token ids), `sampling`, `concurrency`, `keep` (return token ids too).
    """
    gate = asyncio.Semaphore(step["concurrency"])

    async def one(ids):
        async with gate:
            return summary(await engine.async_generate(input_ids=ids, sampling_params=step["sampling"]))

    start = time.perf_counter()
    outputs = await asyncio.gather(*(one(ids) for ids in step["prompts"]))
    return results(step, outputs, time.perf_counter() - start)


async def rounds(engine, step: dict) -> dict:
    """Decode all prompts at once and watch the first, whose outputs come round by round.

    Fields: those of [`generate`]. Adds `seen`: tokens and seconds at each of its outputs.
    """
    first, *others = step["prompts"]
    seen = []

    async def watched():
        stream = await engine.async_generate(input_ids=first, sampling_params=step["sampling"], stream=True)
        async for output in stream:
            seen.append((output["meta_info"]["completion_tokens"], time.perf_counter()))
        return summary(output)

    start = time.perf_counter()
    rest = (engine.async_generate(input_ids=ids, sampling_params=step["sampling"]) for ids in others)
    outputs = await asyncio.gather(watched(), *rest)
    seconds = time.perf_counter() - start
    return {**results(step, [outputs[0], *map(summary, outputs[1:])], seconds), "seen": seen}


def results(step: dict, outputs: list[dict], seconds: float) -> dict:
    """Return what a step has to say of its requests."""
    result = {"seconds": seconds, "tokens": sum(len(output["ids"]) for output in outputs)}
    result["rounds"] = [output["rounds"] for output in outputs]
    if step.get("keep"):
        result["ids"] = [output["ids"] for output in outputs]
    return result


async def profile(engine, step: dict) -> dict:
    """Decode prompts under the engine's profiler.

    Fields: those of [`generate`]. Adds `kernels_us`, the time of every kernel in all, their number `launches`,
    `busy_us`, in which any ran, and `span_us`, from the first to the last. Without a GPU operators are counted, nested
    ones twice.
    """
    import torch
    from sglang.srt.managers.io_struct import ProfileReq

    with tempfile.TemporaryDirectory() as folder:
        gpu = torch.cuda.is_available()
        request = ProfileReq(
            output_dir=folder, activities=["GPU" if gpu else "CPU"], with_stack=False, record_shapes=False
        )
        await engine.tokenizer_manager.start_profile(request)
        result = await generate(engine, step)
        await engine.tokenizer_manager.stop_profile()
        kinds = {"kernel", "gpu_memcpy", "gpu_memset"} if gpu else {"cpu_op"}
        times, spans = collections.Counter(), []
        for path in Path(folder).rglob("*.json*"):
            with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
                for event in json.load(file)["traceEvents"]:
                    if event.get("cat") in kinds:
                        times[event["name"][:120]] += event["dur"]
                        spans.append((event["ts"], event["ts"] + event["dur"]))
    return {**result, "kernels_us": dict(times.most_common()), "launches": len(spans), **covered(spans)}


def covered(spans: list[tuple[float, float]]) -> dict[str, float]:
    """Measure intervals: `busy_us` is what they cover, `span_us` reaches from the first start to the last end."""
    busy = reach = first = min(start for start, _ in spans)
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return {"busy_us": busy - first, "span_us": reach - first}


async def soak(engine, step: dict) -> dict:
    """Serve a mixed load: lengths, temperatures, aborts. Fixed prompts are decoded before and after it.

    Fields: `minutes`, `concurrency`, `vocabulary`, `longest` (tokens of a prompt), `seed`, and `probe`, a step of
    [`generate`].
    """
    rng = random.Random(step["seed"])
    counts = {"requests": 0, "failed": 0, "aborted": 0}
    memory = [memory_megabytes()]
    before = await generate(engine, step["probe"])
    end = time.monotonic() + 60 * step["minutes"]

    async def client():
        while time.monotonic() < end:
            length = round(step["longest"] ** rng.random())
            ids = [rng.randrange(step["vocabulary"]) for _ in range(length)]
            sampling = {"max_new_tokens": rng.randint(1, 256), "temperature": rng.choice([0.0, 0.0, 0.7, 1.0])}
            rid, abort = uuid.uuid4().hex, rng.random() < 0.1
            task = asyncio.ensure_future(engine.async_generate(input_ids=ids, sampling_params=sampling, rid=rid))
            if abort:
                await asyncio.sleep(rng.random() * 0.2)
                engine.tokenizer_manager.abort_request(rid)
            try:
                output = await asyncio.wait_for(task, 120)
                failed = not abort and not output["output_ids"]
            except Exception as error:
                print(f"request failed: {error!r}", file=sys.stderr)
                failed = not abort
            counts["requests"] += 1
            counts["aborted"] += abort
            counts["failed"] += failed

    async def watch():
        while time.monotonic() < end:
            memory.append(memory_megabytes())
            await asyncio.sleep(5)

    await asyncio.gather(watch(), *(client() for _ in range(step["concurrency"])))
    after = await generate(engine, step["probe"])
    # refused while a request holds a slot; one that was just aborted may, for a moment
    for _ in range(20):
        free = (await engine.tokenizer_manager.flush_cache()).success
        if free:
            break
        await asyncio.sleep(0.5)
    # the first third warms caches and compiled kernels up
    settled = memory[len(memory) // 3 :] or memory
    growth = {name: settled[-1][name] - settled[0][name] for name in settled[0]}
    return {
        **counts,
        "minutes": step["minutes"],
        "slots_free": free,
        "memory_growth_mb": growth["gpu"],
        "host_growth_mb": growth["host"],
        # about one a minute
        "memory_mb": memory[::12],
        "probe": {"before": before, "after": after},
    }


async def ready(engine, step: dict) -> dict:
    """Say that the engine has started."""
    return {}


STEPS = {"ready": ready, "generate": generate, "rounds": rounds, "profile": profile, "soak": soak}


def main(arguments_file: str) -> None:
    """Start the engine and run steps until there are no more."""
    import sglang

    engine = sglang.Engine(**json.loads(Path(arguments_file).read_text()))
    for line in sys.stdin:
        step = json.loads(line)
        out = Path(step["out"])
        result = engine.loop.run_until_complete(STEPS[step["kind"]](engine, step))
        part = out.with_suffix(".part")
        part.write_text(json.dumps(result))
        part.rename(out)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
