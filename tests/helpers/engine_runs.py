"""Runs of real SGLang engines on the CPU, and what transformers' own loop does with the same prompts."""

import functools
import json
import os
from pathlib import Path

import pytest
import torch
from helpers import sglang_engines
from helpers.overlays import OVERLAY_FOLDER
from helpers.paths import MINI, ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspine_hub.checkpoints.loading import load_drafter_checkpoint

ENGINES = os.environ.get("DSPINE_ENGINES")
OLDEST, MIDDLE, NEWEST = sorted(sglang_engines.ENGINES)
LIMIT = 240

PROMPTS = (
    "def fibonacci(n):\n",
    "import os\n",
    "class Stack:\n    def push(self, item):\n",
    "for i in range(",
    "    try:\n        with open(path) as f:\n            return json.load(f)\n    except",
)
TOKENS = 48

NEEDS_ENGINES = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        not (ENGINES and OVERLAY_FOLDER), reason="needs DSPINE_ENGINES, see tests/helpers/sglang_engines.py"
    ),
]


def start(version, *command, **variables):
    """Run a command under one SGLang release and wait for its end."""
    env = sglang_engines.environment(Path(ENGINES), Path(OVERLAY_FOLDER), version, **variables)
    python = sglang_engines.python_of(Path(ENGINES))
    return sglang_engines.run([python, *command], LIMIT, env=env, cwd=ENGINES)


def engine_arguments(drafter=None, algorithm="DSPINE", **overrides):
    arguments = {"model_path": MINI / "target", "device": "cpu", "attention_backend": "torch_native"}
    arguments |= {"dtype": "float32", "max_total_tokens": 8192, "max_running_requests": 48, "random_seed": 0}
    arguments |= {"disable_cuda_graph": True, "log_level": "warning", "grammar_backend": "none"}
    arguments |= {"skip_server_warmup": True, "disable_radix_cache": True}
    if drafter is not None:
        arguments |= {"speculative_algorithm": algorithm, "speculative_draft_model_path": drafter}
    return {**arguments, **overrides}


def generate(version, place, engine, calls, **variables):
    """Run one engine; returns a list of outputs a call."""
    job, result = place / "job.json", place / "result.json"
    job.write_text(json.dumps({"engine": engine, "calls": calls}, default=str))
    done = start(version, ROOT / "tests" / "helpers" / "sglang_job.py", job, result, **variables)
    assert result.is_file(), done.stderr[-4000:]
    return json.loads(result.read_text())


def greedy(ids):
    return {"input_ids": ids, "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}}


@functools.cache
def prompt_ids():
    tokenizer = AutoTokenizer.from_pretrained(MINI / "target")
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


@functools.cache
def reference_pair():
    target = AutoModelForCausalLM.from_pretrained(MINI / "target", dtype="float32").eval()
    return target, load_drafter_checkpoint(MINI / "drafter").float().bind(target)


@functools.cache
def loop_rounds():
    """Rounds of transformers' loop for the prompts, and its texts."""
    target, drafter = reference_pair()
    rounds, texts = [], []
    for ids in prompt_ids():
        output = drafter.spec_generate(
            target, torch.tensor([ids]), TOKENS, temperature=0.0, return_dict_in_generate=True, eos_token_id=None
        )
        rounds.append(output.statistics.rounds)
        texts.append(output.sequences[0, len(ids) :].tolist())
    return rounds, texts


def assert_same_acceptance(outputs):
    """Catches a drafter that is served otherwise than it was trained: the text stays right, the rounds do not."""
    rounds, _ = loop_rounds()
    found = [output["rounds"] for output in outputs]
    # float32 sums in another order may turn a draft; the engine counts a round in which a text ends as whole
    assert abs(sum(found) - sum(rounds)) <= 0.02 * sum(rounds), (found, rounds)
