"""The loop: the target's own text, greedy or sampled, whatever the drafter says.

Random drafters accept almost nothing, so most tests replace `draft` by one with a chosen number of right drafts; the
real pass still runs under it (see `ScriptedDraft`).
"""

import itertools
import math

import pytest
import torch
import transformers
from conftest import build_drafter, build_target, drafts_with_errors, target_record
from packaging.version import Version
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from dspine_hub.configuration_dspine import tokenizer_fingerprint
from dspine_hub.generation_dspine import (
    DSpineGenerateOutput,
    DSpineStatistics,
    TapRecorder,
    dspine_decode,
    spec_generate,
    summarize,
)
from dspine_hub.modeling_dspine import DSpineDraft

PROMPT = [3, 1, 4, 15, 92, 65, 35]
SLOTS = 4

PLANS = [
    pytest.param([0], id="none"),
    pytest.param([SLOTS], id="all"),
    pytest.param([0, 1, 2, 3, 4, 4, 0, 3, 1, 4, 2], id="every-count"),
]


class Forbid(LogitsProcessor):
    """Forbid the token that stands three back, and favour one that depends on the length: any wrong prefix shows."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        if input_ids.shape[1] > 2:
            scores.scatter_(1, input_ids[:, -3:-2], -torch.inf)
        scores[:, input_ids.shape[1] % 97] += 2.0
        return scores


PROCESSORS = [
    pytest.param({}, id="plain"),
    pytest.param({"repetition_penalty": 1.7}, id="repetition_penalty"),
    pytest.param({"no_repeat_ngram_size": 2}, id="no_repeat_ngram"),
    pytest.param({"logits_processor": LogitsProcessorList([Forbid()])}, id="custom"),
    pytest.param({"bad_words_ids": [[20], [76, 92]], "repetition_penalty": 1.2}, id="bad_words+penalty"),
]

# stops of its own, so its text is no reference for a script
STOPPING = pytest.param({"min_new_tokens": 6, "eos_token_id": list(range(0, 97, 3))}, id="min_new_tokens")


def greedy(target, prompt, new, **kwargs):
    """Return the target's own greedy text, prompt included."""
    ids = torch.tensor([prompt])
    return target.generate(ids, do_sample=False, max_new_tokens=new, **kwargs)[0].tolist()


def follow(target, prompt, right, text=None, length=40, **kwargs):
    """Make a policy that drafts the target's greedy text with errors; stops are left out of the reference."""
    text = greedy(target, prompt, length, **kwargs) if text is None else text
    return drafts_with_errors(text, right, SLOTS, target.config.vocab_size)


class Recorder(BaseStreamer):
    """Keep what a streamer is given."""

    def __init__(self):
        self.put_values, self.ends = [], 0

    def put(self, value):
        self.put_values.append(value.clone())

    def end(self):
        self.ends += 1


# -- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", PROCESSORS)
@pytest.mark.parametrize("right", PLANS)
def test_greedy_text_is_the_targets(target, drafter, script, kwargs, right):
    """Catches a token verified by the wrong row, a processor given a wrong prefix, a cache cropped one short."""
    reference = greedy(target, PROMPT, 40, **kwargs)
    script(drafter, follow(target, PROMPT, right, reference), PROMPT)
    found = drafter.spec_generate(
        target, torch.tensor([PROMPT]), 30, temperature=0, return_dict_in_generate=True, **kwargs
    )
    assert found.sequences.tolist() == [greedy(target, PROMPT, 30, **kwargs)]
    planned = list(itertools.islice(itertools.cycle(right), found.statistics.rounds))
    assert found.statistics.accepted == planned


