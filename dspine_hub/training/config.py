"""A training run as one YAML file: every key is checked, an unknown one is refused."""

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dspine_hub.errors import DSpineHubError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SourceConfig(_Strict):
    """Training text: `.bin` (a stream of uint16 or uint32 token ids, documents closed by the end token), `.npz`
    (`input_ids` and `loss_mask`, both `[n, length]`) or `.jsonl` (`text`, or `prompt` and `completion`)."""

    path: Path
    repeat: int = Field(1, ge=1)


class DataConfig(_Strict):
    train: list[SourceConfig] = Field(min_length=1)
    eval: list[SourceConfig] = []
    sequence_length: int = Field(ge=2)
    token_dtype: Literal["uint16", "uint32"] = "uint16"


class OptimizerConfig(_Strict):
    learning_rate: float = Field(gt=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_ratio: float = Field(0.04, ge=0, lt=1)
    final_ratio: float = Field(0.0, ge=0, le=1)
    clip: float = Field(1.0, gt=0)


class ObjectiveConfig(_Strict):
    """Weights and schedules of the drafter's objective; the defaults are the public recipe's."""

    anchors: int = Field(512, ge=1)
    ce_weight: float = Field(0.1, ge=0, le=1)
    slot_decay: float = Field(7.0, gt=0)
    alignment_weight: float = Field(0.5, ge=0)
    alignment_warmup_steps: int = Field(146, ge=0)
    replacement_layers: int = Field(3, ge=0)
    replacement_probability: float = Field(0.5, ge=0, le=1)
    replacement_hold_ratio: float = Field(1 / 6, ge=0, le=1)
    replacement_end_ratio: float = Field(1 / 3, ge=0, le=1)
    candidate_mass_threshold: float = Field(1e-4, ge=0, lt=1)
    rows_per_chunk: int = Field(8192, ge=1)
    injection: bool = True

    @model_validator(mode="after")
    def _ordered(self):
        if self.replacement_hold_ratio >= self.replacement_end_ratio:
            raise ValueError(
                "`replacement_hold_ratio` must be smaller than `replacement_end_ratio`, got "
                f"{self.replacement_hold_ratio} and {self.replacement_end_ratio}"
            )
        return self


class AcceptanceConfig(_Strict):
    """Acceptance measured with the real decoding loop, greedily, on prompts that are not in the training data."""

    prompts: Path
    count: int = Field(16, ge=1)
    max_new_tokens: int = Field(64, ge=1)


class TrainConfig(_Strict):
    kind: Literal["drafter", "causal_lm"]
    output: Path
    target: Path | str
    model: dict[str, Any]
    data: DataConfig
    optimizer: OptimizerConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    acceptance: AcceptanceConfig | None = None
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    micro_batch_size: int | None = Field(None, ge=1)
    mixed_precision: Literal["no", "bf16"] = "bf16"
    compile: bool = False
    seed: int = 0
    log_every: int = Field(20, ge=1)
    eval_every: int = Field(500, ge=1)
    eval_batches: int = Field(8, ge=1)
    save_every: int = Field(1000, ge=1)
    keep_checkpoints: int = Field(2, ge=1)

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _yaml_no(cls, value):
        # YAML reads a bare `no` as false
        return "no" if value is False else value


def load_config(path: str | Path, overrides: tuple[str, ...] = ()) -> TrainConfig:
    """Read a run from YAML.

    Args:
        path (`str` or `Path`): The file.
        overrides (`tuple[str, ...]`): `dotted.key=value` settings applied on top; values are read as YAML.

    Returns:
        [`TrainConfig`].

    Raises:
        DSpineHubError: When the file is missing, is no YAML mapping, or breaks a rule.
    """
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text())
    except (FileNotFoundError, IsADirectoryError):
        raise DSpineHubError(f"`CONFIG` must name a YAML file, got `{path}`, which does not exist as one.") from None
    except yaml.YAMLError as error:
        raise DSpineHubError(f"`{path}` must be valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise DSpineHubError(f"`{path}` must hold a YAML mapping, got {type(raw).__name__}.")
    for override in overrides:
        _override(raw, override)
    try:
        return TrainConfig.model_validate(raw)
    except ValidationError as error:
        lines = [
            f"`{'.'.join(map(str, item['loc']))}`: {item['msg']}, got {item['input']!r}." for item in error.errors()
        ]
        raise DSpineHubError(f"`{path}` breaks {len(lines)} rule(s):\n" + "\n".join(lines)) from None


def _override(raw: dict, override: str) -> None:
    key, separator, value = override.partition("=")
    *parents, last = key.split(".")
    node = raw
    for name in parents:
        if isinstance(node, dict) and node.get(name) is None:
            node[name] = {}
        node = node[name] if isinstance(node, dict) else None
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        separator = ""
    if not separator or not last or not isinstance(node, dict):
        raise DSpineHubError(f"`--set` takes dotted.key=value, got {override!r}: the key must name a setting.")
    node[last] = parsed
