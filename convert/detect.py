"""Which format a source is in, told by its tensors' names and its config, with the reasons for the decision."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dspine_hub.checkpoints.formats import FORMATS
from dspine_hub.errors import DSpineHubError

# tensors shown of a source nobody knows; a checkpoint may hold hundreds
SHOWN = 24
_PREFIX = r"(?:(?:model|draft_model)\.)?"


@dataclass(frozen=True)
class Detection:
    """A key of `FORMATS`, and the observations that led to it."""

    format: str
    reasons: tuple[str, ...]


def detect(config: dict, files: Mapping[str, Mapping[str, tuple[int, ...]]], name: str = "the source") -> Detection:
    """Tell a source's format.

    Args:
        config (`dict`): Its `config.json`.
        files (`Mapping`): File name -> tensor name -> shape.
        name (`str`): What to call the source in an error.

    Returns:
        [`Detection`].

    Raises:
        DSpineHubError: When it is none of `FORMATS`; lists the tensors nobody knows.
    """
    names = [tensor for tensors in files.values() for tensor in tensors]
    if config.get("model_type") == "dspine":
        return Detection("hub", ("`model_type` is 'dspine'",))
    nested = isinstance(config.get("config"), dict)
    inner = config["config"] if nested else config
    injection = _some(names, r"injection\..+")
    codes, alone = _some(names, r"transfer_codes"), _codes_file(files)
    architectures = inner.get("architectures") or []
    if injection and alone and not codes:
        reasons = ["tensors `injection.*` without `transfer_codes`", f"`{alone}` holds the one tensor `codes`"]
        if nested:
            reasons.append("the config lies under `config`")
        return Detection("reference", tuple(reasons))
    if injection or "DSpineDraftModel" in architectures:
        found = [text for text, there in (("`injection.*`", injection), ("`transfer_codes`", codes)) if there]
        reasons = [f"tensors {' and '.join(found)}" if found else "no tensor of a DSpine drafter"]
        if "DSpineDraftModel" in architectures:
            reasons.append("`architectures` names DSpineDraftModel")
        return Detection("specforge", tuple(reasons))
    backbone = all(_some(names, re.escape(wanted)) for wanted in ("fc.weight", "hidden_norm.weight"))
    named = "DFlashDraftModel" in architectures or inner.get("speculators_model_type") == "dflash"
    if backbone and named and not _strange(names):
        why = (
            "`architectures` names DFlashDraftModel" if "DFlashDraftModel" in architectures else "speculators' dflash"
        )
        return Detection("dflash", ("tensors `fc` and `hidden_norm`, no `injection.*`", why))
    raise DSpineHubError(_refusal(name, inner, files, _strange(names)))


def _some(names: list[str], pattern: str) -> bool:
    return any(re.fullmatch(_PREFIX + pattern, name) for name in names)


def _codes_file(files: Mapping[str, Mapping]) -> str | None:
    return next((name for name, tensors in files.items() if list(tensors) == ["codes"]), None)


def _strange(names: list[str]) -> list[str]:
    """Return the tensors that no backbone of a block drafter has."""
    known = (
        r"fc\.weight|(?:hidden_norm|norm|embed_tokens|lm_head)\.weight|d2t|t2d|rotary_emb\.inv_freq"
        r"|layers\.\d+\.(?:input|post_attention)_layernorm\.weight"
        r"|layers\.\d+\.self_attn\.(?:(?:q|k|v|o|qkv)_proj\.(?:weight|bias)|[qk]_norm\.weight)"
        r"|layers\.\d+\.mlp\.(?:gate|up|down|gate_up)_proj\.weight"
    )
    return [name for name in names if not re.fullmatch(_PREFIX + f"(?:{known})", name)]


def _refusal(name: str, config: dict, files: Mapping[str, Mapping], strange: list[str]) -> str:
    tensors = {tensor: shape for group in files.values() for tensor, shape in group.items()}
    shown = [tensor for tensor in tensors if tensor in strange] or list(tensors)
    text = ", ".join(f"`{tensor}` {list(tensors[tensor])}" for tensor in shown[:SHOWN])
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    kind = f"`model_type` {config.get('model_type')!r}, `architectures` {config.get('architectures')}"
    return (
        f"`{name}` must be in a known format ({', '.join(FORMATS)}), got {kind} and unknown tensors: "
        f"{text or 'none at all'}{more}. If you know better, name it with `--from`."
    )