@pytest.mark.parametrize("kwargs", [*PROCESSORS, STOPPING])
def test_greedy_text_is_the_targets_with_real_drafts(target, make_drafter, kwargs):
    """Catches an output that depends on how good the drafts are."""
    drafter = make_drafter(seed=4)
    found = drafter.spec_generate(target, torch.tensor([PROMPT]), 20, temperature=0, **kwargs)
    assert found.tolist() == [greedy(target, PROMPT, 20, **kwargs)]


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 23])
@pytest.mark.parametrize("right", PLANS)
def test_prompts_of_any_length(target, drafter, script, length, right):
    """Catches a prompt shorter than the block, down to one token, whose context is a single row."""
    prompt = [(7 * i + 3) % 96 for i in range(length)]
    script(drafter, follow(target, prompt, right), prompt)
    found = drafter.spec_generate(target, torch.tensor([prompt]), 17, temperature=0)
    assert found.tolist() == [greedy(target, prompt, 17)]


@pytest.mark.parametrize("new", range(1, 10))
@pytest.mark.parametrize("right", PLANS)
def test_max_new_tokens_is_never_overshot(target, drafter, script, new, right):
    """Catches a last round that emits its whole block: 1 to 9 tokens end at every place of a block of 4 drafts."""
    script(drafter, follow(target, PROMPT, right), PROMPT)
    found = drafter.spec_generate(target, torch.tensor([PROMPT]), new, temperature=0)
    assert found.tolist() == [greedy(target, PROMPT, new)]
    assert found.shape[1] == len(PROMPT) + new


@pytest.mark.parametrize("position", range(7))
@pytest.mark.parametrize("right", PLANS)
def test_stop_tokens_end_the_text_where_they_stand(target, drafter, script, position, right):
    """Catches a stop token read only as the last of a round, or one that the drafts behind it outlive."""
    text = greedy(target, PROMPT, 40)
    new = text[len(PROMPT) :]
    stop = new[position]
    first = new.index(stop) + 1
    script(drafter, follow(target, PROMPT, right, text), PROMPT)
    found = drafter.spec_generate(target, torch.tensor([PROMPT]), 30, temperature=0, stop_token_ids=[stop, 96])
    assert found.tolist() == [text[: len(PROMPT) + first]]
    assert found.tolist() == [greedy(target, PROMPT, 30, eos_token_id=[stop, 96])]


def test_the_targets_own_stop_tokens_hold_and_can_be_replaced(make_target):
    """Catches a loop that ignores the target's generation config, or cannot switch its stop tokens."""
    target = make_target()
    drafter = build_drafter(target)
    text = greedy(target, PROMPT, 12)
    stop = text[len(PROMPT) + 4]
    target.generation_config.eos_token_id = stop
    ids = torch.tensor([PROMPT])
    found = drafter.spec_generate(target, ids, 12, temperature=0)
    assert found.tolist() == [greedy(target, PROMPT, 12)]
    assert int(found[0, -1]) == stop
    assert drafter.spec_generate(target, ids, 12, temperature=0, stop_token_ids=[96]).tolist() == [text]


class StopAfter(StoppingCriteria):
    """Stop at the third new token below 30, or at `limit` tokens: reads the text, not only its last token."""

    def __init__(self, start, limit):
        self.start, self.limit = start, limit

    def __call__(self, input_ids, scores, **kwargs):
        new = input_ids[:, self.start :]
        return ((new < 30).sum(-1) >= 3) | (torch.tensor([new.shape[1] >= self.limit]))


@pytest.mark.parametrize("limit", [1, 3, 6, 20])
@pytest.mark.parametrize("right", PLANS)
def test_stopping_criteria_see_the_text_token_by_token(target, drafter, script, limit, right):
    """Catches criteria asked once a round: the text would end late, with tokens the target never reached."""
    script(drafter, follow(target, PROMPT, right), PROMPT)
    criteria = StoppingCriteriaList([StopAfter(len(PROMPT), limit)])
    found = drafter.spec_generate(target, torch.tensor([PROMPT]), 30, temperature=0, stopping_criteria=criteria)
    assert found.tolist() == [greedy(target, PROMPT, 30, stopping_criteria=criteria)]
    assert len(criteria) == 1, "the caller's list must not grow"


@pytest.fixture(scope="module")
def tokenizer():
    """97 two-letter words, joined without spaces."""
    words = ["".join(pair) for pair in itertools.product("abcdefghij", repeat=2)][:97]
    model = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="aa"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(".."), "isolated")
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model)


