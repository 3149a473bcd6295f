"""A canary: what a drafter does on a few fixed prompts, because a wrong drafter is silent and only slow.

Two things are kept. *Acceptance* tells whether the drafter is any good. *The first block drafted after each prompt* is
a fingerprint of the whole path: taps, mask token, target, weights. On the mini pair, taps shifted by one layer hardly
move acceptance, yet change so many of these tokens that `tests/publish/test_verify.py` can hold it.
"""

from pathlib import Path

CANARY_PROMPTS = Path(__file__).parent / "canary.jsonl"
CANARY_NEW_TOKENS = 32


def measure_canary(bundle: str | Path, target: str | Path) -> dict:
    """Decode the canary prompts greedily with a bundle and its target.

    Args:
        bundle (`str` or `Path`): Bundle folder; its own code runs.
        target (`str` or `Path`): Folder or repository of the target.

    Returns:
        `dict`: `tau_pooled`, `drafts` (the `S` tokens first drafted after each prompt) and the protocol (`prompts`,
        `max_new_tokens`, `temperature`, `dtype`).

    Raises:
        DSpineHubError: When either cannot be loaded or they do not belong together.
    """
    from dspine_hub.evaluation.pair import Pair
    from dspine_hub.evaluation.prompts import read_prompts
    from dspine_hub.generation_dspine import summarize

    pair, prompts = Pair(target, bundle), read_prompts(CANARY_PROMPTS)
    encoded = [pair.encode(prompt) for prompt in prompts]
    requests = [pair.speculative(ids, CANARY_NEW_TOKENS, 0.0)[0].statistics for ids in encoded]
    return {
        "tau_pooled": summarize(requests)["tau_pooled"],
        "drafts": [pair.first_draft(ids) for ids in encoded],
        "prompts": len(prompts),
        "max_new_tokens": CANARY_NEW_TOKENS,
        "temperature": 0,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
    }


def agreement(drafts: list[list[int]], recorded: list[list[int]]) -> float:
    """Share of equal tokens, slot by slot; 0 when the shapes differ."""
    if [len(row) for row in drafts] != [len(row) for row in recorded]:
        return 0.0
    pairs = [pair for row, other in zip(drafts, recorded, strict=True) for pair in zip(row, other, strict=True)]
    return sum(mine == theirs for mine, theirs in pairs) / len(pairs)
