"""Run one SGLang engine through a list of steps: `python benchmarks/serving_job.py JOB.json RESULT.json`.

A process of its own, since an engine that fails takes its parents along; results are written after every step.
A step is `{"kind": "generate" | "soak", ...}`; see the functions below for their fields.
"""

import asyncio
import json
import random
import sys
import time
import uuid


def gpu_megabytes() -> float:
    """Return the memory in use on the first GPU, 0 without one."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


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
    seconds = time.perf_counter() - start
    result = {"seconds": seconds, "tokens": sum(len(output["ids"]) for output in outputs)}
    result["rounds"] = [output["rounds"] for output in outputs]
    if step.get("keep"):
        result["ids"] = [output["ids"] for output in outputs]
    return result


async def soak(engine, step: dict) -> dict:
    """Serve a mixed load: lengths, temperatures, aborts.

    Fields: `minutes`, `concurrency`, `vocabulary`, `longest` (tokens of prompt and of answer), `seed`.
    """
    rng, end = random.Random(step["seed"]), time.monotonic() + 60 * step["minutes"]
    counts = {"requests": 0, "failed": 0, "aborted": 0}
    memory = []

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
            memory.append(gpu_megabytes())
            await asyncio.sleep(5)

    await asyncio.gather(watch(), *(client() for _ in range(step["concurrency"])))
    # the first third warms caches and compiled kernels up
    settled = memory[len(memory) // 3 :] or memory
    return {**counts, "minutes": step["minutes"], "memory_growth_mb": settled[-1] - settled[0]}


STEPS = {"generate": generate, "soak": soak}


def main(job_file: str, result_file: str) -> None:
    """Start the engine, run the steps, write what there is after each."""
    import sglang

    with open(job_file) as file:
        job = json.load(file)
    started = time.perf_counter()
    engine = sglang.Engine(**job["engine"])
    results = {"start_seconds": time.perf_counter() - started, "steps": []}
    for step in job["steps"]:
        results["steps"].append(engine.loop.run_until_complete(STEPS[step["kind"]](engine, step)))
        with open(result_file, "w") as file:
            json.dump(results, file)
    try:
        # refused while a request holds a slot
        results["idle"] = bool(getattr(engine.flush_cache(), "success", True))
    finally:
        results["complete"] = True
        with open(result_file, "w") as file:
            json.dump(results, file)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
