"""Greedy decoding: the text is the target's token for token, whatever was drafted, and who watches sees it so."""

import itertools

import pytest
import torch
import transformers
from helpers.scripted import PLANS, PROMPT, SLOTS, follow, greedy
from helpers.tiny import build_drafter
from packaging.version import Version
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from dspine_hub.generation_dspine import TapRecorder, dspine_decode, spec_generate


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


class Recorder(BaseStreamer):
    """Keep what a streamer is given."""

    def __init__(self):
        self.put_values, self.ends = [], 0

    def put(self, value):
        self.put_values.append(value.clone())

    def end(self):
        self.ends += 1


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
