"""The schema of one measured result, the only source of a number on a card.

A receipt states the whole protocol beside the number: two receipts may share a table only when `protocol` is equal.
"""

import json
from datetime import date
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from dspine_hub.errors import DSpineHubError, describe_problems

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{7,40}(-dirty)?$")]
Text = Annotated[str, StringConstraints(min_length=1)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Engine(_Strict):
    """What decoded: `name` is `transformers` or `sglang`; `commit` is `None` for a released version."""

    name: Text
    version: Text
    commit: Commit | None


class Hardware(_Strict):
    """Where: device name as the driver reports it, how many, and the CPU."""

    gpu: Text | None
    gpu_count: Annotated[int, Field(ge=0)]
    cpu: Text | None

    @model_validator(mode="after")
    def _some_device(self):
        if (self.gpu is None) != (self.gpu_count == 0) or (self.gpu is None and self.cpu is None):
            raise ValueError(
                f"`gpu` with `gpu_count`, or `cpu` alone, must be named, got {self.gpu_count} of {self.gpu}."
            )
        return self


class Decoding(_Strict):
    """How text was produced.

    Args:
        dtype, attention_backend (`str`): Of the target.
        block (`int`): Rows of a block, the anchor included.
        temperature (`float`): 0 is greedy.
        top_p (`float`, *optional*), top_k (`int`, *optional*): `None` when not applied.
        enable_thinking (`bool`, *optional*): As given to the chat template; `None` without a switch.
        chat_template_sha256 (`str`, *optional*): `None` for raw prompts.
        max_new_tokens, concurrency (`int`): Budget of a request and requests at a time.
        prefill_included (`bool`): Whether times include the prompt's own pass.
    """

    dtype: Text
    attention_backend: Text
    block: Annotated[int, Field(ge=2)]
    temperature: Annotated[float, Field(ge=0)]
    top_p: Annotated[float, Field(gt=0, le=1)] | None
    top_k: Positive | None
    enable_thinking: bool | None
    chat_template_sha256: Sha256 | None
    max_new_tokens: Positive
    concurrency: Positive
    prefill_included: bool

    @model_validator(mode="after")
    def _honest(self):
        if self.temperature > 0 and self.top_k == 1:
            raise ValueError(
                f"`top_k` must not be 1 with `temperature` {self.temperature}: that is greedy, record it as 0."
            )
        if self.enable_thinking is not None and self.chat_template_sha256 is None:
            raise ValueError(
                "`enable_thinking` must come with `chat_template_sha256`: raw prompts have no such switch."
            )
        return self


class Suite(_Strict):
    """The prompts: name, Hub data set if there is one, its revision or hash, how many, and the seed of the choice."""

    name: Text
    dataset: Text | None = None
    revision: Text
    n: Positive
    seed: int | None


class Acceptance(_Strict):
    """Three means of the acceptance length (accepted drafts plus the target's own token), and acceptance by slot.

    Args:
        tau_per_request (`float`): Mean over requests of a request's mean.
        tau_token_weighted (`float`): Each request weighted by its tokens.
        tau_pooled (`float`): All lengths over all rounds.
        per_slot (`tuple[float | None]`): Share of rounds that accept slot `t` among those that accepted all before;
            `None` where no round got there.
        rounds, tokens (`int`): Totals.
    """

    tau_per_request: float
    tau_token_weighted: float
    tau_pooled: float
    per_slot: tuple[Share | None, ...]
    rounds: Positive
    tokens: Positive


class Speed(_Strict):
    """Speed against plain decoding in the same run: two rates in tokens/s, or their ratio."""

    tokens_per_second: Rate | None = None
    baseline_tokens_per_second: Rate | None = None
    speedup: Rate | None = None

    @model_validator(mode="after")
    def _has_baseline(self):
        rates = (self.tokens_per_second, self.baseline_tokens_per_second)
        if self.speedup is None and None in rates:
            raise ValueError("`baseline_tokens_per_second` or `speedup` must be given: a speed needs its baseline.")
        if (rates[0] is None) != (rates[1] is None):
            raise ValueError("`tokens_per_second` and `baseline_tokens_per_second` must come together.")
        if None not in (*rates, self.speedup) and abs(self.speedup * rates[1] / rates[0] - 1) > 0.01:
            raise ValueError(
                f"`speedup` must be the ratio of both rates {rates[0] / rates[1]:.3f}, got {self.speedup}."
            )
        return self

    @property
    def ratio(self) -> float:
        """Speed-up over plain decoding."""
        return self.speedup if self.speedup is not None else self.tokens_per_second / self.baseline_tokens_per_second


class GreedyMatch(_Strict):
    """Texts equal to plain greedy decoding, token for token, out of `prompts`."""

    equal: Annotated[int, Field(ge=0)]
    prompts: Positive

    @model_validator(mode="after")
    def _share(self):
        if self.equal > self.prompts:
            raise ValueError(f"`equal` must not exceed `prompts` {self.prompts}, got {self.equal}.")
        return self


class Model(_Strict):
    """A model by repository and revision; `None` for a folder that has none."""

    id: Text
    revision: Text | None


class DrafterModel(Model):
    """The drafter, also by the hash of its weights, so that a number cannot outlive them."""

    weights_sha256: Sha256


class Receipt(_Strict):
    """One measured result.

    Args:
        schema_version (`int`): 1.
        engine, hardware, decoding, suite, acceptance: As described there.
        speed ([`Speed`], *optional*): `None` when only acceptance was measured.
        greedy_match ([`GreedyMatch`], *optional*): Required at temperature 0.
        target ([`Model`]), drafter ([`DrafterModel`]): What was measured.
        simulated_acceptance (`bool`): Must be false: engines can fake acceptance for overhead tests.
        versions (`dict[str, str]`): Installed packages that matter.
        dspine_hub_commit (`str`, *optional*): Of this package's checkout; `None` for a released version.
        date (`date`): Day of the run.
        command (`str`): What was run.
    """

    schema_version: Literal[1]
    engine: Engine
    hardware: Hardware
    decoding: Decoding
    suite: Suite
    acceptance: Acceptance
    speed: Speed | None = None
    greedy_match: GreedyMatch | None = None
    target: Model
    drafter: DrafterModel
    simulated_acceptance: Literal[False]
    versions: dict[str, str]
    dspine_hub_commit: Commit | None
    date: date
    command: Text

    @model_validator(mode="after")
    def _cross_checks(self):
        block = self.decoding.block
        for name in ("tau_per_request", "tau_token_weighted", "tau_pooled"):
            value = getattr(self.acceptance, name)
            if not 1 <= value <= block:
                raise ValueError(f"`acceptance.{name}` must lie in [1, {block}], the block, got {value}.")
        if len(self.acceptance.per_slot) != block - 1:
            raise ValueError(
                f"`acceptance.per_slot` must have `block` - 1 = {block - 1} entries, got "
                f"{len(self.acceptance.per_slot)}."
            )
        if self.decoding.temperature == 0 and self.greedy_match is None:
            raise ValueError("`greedy_match` must be given at temperature 0: how many texts equal plain decoding's?")
        if self.greedy_match is not None and self.greedy_match.prompts > self.suite.n:
            raise ValueError(
                f"`greedy_match.prompts` must not exceed `suite.n` {self.suite.n}, got {self.greedy_match.prompts}."
            )
        return self

    @property
    def protocol(self) -> str:
        """Everything that must be equal for two results to stand in one table, as canonical JSON."""
        parts = self.model_dump(
            mode="json",
            include={"engine", "hardware", "decoding", "target", "drafter", "versions", "dspine_hub_commit"},
        )
        return json.dumps(parts, sort_keys=True)


def parse_receipt(text: str | bytes, place: str) -> Receipt:
    """Read one receipt.

    Args:
        text (`str` or `bytes`): JSON.
        place (`str`): File name for messages.

    Returns:
        `Receipt`: The validated receipt.

    Raises:
        DSpineHubError: When the text is no receipt; the message names key, rule and value.
    """
    try:
        return Receipt.model_validate_json(text)
    except ValidationError as error:
        raise DSpineHubError(
            f"`{place}` must be a receipt: {describe_problems(error)} Measure again: a number without its protocol is "
            "not shown."
        ) from None