@pytest.mark.parametrize("kind", ["token", "across tokens", "list", "absent"])
@pytest.mark.parametrize("right", PLANS)
def test_stop_strings_end_the_text_like_generates(target, drafter, script, tokenizer, kind, right):
    """Catches stop strings matched per round, or per token only: a string may span tokens and end inside one."""
    text = greedy(target, PROMPT, 40)
    words = [tokenizer.convert_ids_to_tokens(token) for token in text[len(PROMPT) :]]
    strings = {
        "token": words[5],
        "across tokens": words[5][1] + words[6] + words[7][0],
        "list": ["jjj", words[8] + words[9]],
        "absent": "jjj",
    }[kind]
    script(drafter, follow(target, PROMPT, right, text), PROMPT)
    expected = greedy(target, PROMPT, 30, stop_strings=strings, tokenizer=tokenizer)
    ids = torch.tensor([PROMPT])
    found = drafter.spec_generate(target, ids, 30, temperature=0, stop_strings=strings, tokenizer=tokenizer)
    assert found.tolist() == [expected]
    assert (len(expected) < len(PROMPT) + 30) == (kind != "absent")


@pytest.mark.parametrize("right", PLANS)
@pytest.mark.parametrize("stops", [False, True], ids=["budget", "stop-token"])
def test_a_streamer_gets_the_prompt_and_every_token_once(target, drafter, script, right, stops):
    """Catches tokens streamed past the end, a round streamed at once in wrong order, a missing or doubled end()."""
    text = greedy(target, PROMPT, 40)
    script(drafter, follow(target, PROMPT, right, text), PROMPT)
    streamer = Recorder()
    stop = [text[len(PROMPT) + 6]] if stops else None
    found = drafter.spec_generate(
        target, torch.tensor([PROMPT]), 13, temperature=0, stop_token_ids=stop, streamer=streamer
    )
    assert streamer.put_values[0].tolist() == [PROMPT]
    assert all(value.shape == (1,) for value in streamer.put_values[1:])
    assert [int(value) for value in streamer.put_values[1:]] == found[0, len(PROMPT) :].tolist()
    assert streamer.ends == 1


@pytest.mark.parametrize("right", PLANS)
def test_on_round_receives_what_was_emitted(target, drafter, script, right):
    """Catches a callback that sees drafts past the end of the text, or the target's token twice."""
    script(drafter, follow(target, PROMPT, right), PROMPT)
    rounds = []
    found = drafter.spec_generate(
        target,
        torch.tensor([PROMPT]),
        13,
        temperature=0,
        on_round=lambda drafts, own: rounds.append((drafts, own)),
        return_dict_in_generate=True,
    )
    emitted = [token for drafts, own in rounds for token in [*drafts, *([] if own is None else [own])]]
    assert emitted == found.sequences[0, len(PROMPT) :].tolist()
    # the prompt's own pass emits one token without drafts
    assert rounds[0][0] == []
    assert len(rounds) == found.statistics.rounds + 1
    assert [len(drafts) for drafts, _ in rounds[1:-1]] == found.statistics.accepted[:-1]


def test_one_loop_serves_all_entrances(target, drafter):
    """Catches a method that differs from the function behind it, or from `generate` with a custom loop."""
    ids = torch.tensor([PROMPT])
    expected = [greedy(target, PROMPT, 9)]
    assert drafter.spec_generate(target=target, input_ids=ids, max_new_tokens=9, temperature=0).tolist() == expected
    assert spec_generate(drafter, target, ids, 9, 0.0).tolist() == expected
    config = GenerationConfig(max_new_tokens=9, do_sample=False)
    assert drafter.spec_generate(target, ids, generation_config=config).tolist() == expected
    found = target.generate(ids, custom_generate=dspine_decode, drafter=drafter, max_new_tokens=9, do_sample=False)
    assert found.tolist() == expected


def test_an_unbound_drafter_is_bound_by_the_first_call(target, make_drafter):
    """Catches a first call that needs `bind` by hand, or a later one that binds (and hashes the head) again."""
    drafter = make_drafter(bind=False)
    drafter.spec_generate(target, torch.tensor([PROMPT]), 3, temperature=0)
    assert drafter.is_bound_to(target)
    drafter.bind = None
    drafter.spec_generate(target, torch.tensor([PROMPT]), 3, temperature=0)


