"""Sampling: the joint distribution of three tokens is the target's, by a chi-square test."""

import math

import pytest
import torch
from helpers.scripted import PROMPT
from helpers.tiny import build_drafter, build_target
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspine_hub.generation_dspine import dspine_decode

V, NEW, SAMPLES = 6, 3, 2000
SAMPLED_PROMPT = [2, 5, 0, 1]


@pytest.fixture(scope="module")
def small():
    """A target of six tokens, small enough to enumerate, and a drafter of two slots with four candidates."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    target = build_target(seed=11, vocab_size=V, num_key_value_heads=1, initializer_range=0.35, **sizes)
    drafter = build_drafter(
        target,
        seed=2,
        num_hidden_layers=1,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        target_layer_ids=[0],
        block_size=3,
        transfer_rank=4,
        message_size=3,
        num_candidates=4,
    )
    return target, drafter


def warp(prefix, logits, temperature=1.0, top_k=None, top_p=None, repetition_penalty=None):
    """Compute `p` from logits `[V]`, in plain numbers."""
    values = logits.double().tolist()
    if repetition_penalty is not None:
        for token in set(prefix):
            values[token] = (
                values[token] / repetition_penalty if values[token] > 0 else values[token] * repetition_penalty
            )
    values = [value / temperature for value in values]
    order = sorted(range(len(values)), key=lambda token: -values[token])
    if top_k is not None:
        order = order[:top_k]
    weights = {token: math.exp(values[token] - values[order[0]]) for token in order}
    if top_p is not None:
        total, kept, mass = sum(weights.values()), {}, 0.0
        for token in order:
            if mass >= top_p:
                break
            kept[token] = weights[token]
            mass += weights[token] / total
        weights = kept
    total = sum(weights.values())
    return [weights.get(token, 0.0) / total for token in range(len(values))]


def conditional(target, **options):
    """Return a cached function of a text that gives the target's exact next-token distribution."""
    cache = {}

    def probabilities(text):
        key = tuple(text)
        if key not in cache:
            with torch.no_grad():
                cache[key] = warp(text, target(torch.tensor([text])).logits[0, -1], **options)
        return cache[key]

    return probabilities


def joint(probabilities):
    """Enumerate the distribution of `NEW` tokens after the prompt, `{tokens: probability}`."""
    table = {(): 1.0}
    for _ in range(NEW):
        table = {
            (*tokens, token): mass * p
            for tokens, mass in table.items()
            for token, p in enumerate(probabilities([*SAMPLED_PROMPT, *tokens]))
            if p > 0
        }
    return table


def chi_square_p_value(counts, table, samples):
    """P-value of counts under `table`; cells with fewer than five expected are merged."""
    statistic, cells, rest_expected, rest_found = 0.0, 0, 0.0, 0
    for tokens, mass in table.items():
        expected, found = samples * mass, counts.get(tokens, 0)
        if expected < 5:
            rest_expected, rest_found = rest_expected + expected, rest_found + found
        else:
            statistic += (found - expected) ** 2 / expected
            cells += 1
    if rest_expected > 0:
        # a rest expected below one is judged as if it were one: a few hits there must not decide
        statistic += (rest_found - rest_expected) ** 2 / max(rest_expected, 1.0)
        cells += 1
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def draft_of(tokens, candidates, q):
    return torch.tensor(tokens), torch.tensor(candidates), torch.tensor(q, dtype=torch.float32)


def sampled_policy(kind, probabilities, generator):
    """Draft from a `q` near the target's `p` (`near`) or far from it (`far`), over four of six candidates."""

    def policy(text, temperature):
        text, tokens, candidates, rows = list(text), [], [], []
        for _ in range(2):
            p = probabilities(text)
            if kind == "near":
                ids = sorted(range(V), key=lambda token: -p[token])[:4]
                weights = [p[token] + 0.01 for token in ids]
            else:
                # mostly the tokens the target likes least, with steep weights
                ids = sorted(range(V), key=lambda token: p[token])[1:5]
                weights = [0.55, 0.25, 0.15, 0.05]
            q = [weight / sum(weights) for weight in weights]
            token = ids[int(torch.multinomial(torch.tensor(q), 1, generator=generator))]
            tokens.append(token)
            candidates.append(ids)
            rows.append(q)
            text.append(token)
        return draft_of(tokens, candidates, rows)

    return policy


def processors_of(temperature=1.0, top_k=None, top_p=None, repetition_penalty=None):
    """Build what `generate` builds from these options, in its order."""
    out = LogitsProcessorList()
    if repetition_penalty is not None:
        out.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if temperature != 1.0:
        out.append(TemperatureLogitsWarper(temperature))
    if top_k is not None:
        out.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        out.append(TopPLogitsWarper(top_p))
    return out


OPTIONS = [
    pytest.param({}, id="T=1"),
    pytest.param({"temperature": 0.7}, id="T=0.7"),
    pytest.param({"temperature": 1.3, "top_k": 3}, id="top-k"),
    pytest.param({"temperature": 0.9, "top_p": 0.8}, id="top-p"),
    pytest.param({"temperature": 0.8, "repetition_penalty": 1.8}, id="penalty"),
]


