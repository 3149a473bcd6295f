"""The draft-verify loop: a drafter proposes a block, one target pass verifies it, the output stays the target's own.

Greedy decoding gives the target's greedy tokens. Sampling is lossless: a draft `d` drawn with probability `q(d)` is
accepted with `min(1, p(d) / q(d))`, where `p` is the target's distribution after all of its logits processors; on a
rejection the residual `max(p - q, 0)` is sampled. Preparation of prompts, processors and stopping criteria is left to
`generate` of transformers, which calls [`dspine_decode`] in place of its own decoding methods.

Source of the method: arXiv 2609.36173; of the acceptance rule: arXiv 2211.17192.
"""

import inspect
import time
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import ModelOutput

# these read the scores alone, never the prefix, so one call serves all rows of a block
PREFIX_FREE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


@dataclass
class DSpineStatistics:
    """What happened in the rounds of one request.

    Args:
        slots (`int`): Proposal slots `S` of a block.
        tokens (`int`): Tokens emitted, the one from the prompt's own pass included.
        accepted (`list[int]`): Accepted drafts of every round, in `[0, S]`, also behind the end of the text.
        lengths (`list[int]`): Acceptance length of every round: accepted drafts plus the target's own token. In a
            round that ends the text (a stop token or criterion), the tokens up to that end. A round cut by the token
            budget counts in full.
        draft_seconds, verify_seconds (`float`): Time spent drafting and in target passes and acceptance, prompt
            excluded.
    """

    slots: int
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def rounds(self) -> int:
        """Number of draft-verify rounds."""
        return len(self.lengths)

    @property
    def tau(self) -> float:
        """Mean acceptance length of this request; 0 without a round."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else 0.0


def summarize(requests: list[DSpineStatistics]) -> dict:
    """Summarise acceptance over requests.

    Args:
        requests (`list[DSpineStatistics]`): One entry a request, all of one block size.

    Returns:
        `dict`: `tau_per_request` (mean over requests of a request's mean), `tau_token_weighted` (each request weighted
        by its tokens), `tau_pooled` (all lengths over all rounds), `acceptance_histogram` (rounds with `i` accepted
        drafts, `i` from 0), `acceptance_per_slot` (share of rounds that accept slot `t` among those that accepted all
        slots before it; `None` where none did), `rounds`, `tokens`, `draft_seconds` and `verify_seconds`.
    """
    used = [request for request in requests if request.rounds]
    slots = max((request.slots for request in requests), default=0)
    accepted = [count for request in used for count in request.accepted]
    rounds = len(accepted)
    histogram = [accepted.count(count) for count in range(slots + 1)]
    reached = [sum(histogram[slot:]) for slot in range(slots + 1)]
    weight = sum(request.tokens for request in used)
    return {
        "tau_per_request": sum(request.tau for request in used) / len(used) if used else 0.0,
        "tau_token_weighted": sum(request.tau * request.tokens for request in used) / weight if weight else 0.0,
        "tau_pooled": sum(sum(request.lengths) for request in used) / rounds if rounds else 0.0,
        "acceptance_histogram": histogram,
        "acceptance_per_slot": [reached[slot + 1] / reached[slot] if reached[slot] else None for slot in range(slots)],
        "rounds": rounds,
        "tokens": sum(request.tokens for request in requests),
        "draft_seconds": sum(request.draft_seconds for request in requests),
        "verify_seconds": sum(request.verify_seconds for request in requests),
    }


@dataclass
class DSpineGenerateOutput(ModelOutput):
    """Output of a generation with `return_dict_in_generate=True`.

    Args:
        sequences (`torch.Tensor` of shape `[1, P + n]`, int64): Prompt and new tokens.
        statistics ([`DSpineStatistics`]): Rounds and acceptance.
    """

    sequences: torch.LongTensor | None = None
    statistics: DSpineStatistics | None = None


class TapRecorder:
    """Record the outputs of the tapped decoder layers of a target, and of no other layer, by forward hooks."""

    def __init__(self, target, layer_ids: list[int]):
        self._layers = [target.get_decoder().layers[index] for index in layer_ids]
        self._states: list[torch.Tensor | None] = [None] * len(layer_ids)
        self._handles = []

    def __enter__(self) -> "TapRecorder":
        for slot, layer in enumerate(self._layers):
            self._handles.append(layer.register_forward_hook(partial(self._record, slot)))
        return self

    def __exit__(self, *exception):
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _record(self, slot, module, inputs, output):
        self._states[slot] = output[0] if isinstance(output, tuple) else output

    def take(self, rows: int | None = None) -> torch.Tensor:
        """Return the first `rows` recorded rows, `[B, rows, T * H]`, and forget them."""
        states = torch.cat([state[:, :rows] for state in self._states], dim=-1)
        self._states = [None] * len(self._states)
        return states


class _Clock:
    """Accumulate time between marks: wall time on the CPU, events on a GPU, which never wait for the device."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks = []

    def mark(self, name: str | None):
        """End the running phase and start phase `name`."""
        if self._cuda:
            point = torch.cuda.Event(enable_timing=True)
            point.record()
        else:
            point = time.perf_counter()
        self._marks.append((name, point))

    def seconds(self, name: str) -> float:
        """Sum the phases called `name`."""
        spans = [(a, b) for (phase, a), (_, b) in zip(self._marks, self._marks[1:], strict=False) if phase == name]
        if self._cuda:
            torch.cuda.synchronize()
            return sum(a.elapsed_time(b) for a, b in spans) / 1000
        return sum(b - a for a, b in spans)


