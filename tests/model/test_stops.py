"""Where a text ends: stop tokens, criteria and stop strings, wherever in a round they fall."""

import pytest
import torch
from helpers.scripted import PLANS, PROMPT, follow, greedy
from helpers.tiny import build_drafter
from transformers import StoppingCriteria, StoppingCriteriaList


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
