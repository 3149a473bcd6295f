"""Statistics of a run: the three means of acceptance, and rounds that a text's end cut short."""

import itertools

import pytest
import torch
from helpers.scripted import PLANS, PROMPT, SLOTS, follow, greedy

from dspine_hub.generation_dspine import DSpineGenerateOutput, DSpineStatistics, summarize


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