class _Text:
    """The text so far, appended token by token until it stops or is full.

    Length and end tokens are judged as integers; any other criterion is asked after every token, as in plain decoding.
    """

    def __init__(self, input_ids: torch.Tensor, criteria: StoppingCriteriaList, streamer, on_round):
        self.ids = input_ids
        self.stopped = self.full = False
        self._streamer, self._on_round = streamer, on_round
        self._max_length = None
        self._eos: set[int] = set()
        self._others = StoppingCriteriaList()
        for criterion in criteria:
            if isinstance(criterion, MaxLengthCriteria):
                self._max_length = min(criterion.max_length, self._max_length or criterion.max_length)
            elif isinstance(criterion, EosTokenCriteria):
                self._eos.update(criterion.eos_token_id.flatten().tolist())
            else:
                self._others.append(criterion)
        if streamer is not None:
            streamer.put(input_ids.cpu())

    @property
    def ended(self) -> bool:
        """Whether nothing may follow."""
        return self.stopped or self.full

    def emit(self, drafts: list[int], own: int) -> int:
        """Append a round's accepted drafts and the target's own token, up to the end of the text.

        Returns:
            `int`: How many of them were appended.
        """
        count = 0
        for token in (*drafts, own):
            self._append(token)
            count += 1
            if self.ended:
                break
        if self._on_round is not None:
            self._on_round(drafts[:count], own if count > len(drafts) else None)
        return count

    def _append(self, token: int) -> None:
        self.ids = torch.cat((self.ids, self.ids.new_tensor([[token]])), dim=1)
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        self.stopped = token in self._eos or bool(self._others and self._others(self.ids, None).any())
        self.full = self.ids.shape[1] == self._max_length

    def close(self) -> None:
        """Tell the streamer that the text has ended."""
        if self._streamer is not None:
            self._streamer.end()


