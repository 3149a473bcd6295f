"""Decode prompts plainly and speculatively with one target, and measure both in the same run."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from dspine_hub.checkpoints.loading import is_bundle, load_bound, load_bundle, load_target
from dspine_hub.errors import DSpineHubError
from dspine_hub.generation_dspine import TapRecorder, summarize


class Pair:
    """A target and its drafter; a bundle is loaded by transformers' remote code alone, a checkpoint by this package.

    Args:
        target (`str` or `Path`): Folder of the target.
        drafter (`str` or `Path`): A bundle, whose own code runs, or a checkpoint.
        dtype, device (`str`, *optional*): See [`load_target`].

    Raises:
        DSpineHubError: When either is broken or they do not belong together.
    """

    def __init__(self, target: str | Path, drafter: str | Path, dtype: str | None = None, device: str | None = None):
        self.target, self.tokenizer = load_target(target, dtype, device)
        if is_bundle(drafter):
            self.drafter = load_bundle(drafter, self.target, self.tokenizer)
        else:
            self.drafter = load_bound(drafter, self.target, self.tokenizer)

    def encode(self, prompt: str) -> torch.Tensor:
        """Encode a prompt as `[1, P]` ids on the target's device."""
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        if ids.shape[1] == 0:
            raise DSpineHubError("`--prompt` must hold at least one token, got an empty text.")
        return ids.to(self.target.device)

    def plain(self, ids: torch.Tensor, max_new_tokens: int, temperature: float) -> tuple[torch.Tensor, float]:
        """Decode with the target alone; returns ids `[1, P + n]` and seconds."""
        sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        return _timed(lambda: self.target.generate(ids, max_new_tokens=max_new_tokens, **sampling), ids.device)

    @torch.no_grad()
    def first_draft(self, ids: torch.Tensor) -> list[int]:
        """Return the `S` tokens greedily drafted for the first block after a prompt `[1, P]`."""
        with TapRecorder(self.target, self.drafter.config.target_layer_ids) as taps:
            logits = self.target(input_ids=ids, use_cache=False).logits
            return self.drafter.draft(taps.take(), logits[:, -1].argmax(dim=-1)).tokens[0].tolist()

    def speculative(
        self, ids: torch.Tensor, max_new_tokens: int, temperature: float, on_round: Callable | None = None
    ):
        """Decode with the drafter; returns the loop's output with its statistics, and seconds."""
        return _timed(
            lambda: self.drafter.spec_generate(
                self.target,
                ids,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                on_round=on_round,
                return_dict_in_generate=True,
            ),
            ids.device,
        )


def _timed(function, device):
    start = time.perf_counter()
    result = function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def compare(pair: Pair, prompts: list[str], max_new_tokens: int = 64, temperature: float = 0.0) -> dict:
    """Decode every prompt both ways.

    Args:
        pair ([`Pair`]): Target and drafter.
        prompts (`list[str]`): Prompts; the first is decoded once more before, to warm up.
        max_new_tokens (`int`): Tokens a prompt.
        temperature (`float`): `0` is greedy, where both texts must be identical.

    Returns:
        `dict`: `identical` (`None` when sampling: two samples differ by nature), `tau_pooled`, `tau_per_request`,
        `tau_token_weighted`, `speedup` (plain over speculative seconds a token, prompt included), `tokens`, `rounds`,
        `acceptance_per_slot`, `plain_tokens_per_second`, `speculative_tokens_per_second` and `speedup_by_prompt`
        (`list[float]`, of whole requests).
    """
    encoded = [pair.encode(prompt) for prompt in prompts]
    pair.plain(encoded[0], 8, temperature)
    pair.speculative(encoded[0], 8, temperature)
    identical, statistics = True, []
    plain_tokens, plain_times, times = 0, [], []
    for ids in encoded:
        text, spent = pair.plain(ids, max_new_tokens, temperature)
        plain_times.append(spent)
        plain_tokens += text.shape[1] - ids.shape[1]
        output, spent = pair.speculative(ids, max_new_tokens, temperature)
        times.append(spent)
        statistics.append(output.statistics)
        identical = identical and torch.equal(text, output.sequences)
    table, plain_seconds, seconds = summarize(statistics), sum(plain_times), sum(times)
    return {
        "identical": identical if temperature == 0 else None,
        "tau_pooled": table["tau_pooled"],
        "tau_per_request": table["tau_per_request"],
        "tau_token_weighted": table["tau_token_weighted"],
        "speedup": (plain_seconds / plain_tokens) / (seconds / table["tokens"]),
        "tokens": table["tokens"],
        "rounds": table["rounds"],
        "acceptance_per_slot": table["acceptance_per_slot"],
        "plain_tokens_per_second": plain_tokens / plain_seconds,
        "speculative_tokens_per_second": table["tokens"] / seconds,
        "speedup_by_prompt": [plain / own for plain, own in zip(plain_times, times, strict=True)],
    }