def test_the_loop_draws_on_its_own_generator_alone(target, drafter):
    """Catches one draw taken from the global generator: a seeded request would not repeat."""
    ids = torch.tensor([PROMPT])
    runs = []
    for noise in range(3):
        torch.manual_seed(noise)
        generator = torch.Generator().manual_seed(5)
        runs.append(drafter.spec_generate(target, ids, 15, 1.0, generator=generator).tolist())
    assert runs[0] == runs[1] == runs[2]


def test_hooks_are_removed_even_after_an_error(target, drafter, monkeypatch):
    """Catches hooks left on the target, which would keep every later state of it alive."""

    def hooks():
        # transformers leaves some of its own once hidden states were asked for
        return [list(layer._forward_hooks) for layer in target.get_decoder().layers]

    before = hooks()

    def fail(*args, **kwargs):
        raise RuntimeError("draft")

    monkeypatch.setattr(drafter, "draft", fail, raising=False)
    with pytest.raises(RuntimeError, match="draft"):
        drafter.spec_generate(target, torch.tensor([PROMPT]), 9, temperature=0)
    assert hooks() == before


def test_taps_are_the_hidden_states_of_transformers(target, taps, drafter):
    """Catches an off-by-one between layer ids and `hidden_states`, where entry 0 is the embedding."""
    with TapRecorder(target, drafter.config.target_layer_ids) as recorder, torch.no_grad():
        target(torch.tensor([PROMPT]))
        found = recorder.take()
        target(torch.tensor([PROMPT]))
        few = recorder.take(3)
    assert torch.equal(found, taps(PROMPT, drafter))
    assert torch.equal(few, found[:, :3])


def test_windowed_targets_are_decoded_too(make_target):
    """Catches a windowed cache that drops rows a rejected draft still needs: the text must stay the target's."""
    layers = ["full_attention", "sliding_attention"] * 3
    target = make_target(layer_types=layers, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    drafter = build_drafter(target)
    found = drafter.spec_generate(target, torch.tensor([PROMPT]), 20, temperature=0)
    assert found.tolist() == [greedy(target, PROMPT, 20)]


# -- the stock path of transformers ---------------------------------------------------------------------------------


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.17"), reason="`dflash` came with 5.17")
@pytest.mark.parametrize("right", PLANS)
def test_transformers_own_dflash_loop_gives_the_same_text(target, drafter, taps, monkeypatch, right):
    """Catches a `forward` that another implementation of the loop cannot call: cache, positions, mask, anchor.

    Every pass is compared with one from scratch; its last states are then replaced by the target's own, right or
    wrong as planned, so that accepted blocks occur.
    """
    text = greedy(target, PROMPT, 40)
    real, calls = drafter.forward, []

    def forward(noise_embeds, context_hidden_states, **kwargs):
        output = real(noise_embeds=noise_embeds, context_hidden_states=context_hidden_states, **kwargs)
        anchor = int(kwargs["position_ids"][0, -drafter.config.block_size])
        scratch = real(noise_embeds=noise_embeds, context_hidden_states=taps(text[:anchor], drafter))
        torch.testing.assert_close(output.last_hidden_state, scratch.last_hidden_state, rtol=1e-4, atol=1e-4)
        states = target.model(torch.tensor([text[: anchor + SLOTS + 1]])).last_hidden_state
        count = right[len(calls) % len(right)]
        calls.append(count)
        output.last_hidden_state[:, 1:] = states[:, anchor : anchor + SLOTS]
        output.last_hidden_state[:, 1 + count :] *= -1
        return output

    monkeypatch.setattr(drafter, "forward", forward, raising=False)
    found = target.generate(
        torch.tensor([PROMPT]),
        assistant_model=drafter,
        speculation_type="dflash",
        do_sample=False,
        max_new_tokens=20,
    )
    assert found.tolist() == [text[: len(PROMPT) + 20]]
    expected_calls, left = 0, 19
    while left > 0:
        left -= right[expected_calls % len(right)] + 1
        expected_calls += 1
    # transformers drafts nothing where only one token is missing
    assert expected_calls - 1 <= len(calls) <= expected_calls


# -- sampling -------------------------------------------------------------------------------------------------------

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
    ("options", "kind"),
    [
        pytest.param(options.values[0], kind, id=f"{kind},{options.id}")
        for options in OPTIONS
        # the random drafter is one more far `q`; two options of it are enough
        for kind in ("near", "far", *(["real"] if options.id in ("T=0.7", "top-p") else []))
    ],
)
def test_sampled_text_has_the_targets_distribution(small, script, options, kind):
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
    for _ in range(SAMPLES):
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
    assert chi_square_p_value(counts, table, SAMPLES) > 1e-4
    if kind == "near":
        assert accepted / reached > 0.6
    if kind == "far":
        assert accepted / reached < 0.5


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