class _Target:
    """The target of one request: its cache, its tapped states, and its distribution after all logits processors."""

    def __init__(self, model, processors: LogitsProcessorList, sample: bool, generator, taps: TapRecorder):
        self.sample, self.generator, self.taps = sample, generator, taps
        self._model, self._processors = model, processors
        # a plain cache keeps every row, so rows of rejected drafts can be taken back also where attention is windowed
        self._cache = DynamicCache()
        named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._cache_argument = {named: self._cache}
        self._rows_at_once = all(isinstance(processor, PREFIX_FREE) for processor in processors)

    def prefill(self, ids: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Read the prompt `[1, P]`; returns the token that follows it and the tapped states `[1, P, T * H]`."""
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **self._cache_argument)
        row = self._process(ids, output.logits[0, -1:])
        return self._choose(torch.softmax(row[0], dim=-1) if self.sample else row[0]), self.taps.take()

    def verify(self, ids: torch.Tensor, draft) -> tuple[int, int, torch.Tensor]:
        """Judge a draft in one pass over `[anchor, drafts]`, and forget the rows of rejected drafts.

        Args:
            ids (`torch.Tensor` of shape `[1, n]`, int64): The text; its last token is the anchor.
            draft ([`DSpineDraft`]): Of one request.

        Returns:
            `tuple` of the accepted count, the target's own token after the accepted drafts, and the tapped states of
            anchor and accepted drafts, `[1, accepted + 1, T * H]`.
        """
        drafts = draft.tokens.to(ids.device)
        output = self._model(input_ids=torch.cat((ids[:, -1:], drafts), dim=1), use_cache=True, **self._cache_argument)
        logits, accepted, own = output.logits[0], 0, None
        while own is None:
            # a processor that reads the prefix gets the rows one by one, each with the drafts accepted before it
            count = logits.shape[0] if self._rows_at_once else 1
            prefix = torch.cat((ids, drafts[:, :accepted]), dim=1)
            rows = self._process(prefix, logits[accepted : accepted + count])
            more, own = self._accept(rows, draft, accepted)
            accepted += more
        # never by 0, which means "keep nothing" up to transformers 5.16
        if accepted < drafts.shape[1]:
            self._cache.crop(accepted - drafts.shape[1])
        return accepted, own, self.taps.take(accepted + 1)

    def _process(self, prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Apply the processors to `[m, V]` logits that all follow `prefix`."""
        return self._processors(prefix.expand(logits.shape[0], -1), logits.float())

    def _choose(self, scores: torch.Tensor) -> int:
        """Draw from probabilities `[V]`, or take the best of logits `[V]`."""
        return int(torch.multinomial(scores, 1, generator=self.generator) if self.sample else scores.argmax())

    def _accept(self, rows: torch.Tensor, draft, start: int) -> tuple[int, int | None]:
        """Judge drafts `start, start + 1, ...` by processed rows `[m, V]`.

        Returns:
            `tuple` of the accepted count and the target's own token, `None` while every row's draft was accepted.
        """
        if self.sample:
            return self._accept_sampled(rows, draft, start)
        drafts = draft.tokens[0, start : start + rows.shape[0]].to(rows.device)
        own = rows.argmax(dim=-1)
        accepted = _leading(own[: drafts.shape[0]] == drafts)
        return accepted, int(own[accepted]) if accepted < rows.shape[0] else None

    def _accept_sampled(self, rows: torch.Tensor, draft, start: int) -> tuple[int, int | None]:
        """Accept `d` with `min(1, p(d) / q(d))`; on a rejection draw from `max(p - q, 0)`."""
        device, end = rows.device, start + rows.shape[0]
        drafts, candidates, q = (x[0, start:end].to(device) for x in (draft.tokens, draft.candidates, draft.q))
        count = drafts.shape[0]
        p = torch.softmax(rows, dim=-1)
        p_draft = p[:count].gather(1, drafts[:, None]).squeeze(1)
        q_draft = (q * (candidates == drafts[:, None])).sum(dim=-1)
        uniform = torch.rand(count, generator=self.generator, device=device)
        accepted = _leading(uniform * q_draft < p_draft)
        if accepted == rows.shape[0]:
            return accepted, None
        final = p[accepted]
        if accepted < count:
            residual = final.scatter_add(0, candidates[accepted], -q[accepted].to(final.dtype)).clamp_(min=0)
            # p and q may agree up to rounding; then the residual is noise and p itself is right
            final = residual if bool(residual.sum() > 0) else final
        return accepted, self._choose(final)


def _leading(right: torch.Tensor) -> int:
    """Count the entries `[m]` before the first that is false."""
    wrong = (~right).nonzero()
    return int(wrong[0]) if wrong.numel() else right.shape[0]


@torch.no_grad()
def dspine_decode(
    target,
    input_ids: torch.LongTensor,
    *,
    drafter,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config,
    token_streamer=None,
    on_round=None,
    generator: torch.Generator | None = None,
    **model_kwargs,
):
    """Decode one prompt; transformers' `generate` calls this with everything prepared.

    Args:
        target (`PreTrainedModel`): The target model.
        input_ids (`torch.Tensor` of shape `[1, P]`, int64): Prompt.
        drafter (`DSpineForSpeculation`): Drafter bound to `target`.
        logits_processor, stopping_criteria, generation_config: As prepared by `generate`.
        token_streamer (`BaseStreamer`, *optional*): Receives every token in order.
        on_round (`Callable[[list[int], int | None], None]`, *optional*): Receives, after the prompt's own pass and
            every round, the drafts it emitted and the target's own token (`None` when the text ended before it).
        generator (`torch.Generator`, *optional*): Source of all random numbers.

    Returns:
        `torch.Tensor` of shape `[1, P + n]`, or [`DSpineGenerateOutput`] with `return_dict_in_generate`.

    Raises:
        ValueError: For more than one row, beams, a padded prompt, a prefilled cache, or a target whose cache cannot be
            taken back.
    """
    prefilled = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    _check_request(target, input_ids, generation_config, model_kwargs.get("attention_mask"), prefilled)
    sample = generation_config.do_sample
    temperature = (1.0 if generation_config.temperature is None else generation_config.temperature) if sample else 0.0
    text = _Text(input_ids, stopping_criteria, token_streamer, on_round)
    statistics = DSpineStatistics(slots=drafter.config.block_size - 1)
    clock, context_cache, device = _Clock(input_ids.device), drafter.new_cache(), drafter.device

    with TapRecorder(target, drafter.config.target_layer_ids) as taps:
        verifier = _Target(target, logits_processor, sample, generator, taps)
        own, context = verifier.prefill(text.ids)
        text.emit([], own)
        while not text.ended:
            clock.mark("draft")
            anchor = text.ids[:, -1].to(device)
            draft = drafter.draft(context.to(device), anchor, temperature, generator, context_cache)
            clock.mark("verify")
            accepted, own, context = verifier.verify(text.ids, draft)
            clock.mark(None)
            emitted = text.emit(draft.tokens[0, :accepted].tolist(), own)
            statistics.accepted.append(accepted)
            statistics.lengths.append(emitted if text.stopped else accepted + 1)

    statistics.tokens = text.ids.shape[1] - input_ids.shape[1]
    statistics.draft_seconds, statistics.verify_seconds = clock.seconds("draft"), clock.seconds("verify")
    text.close()
    if generation_config.return_dict_in_generate:
        return DSpineGenerateOutput(sequences=text.ids, statistics=statistics)
    return text.ids


def _check_request(target, input_ids, generation_config, mask, cache) -> None:
    # first of all: `generate` has already repeated the prompt for these
    for name in ("num_beams", "num_return_sequences"):
        if getattr(generation_config, name) not in (None, 1):
            raise ValueError(f"`{name}` must be 1 in speculative decoding, got {getattr(generation_config, name)}.")
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(
            f"`input_ids` must hold one prompt ([1, P]), got {list(input_ids.shape)}: this loop decodes batch 1. "
            'Serve batches with the SGLang plugin (`pip install "dspine-hub[sglang]"`).'
        )
    if input_ids.shape[1] == 0:
        raise ValueError("`input_ids` must hold at least one token, got an empty prompt.")
    if mask is not None and not bool((mask == 1).all()):
        raise ValueError("`attention_mask` must be all ones, got padding: strip the padding of the prompt.")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f"`past_key_values` must be empty, got {cache.get_seq_length()} rows: the drafter needs the target's "
            "states of the whole prompt. Pass all of the prompt and no cache."
        )
    kinds = getattr(target.config.get_text_config(), "layer_types", None) or []
    recurrent = sorted({kind for kind in kinds if kind not in ("full_attention", "sliding_attention")})
    if recurrent:
        raise ValueError(
            f"`target` must keep a cache that rejected drafts can be taken back from, got layers of type {recurrent}: "
            'serve such targets with the SGLang plugin (`pip install "dspine-hub[sglang]"`).'
        )