@pytest.mark.parametrize(
    ("options", "kind", "samples"),
    [
        # a near `q` and a far one, with the warpers that are easiest to get wrong
        pytest.param({"temperature": 0.9, "top_p": 0.8}, "near", 600, id="near,top-p,600"),
        pytest.param({"temperature": 0.8, "repetition_penalty": 1.8}, "far", 600, id="far,penalty,600"),
        *(
            pytest.param(options.values[0], kind, SAMPLES, id=f"{kind},{options.id}", marks=pytest.mark.slow)
            for options in OPTIONS
            # the random drafter is one more far `q`; two options of it are enough
            for kind in ("near", "far", *(["real"] if options.id in ("T=0.7", "top-p") else []))
        ),
    ],
)
def test_sampled_text_has_the_targets_distribution(small, script, options, kind, samples):
    """Catches acceptance by `u < p`, a residual that is `p` itself, a `q` of another row, processors left out of `p`.

    The joint distribution of three tokens is enumerated. The seed is fixed, so the outcome is too: a right loop gets
    one p-value, and 1e-4 leaves no reason to choose the seed.
    """
    target, drafter = small
    probabilities = conditional(target, **options)
    generator = torch.Generator().manual_seed(17)
    processors = processors_of(**options)
    config = GenerationConfig(
        do_sample=True, temperature=options.get("temperature", 1.0), return_dict_in_generate=True
    )
    stop = StoppingCriteriaList([MaxLengthCriteria(len(SAMPLED_PROMPT) + NEW)])
    ids = torch.tensor([SAMPLED_PROMPT])
    counts, accepted, reached = {}, 0, 0
    for _ in range(samples):
        if kind != "real":
            # the real pass adds nothing here but time
            script(drafter, sampled_policy(kind, probabilities, generator), SAMPLED_PROMPT, run_real=False)
        found = dspine_decode(
            target,
            ids,
            drafter=drafter,
            logits_processor=processors,
            stopping_criteria=stop,
            generation_config=config,
            generator=generator,
        )
        tokens = tuple(found.sequences[0, len(SAMPLED_PROMPT) :].tolist())
        counts[tokens] = counts.get(tokens, 0) + 1
        accepted += sum(found.statistics.accepted)
        reached += 2 * found.statistics.rounds
    table = joint(probabilities)
    assert math.isclose(sum(table.values()), 1.0, rel_tol=1e-9)
    assert set(counts) <= set(table), "a token of probability 0 was emitted"
    assert chi_square_p_value(counts, table, samples) > 1e-4
    if kind == "near":
        assert accepted / reached > 0.6
    if kind == "far":
        assert accepted / reached < 0.5


@pytest.mark.slow
def test_sampled_text_through_generate_has_the_targets_distribution(small):
    """Catches a temperature or top-k that `spec_generate` hands to one side only."""
    target, drafter = small
    probabilities = conditional(target, temperature=0.7, top_k=4)
    generator = torch.Generator().manual_seed(3)
    counts = {}
    for _ in range(SAMPLES):
        found = drafter.spec_generate(
            target, torch.tensor([SAMPLED_PROMPT]), NEW, temperature=0.7, top_k=4, generator=generator
        )
        tokens = tuple(found[0, len(SAMPLED_PROMPT) :].tolist())
        counts[tokens] = counts.get(tokens, 0) + 1
    table = joint(probabilities)
    assert set(counts) <= set(table)
    assert chi_square_p_value(counts, table, SAMPLES) > 1e-4


@pytest.mark.parametrize(
    "chosen", [{"do_sample": True, "temperature": 0.7}, {"do_sample": False}], ids=["sample", "greedy"]
)
def test_an_unset_temperature_follows_the_targets_generation_config(make_target, monkeypatch, chosen):
    """Catches a default of the loop that overrides the target's published settings."""
    target = make_target()
    target.generation_config.update(**chosen)
    drafter = build_drafter(target)
    seen, real = [], drafter.draft

    def draft(context, anchor, temperature, *args):
        seen.append(temperature)
        return real(context, anchor, temperature, *args)

    monkeypatch.setattr(drafter, "draft", draft, raising=False)
    drafter.spec_generate(target, torch.tensor([PROMPT]), 3)
    assert set(seen) == {0.7 if chosen["do_sample"] else 0.0}


def test_q_equal_to_p_is_always_accepted(small, script):
    """Catches a comparison that rejects at `u * q == p`, or a `q` looked up by position instead of by token."""
    target, drafter = small
    probabilities = conditional(target)
    generator = torch.Generator().manual_seed(0)

    def policy(text, temperature):
        text, tokens, candidates, rows = list(text), [], [], []
        for step in range(2):
            # another order a slot, so a position is no token
            ids = [(token + step + 1) % V for token in range(V)]
            q = [probabilities(text)[token] for token in ids]
            tokens.append(ids[int(torch.multinomial(torch.tensor(q), 1, generator=generator))])
            candidates.append(ids)
            rows.append(q)
            text.append(tokens[-1])
        return draft_of(tokens, candidates, rows)

    script(drafter, policy, SAMPLED_PROMPT)
    found = drafter.spec_generate(
        target,
        torch.tensor([SAMPLED_PROMPT]),
        90,
        temperature=1.0,
        top_k=0,
        generator=generator,
        return_dict_in_generate=True,
    )
    # float32 against float64: a draft in 1e6 may be rejected, and that one leaves a residual of noise
    assert found.statistics.accepted == [2] * found.statistics.rounds
    assert found.statistics.rounds == 30