# -- statistics -----------------------------------------------------------------------------------------------------


def request(accepted, lengths=None, tokens=None):
    lengths = [count + 1 for count in accepted] if lengths is None else lengths
    return DSpineStatistics(
        slots=3, tokens=sum(lengths) + 1 if tokens is None else tokens, accepted=accepted, lengths=lengths
    )


def test_the_three_means_of_a_hand_computed_example():
    """Catches one mean reported under the name of another: the three differ as soon as requests do."""
    first, second = request([3, 1, 0, 0]), request([2, 3], tokens=8)
    # lengths 4 2 1 1 (mean 2, tokens 9) and 3 4 (mean 3.5, tokens 8)
    found = summarize([first, second])
    assert first.tau == 2.0
    assert second.tau == 3.5
    assert found["tau_per_request"] == pytest.approx((2.0 + 3.5) / 2)
    assert found["tau_token_weighted"] == pytest.approx((2.0 * 9 + 3.5 * 8) / 17)
    assert found["tau_pooled"] == pytest.approx(15 / 6)
    assert found["acceptance_histogram"] == [2, 1, 1, 2]
    # slot 1 in 4 of 6 rounds, slot 2 in 3 of those 4, slot 3 in 2 of those 3
    assert found["acceptance_per_slot"] == pytest.approx([4 / 6, 3 / 4, 2 / 3])
    assert found["rounds"] == 6
    assert found["tokens"] == 17


@pytest.mark.parametrize(
    "requests", [pytest.param([], id="none"), pytest.param([request([], tokens=1)], id="no-rounds")]
)
def test_statistics_without_a_round_do_not_divide_by_zero(requests):
    """Catches an empty suite, or a one-token answer, that ends in a ZeroDivisionError."""
    found = summarize(requests)
    assert found["tau_per_request"] == found["tau_token_weighted"] == found["tau_pooled"] == 0.0
    assert found["rounds"] == 0
    assert sum(found["acceptance_histogram"]) == 0
    assert all(share is None for share in found["acceptance_per_slot"])
    assert found["tokens"] == len(requests)


def test_a_request_without_rounds_does_not_dilute_the_means():
    """Catches a one-token answer counted as a mean of 0."""
    alone, both = summarize([request([3, 1])]), summarize([request([3, 1]), request([], tokens=1)])
    for name in ("tau_per_request", "tau_token_weighted", "tau_pooled"):
        assert alone[name] == both[name] == 3.0


def test_slots_never_reached_have_no_share():
    """Catches a share of 0 reported for a slot no round came to."""
    assert summarize([request([0, 0])])["acceptance_per_slot"] == [0.0, None, None]