def spec_generate(
    drafter,
    target,
    input_ids: torch.LongTensor,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    stop_token_ids: list[int] | None = None,
    *,
    streamer=None,
    on_round=None,
    generator: torch.Generator | None = None,
    tokenizer=None,
    stop_strings: str | list[str] | None = None,
    **generate_kwargs,
):
    """Generate with `target`, drafted by this drafter; the text is the target's own.

    Args:
        target (`PreTrainedModel`): The target; the drafter is bound to it.
        input_ids (`torch.Tensor` of shape `[1, P]`, int64): Prompt.
        max_new_tokens (`int`, *optional*): Never overshot.
        temperature (`float`, *optional*): `0` decodes greedily, a positive value samples. Unset, the target's own
            generation config decides.
        stop_token_ids (`list[int]`, *optional*): Tokens that end the text, in place of the target's.
        streamer (`BaseStreamer`, *optional*): As in `generate`.
        on_round (`Callable`, *optional*): See [`dspine_decode`].
        generator (`torch.Generator`, *optional*): Source of all random numbers; the global one by default.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Needed by `stop_strings`; its vocabulary is checked.
        stop_strings (`str` or `list[str]`, *optional*): Strings that end the text.
        generate_kwargs: Anything else `target.generate` takes: `top_k`, `top_p`, `repetition_penalty`,
            `logits_processor`, `stopping_criteria`, `generation_config`, `return_dict_in_generate`.

    Returns:
        `torch.Tensor` of shape `[1, P + n]`, int64, or [`DSpineGenerateOutput`] with `return_dict_in_generate=True`.

    Raises:
        ValueError: When the target is not the drafter's, or the request cannot be decoded.
    """
    if temperature is not None:
        if temperature < 0:
            raise ValueError(f"`temperature` must be >= 0, got {temperature}.")
        generate_kwargs["do_sample"] = temperature > 0
        if temperature > 0:
            generate_kwargs["temperature"] = temperature
    if max_new_tokens is not None:
        if max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be >= 1, got {max_new_tokens}.")
        generate_kwargs["max_new_tokens"] = max_new_tokens
    if stop_token_ids is not None:
        # an id no token has: an empty list stops nowhere, while `None` would bring the target's own back
        generate_kwargs["eos_token_id"] = list(stop_token_ids) or [-1]
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError("`tokenizer` must be given with `stop_strings`, got None.")
        criteria = StoppingCriteriaList(generate_kwargs.pop("stopping_criteria", None) or [])
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
        generate_kwargs["stopping_criteria"] = criteria
    if not drafter.is_bound_to(target):
        drafter.bind(target)
    drafter.invalidate_if_changed()
    if tokenizer is not None:
        drafter.check_tokenizer(tokenizer)
    # bound here, since `generate` hands no streamer to a callable
    decode = partial(dspine_decode, drafter=drafter, token_streamer=streamer, on_round=on_round, generator=generator)
    return target.generate(input_ids, custom_generate=decode, **generate_kwargs)


__all__ = [
    "DSpineGenerateOutput",
    "DSpineStatistics",
    "TapRecorder",
    "dspine_decode",
    "spec_generate",
    "summarize",
]
