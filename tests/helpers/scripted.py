"""Drafts with a chosen number of errors, and the text they are judged by.

Random drafters accept almost nothing, so most tests of the loop replace `draft` by one with a chosen number of right
drafts; the real pass still runs under it.
"""

import pytest
import torch

from dspine_hub.modeling_dspine import DSpineDraft


class ScriptedDraft:
    """Stand in for `drafter.draft`: the real pass runs, so caches live, but a policy chooses the drafts.

    The committed text is rebuilt from the context rows of every call alone, so a loop that hands over one row
    too many or too few is caught here. `policy(text, temperature)` returns tokens `[S]`, candidates `[S, K]` and q
    `[S, K]`, for the text whose last token is the anchor.
    """

    def __init__(self, drafter, policy, prompt: list[int], run_real: bool = True):
        self.real = drafter.draft if run_real else None
        self.policy, self.text, self.block, self.calls = policy, [], list(prompt), 0

    def __call__(self, context, anchor, temperature=0.0, generator=None, cache=None):
        rows = context.shape[1]
        assert rows <= len(self.block), f"{rows} context rows for a block of {len(self.block)}"
        assert self.calls or rows == len(self.block), "the first call must bring the whole prompt"
        self.text += self.block[:rows]
        self.calls += 1
        if self.real is not None:
            self.real(context, anchor, temperature, generator, cache)
            assert cache.get_seq_length() == len(self.text), "the context cache must hold the committed text"
        tokens, candidates, q = self.policy([*self.text, int(anchor)], temperature)
        self.block = [int(anchor), *tokens.tolist()]
        scores = torch.zeros(1, *candidates.shape, candidates.shape[-1])
        return DSpineDraft(tokens=tokens[None], candidates=candidates[None], q=q[None], scores=scores)


def drafts_with_errors(reference: list[int], right: list[int], slots: int, vocabulary: int, width: int = 4):
    """Make a greedy policy that drafts `reference`, wrong first after `right[i]` drafts in round `i` (cycled)."""
    state = {"round": 0}

    def policy(text, temperature):
        assert text == reference[: len(text)], "the committed text left the target's own greedy text"
        tokens = torch.tensor(reference[len(text) : len(text) + slots])
        assert len(tokens) == slots, "the reference must outlast the request by a block"
        count = right[state["round"] % len(right)]
        state["round"] += 1
        if count < slots:
            tokens[count] = (tokens[count] + 1) % vocabulary
        candidates = (tokens[:, None] + torch.arange(width)) % vocabulary
        q = torch.zeros(slots, width)
        q[:, 0] = 1
        return tokens, candidates, q

    return policy


PROMPT = [3, 1, 4, 15, 92, 65, 35]
SLOTS = 4

PLANS = [
    pytest.param([0], id="none"),
    pytest.param([SLOTS], id="all"),
    pytest.param([0, 1, 2, 3, 4, 4, 0, 3, 1, 4, 2], id="every-count"),
]


def greedy(target, prompt, new, **kwargs):
    """Return the target's own greedy text, prompt included."""
    ids = torch.tensor([prompt])
    return target.generate(ids, do_sample=False, max_new_tokens=new, **kwargs)[0].tolist()


def follow(target, prompt, right, text=None, length=40, **kwargs):
    """Make a policy that drafts the target's greedy text with errors; stops are left out of the reference."""
    text = greedy(target, prompt, length, **kwargs) if text is None else text
    return drafts_with_errors(text, right, SLOTS, target.config.vocab_size)