@pytest.mark.parametrize("right", PLANS)
def test_statistics_of_a_run_add_up(target, drafter, script, right):
    """Catches a round counted twice or not at all: the histogram sums to the rounds, lengths to the tokens."""
    script(drafter, follow(target, PROMPT, right), PROMPT)
    found = drafter.spec_generate(target, torch.tensor([PROMPT]), 31, temperature=0, return_dict_in_generate=True)
    assert isinstance(found, DSpineGenerateOutput)
    stats = found.statistics
    summary = summarize([stats])
    assert stats.slots == SLOTS
    assert stats.tokens == 31
    assert len(stats.accepted) == len(stats.lengths) == stats.rounds == sum(summary["acceptance_histogram"])
    assert stats.lengths == [count + 1 for count in stats.accepted]
    # the prompt's own pass emits one token; the last round may be cut by the budget
    assert 0 <= 1 + sum(stats.lengths) - stats.tokens <= SLOTS
    planned = list(itertools.islice(itertools.cycle(right), stats.rounds))
    assert stats.accepted == planned
    for slot, share in enumerate(summary["acceptance_per_slot"]):
        reached = [count for count in planned if count >= slot]
        expected = sum(count > slot for count in reached) / len(reached) if reached else None
        assert share == (expected if expected is None else pytest.approx(expected))


def test_a_round_cut_by_the_budget_counts_in_full(target, drafter, script):
    """Catches an acceptance length that falls with short budgets: the drafts were accepted, there was no room."""
    script(drafter, follow(target, PROMPT, [4]), PROMPT)
    found = drafter.spec_generate(target, torch.tensor([PROMPT]), 8, temperature=0, return_dict_in_generate=True)
    assert found.statistics.accepted == [4, 4]
    assert found.statistics.lengths == [5, 5]
    assert found.statistics.tokens == 8
    assert found.sequences.shape[1] == len(PROMPT) + 8


def test_a_round_ended_by_a_stop_token_counts_up_to_it(target, drafter, script):
    """Catches tokens behind the end of a text that are counted as accepted length."""
    text = greedy(target, PROMPT, 40)
    new = text[len(PROMPT) :]
    place = next(i for i in range(6, 10) if new.index(new[i]) == i)
    script(drafter, follow(target, PROMPT, [4], text), PROMPT)
    found = drafter.spec_generate(
        target, torch.tensor([PROMPT]), 30, temperature=0, stop_token_ids=[new[place]], return_dict_in_generate=True
    )
    # one token from the prompt, five in the first round, the rest up to the stop in the second
    assert found.statistics.lengths == [5, place + 1 - 6]
    assert found.statistics.tokens == place + 1 == sum(found.statistics.lengths) + 1
    assert sum(summarize([found.statistics])["acceptance_histogram"]) == 2


def test_a_stop_token_at_the_last_place_of_the_budget_is_a_stop(target, drafter, script):
    """Catches a round that both ends the text and exhausts the budget, counted in full."""
    text = greedy(target, PROMPT, 40)
    new = text[len(PROMPT) :]
    place = next(i for i in range(6, 10) if new.index(new[i]) == i)
    script(drafter, follow(target, PROMPT, [4], text), PROMPT)
    found = drafter.spec_generate(
        target,
        torch.tensor([PROMPT]),
        place + 1,
        temperature=0,
        stop_token_ids=[new[place]],
        return_dict_in_generate=True,
    )
    assert found.statistics.lengths == [5, place + 1 - 6]


@pytest.mark.parametrize("end", ["budget", "stop-token"])
def test_a_text_of_one_token_has_no_round(target, drafter, end):
    """Catches a draft made after the text already ended."""
    first = greedy(target, PROMPT, 1)[-1]
    kwargs = {"max_new_tokens": 1} if end == "budget" else {"max_new_tokens": 9, "stop_token_ids": [first]}
    drafter.draft = None
    found = drafter.spec_generate(
        target, torch.tensor([PROMPT]), temperature=0, return_dict_in_generate=True, **kwargs
    )
    assert found.sequences[0, len(PROMPT) :].tolist() == [first]
    assert found.statistics.rounds == 0
    assert found.statistics.tokens == 1
    assert found.statistics.tau == 0.0


# -- refusals -------------------------------------------------------------------------------------------------------


def prefilled(target):
    cache = DynamicCache()
    with torch.no_grad():
        target(torch.tensor([PROMPT[:3]]), past_key_values=cache, use_cache=True)
    return cache


ONE = torch.tensor([PROMPT])


@pytest.mark.parametrize(
    ("ids", "kwargs", "match"),
    [
        pytest.param(
            ONE.repeat(2, 1), {}, r"`input_ids` must hold one prompt \(\[1, P\]\), got \[2, 7\].*batch 1", id="batch"
        ),
        pytest.param(
            ONE, {"num_return_sequences": 2, "temperature": 0.7}, r"`num_return_sequences` must be 1", id="n=2"
        ),
        pytest.param(ONE, {"num_beams": 2}, "`num_beams` must be 1 in speculative decoding, got 2", id="beams"),
        pytest.param(
            ONE,
            {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1]])},
            "`attention_mask` must be all ones, got padding",
            id="padding",
        ),
        pytest.param(
            ONE, {"past_key_values": prefilled}, "`past_key_values` must be empty, got 3 rows", id="prefilled"
        ),
        pytest.param(ONE, {"temperature": -1.0}, "`temperature` must be >= 0, got -1.0", id="temperature"),
        pytest.param(ONE, {"max_new_tokens": 0}, "`max_new_tokens` must be >= 1, got 0", id="no-tokens"),
        pytest.param(
            ONE, {"stop_strings": "aa"}, "`tokenizer` must be given with `stop_strings`, got None", id="strings"
        ),
    ],
)
def test_requests_the_loop_cannot_decode_are_refused_by_name(target, drafter, ids, kwargs, match):
    """Catches a request that would be decoded wrongly, or die in a shape error far from its cause."""
    kwargs = {"temperature": 0, "max_new_tokens": 5, **kwargs}
    if callable(kwargs.get("past_key_values")):
        kwargs["past_key_values"] = kwargs["past_key_values"](target)
    with pytest.raises(ValueError, match=match):
        drafter.spec_generate(target, ids, **kwargs)


def test_an_empty_cache_and_a_full_mask_are_no_reason_to_refuse(target, drafter):
    """Catches a check that refuses what every chat template call passes along."""
    found = drafter.spec_generate(
        target, ONE, 6, temperature=0, past_key_values=DynamicCache(), attention_mask=torch.ones_like(ONE)
    )
    assert found.tolist() == [greedy(target, PROMPT, 6)]


def test_recurrent_targets_are_refused(target, drafter, monkeypatch):
    """Catches a target whose state cannot be taken back after a rejected draft."""
    monkeypatch.setattr(target.config, "layer_types", ["linear_attention"] + ["full_attention"] * 5)
    with pytest.raises(ValueError, match=r"`target` must keep a cache .* got layers of type \['linear_attention'\]"):
        dspine_decode(
            target,
            ONE,
            drafter=drafter,
            logits_processor=LogitsProcessorList(),
            stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(9)]),
            generation_config=GenerationConfig(do_sample=False),
        )


def test_another_target_is_refused(drafter, make_target):
    """Catches a drafter used with a model it was not made for."""
    with pytest.raises(
        ValueError, match="`num_target_layers` of the drafter must equal the target's, got 6 .* with 5"
    ):
        drafter.spec_generate(make_target(num_hidden_layers=5), ONE, 5, temperature=0)


@pytest.mark.parametrize("bound", [False, True], ids=["unbound", "already-bound"])
def test_another_tokenizer_is_refused(target, make_drafter, tokenizer, bound):
    """Catches a wrong tokenizer that passes because an earlier call already bound the drafter."""
    drafter = make_drafter(bind=False)
    drafter.config.target = target_record(target, tokenizer_sha256="0" * 64)
    if bound:
        drafter.bind(target)
    with pytest.raises(ValueError, match="`tokenizer` must map ids to the same strings"):
        drafter.spec_generate(target, ONE, 5, temperature=0, tokenizer=tokenizer)
    drafter.config.target["tokenizer_sha256"] = tokenizer_fingerprint(tokenizer)
    drafter.spec_generate(target, ONE, 5, temperature=0, tokenizer=tokenizer)


def test_a_draft_is_a_plain_record():
    """Catches a field renamed under the loop: tokens, candidates, q and scores are its whole interface."""
    assert list(DSpineDraft.__dataclass_fields__) == ["tokens", "candidates", "q", "scores"]
