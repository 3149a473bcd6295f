"""A config of another format to the fields of `DSpineConfig`, and back.

Nothing is guessed: a field comes from the config, from a tensor's shape, or from the target, or is reported missing.
What the hub layout has no field for is kept under `origin` in its config, so that the way back restores it.
"""

import copy
from collections.abc import Mapping

from huggingface_hub.errors import StrictDataclassError

from dspine_hub.checkpoints.formats import (
    DEFAULTS,
    DROPPED_KEYS,
    FORMATS,
    NEUTRAL,
    NEUTRAL_FOR_DFLASH,
    PLACES,
    ROPE_KEYS,
    ROPE_PLACES,
    SHARED_KEYS,
    START_MESSAGE,
    START_RANK,
    TAP_MEANINGS,
    TAP_PLACES,
)
from dspine_hub.configuration_dspine import DSpineConfig
from dspine_hub.errors import DSpineHubError

ABSENT = object()


def lookup(config: dict, place: str):
    """Return the value at a dotted place, or `ABSENT`."""
    for key in place.split("."):
        if not isinstance(config, dict) or config.get(key) is None:
            return ABSENT
        config = config[key]
    return config


def flatten(config: dict, format_name: str) -> dict:
    """Undo nesting: the reference layout's `config`, speculators' `transformer_layer_config`."""
    if isinstance(config.get("config"), dict):
        if not FORMATS[format_name].nested:
            raise DSpineHubError(
                f"`config.json` must hold its fields at the top in the format `{format_name}`, got them nested under "
                "`config`, as the reference layout has them: move them up, or pass `--from reference`."
            )
        config = {**{key: value for key, value in config.items() if key != "config"}, **config["config"]}
    if isinstance(config.get("transformer_layer_config"), dict):
        rest = {key: value for key, value in config.items() if key != "transformer_layer_config"}
        config = {**config["transformer_layer_config"], **rest}
    return config


def read_taps(config: dict, meaning: str | None = None) -> list[int]:
    """Read the tapped layers as "output of decoder layer id".

    Args:
        config (`dict`): Flat config.
        meaning (`str`, *optional*): A key of `TAP_MEANINGS`, instead of what the place of the ids means.

    Raises:
        DSpineHubError: When no place gives them, or two disagree.
    """
    found = {}
    for place, usual in TAP_PLACES.items():
        ids = lookup(config, place)
        if ids is ABSENT:
            continue
        if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
            raise DSpineHubError(f"`{place}` must be a list of layer numbers, got {ids!r}.")
        # every other meaning names the state one layer later than "output of layer id" does
        shift = TAP_MEANINGS[meaning or usual]
        found[place] = [layer + shift for layer in ids]
    if not found:
        raise DSpineHubError(
            f"`target_layer_ids` must be given, in one of {', '.join(f'`{place}`' for place in TAP_PLACES)}, got "
            "none: which layers were tapped is a choice made in training, and never guessed."
        )
    return _agreed("target_layer_ids", found)


def _agreed(name: str, found: dict):
    values = list(found.values())
    if any(value != values[0] for value in values[1:]):
        given = ", ".join(f"{value} from `{place}`" for place, value in found.items())
        raise DSpineHubError(f"`{name}` must be the same wherever it is given, got {given}.")
    return values[0] if values else None


def read_settings(
    raw: dict,
    format_name: str,
    shapes: Mapping[str, tuple[int, ...]],
    target: dict | None = None,
    tap_ids: str | None = None,
) -> tuple[DSpineConfig, list[str]]:
    """Translate a config.

    Args:
        raw (`dict`): The source's `config.json`.
        format_name (`str`): A key of `FORMATS`.
        shapes (`Mapping`): Shapes of the source's tensors, by the drafter's own names.
        target (`dict`, *optional*): The target's record, one value for each of `TARGET_FIELDS`.
        tap_ids (`str`, *optional*): What the ids of tapped layers mean, a key of `TAP_MEANINGS`.

    Returns:
        `tuple[DSpineConfig, list[str]]`: The config, and a note for everything a reader should know.

    Raises:
        DSpineHubError: When a rule is broken; nothing is filled in by guess.
    """
    if format_name == "hub":
        return _upgraded(raw, target)
    config, notes = flatten(raw, format_name), []
    _check_meaning(config, format_name)
    fields = {key: config[key] for key in (*SHARED_KEYS, *ROPE_KEYS) if config.get(key) is not None}
    for name, places in PLACES.items():
        found = {place: lookup(config, place) for place in places}
        found = {place: value for place, value in found.items() if value is not ABSENT}
        if found and not (name == "block_size" and FORMATS[format_name].block_size):
            fields[name] = _agreed(name, found)
    found = {place: lookup(config, place) for place in ROPE_PLACES}
    _agreed("rope_theta", {place: value for place, value in found.items() if value is not ABSENT})
    fields["target_layer_ids"] = read_taps(config, tap_ids)
    _check_mask(fields, config)
    _fill_from_shapes(fields, shapes)
    _fill_from_format(fields, config, format_name, notes)
    if target is not None:
        fields.setdefault("num_target_layers", target["num_hidden_layers"])
        _check_sizes(fields, target)
        fields["target"] = fields.get("target") or target
    kept = _kept(config)
    if kept:
        fields["origin"] = {"format": format_name, "config": kept}
    return _build(fields), notes


def _check_sizes(fields: dict, target: dict) -> None:
    pairs = (
        ("hidden_size", "hidden_size"),
        ("num_target_layers", "num_hidden_layers"),
        ("vocab_size", "padded_vocab_size"),
    )
    for mine, theirs in pairs:
        if fields.get(mine) != target[theirs]:
            raise DSpineHubError(
                f"`{mine}` of the drafter must equal the target's, got {fields.get(mine)} for a target with "
                f"{target[theirs]}: give the target it was trained for with `--target`."
            )


def _check_meaning(config: dict, format_name: str) -> None:
    for place, neutral in NEUTRAL.items():
        value = lookup(config, place)
        if value is ABSENT or value in neutral or format_name == "dflash" and place in NEUTRAL_FOR_DFLASH:
            continue
        allowed = " or ".join(["absent", *(repr(item) for item in neutral if item is not None)])
        raise DSpineHubError(
            f"`{place}` must be {allowed}, got {value!r}: it changes what the weights compute, and DSpine has no such "
            "part."
        )
    kinds = sorted(set(config.get("layer_types") or []) - {"full_attention"})
    if kinds or config.get("use_sliding_window") and not config.get("layer_types"):
        got = kinds or "`use_sliding_window`"
        raise DSpineHubError(
            f"`layer_types` must be 'full_attention' everywhere, got {got}: context rows outside a window would have "
            "to be forgotten, which neither the cache nor the kernels do yet."
        )
    vocabulary = config.get("draft_vocab_size")
    if vocabulary not in (None, config.get("vocab_size")):
        raise DSpineHubError(
            f"`draft_vocab_size` must equal `vocab_size` {config.get('vocab_size')}, got {vocabulary}: candidates are "
            "scored with the target's own LM head."
        )


def _check_mask(fields: dict, config: dict) -> None:
    mask = fields.get("mask_token_id")
    if mask is None:
        raise DSpineHubError(
            "`mask_token_id` must be given, in `dflash_config.mask_token_id` or `mask_token_id`, got none: it is a "
            "choice made in training, and never guessed."
        )
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        used = config.get(name)
        if mask in (used if isinstance(used, list) else [used]):
            raise DSpineHubError(f"`mask_token_id` must not be a token in use, got {mask}, the config's `{name}`.")


def _fill_from_shapes(fields: dict, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Fill in what a tensor's shape says, and refuse a config that says otherwise."""
    facts = {
        "head_dim": ("layers.0.self_attn.q_norm.weight", 0),
        "intermediate_size": ("layers.0.mlp.gate_proj.weight", 0),
        "transfer_rank": ("injection.readouts.0.weight", 0),
        "message_size": ("injection.message.weight", 0),
    }
    for name, (tensor, axis) in facts.items():
        if tensor in shapes and len(shapes[tensor]) > axis:
            size = shapes[tensor][axis]
            # a tensor of the wrong shape is reported as such, with the others
            if fields.setdefault(name, size) != size and name in ("transfer_rank", "message_size"):
                raise DSpineHubError(f"`{name}` must be {size}, the rows of `{tensor}`, got {fields[name]}.")


def _fill_from_format(fields: dict, config: dict, format_name: str, notes: list[str]) -> None:
    block = FORMATS[format_name].block_size
    if block is not None:
        fields["block_size"] = block
        given = {lookup(config, place) for place in PLACES["block_size"]} - {ABSENT, block}
        if given:
            notes.append(f"block_size {sorted(given)} of the config ignored: this layout's drafters ran blocks of 16")
    for name, value in DEFAULTS.items():
        if name not in fields:
            fields[name] = value
            notes.append(f"{name} is {value}, the trainer's default; the config does not give it")
    if format_name != "dflash":
        if config.get("is_causal") is not None:
            fields["is_causal"] = config["is_causal"]
        return
    limit = min(fields.get("hidden_size") or 0, (fields.get("vocab_size") or 0) - 1)
    fields.setdefault("transfer_rank", max(1, min(START_RANK, limit)))
    fields.setdefault("message_size", max(1, min(START_MESSAGE, fields["transfer_rank"] // 2)))
    fields["num_candidates"] = min(fields["num_candidates"], fields.get("vocab_size") or 1)
    notes.append("the injection starts silent (zero writes): train it before expecting more than the backbone gives")
    if config.get("is_causal") is not True:
        notes.append("the backbone was trained to look both ways inside a block and runs causally here")


def _kept(config: dict) -> dict:
    """Return what no field holds: training settings, token ids, keys of others."""
    kept = copy.deepcopy(config)
    read = {*SHARED_KEYS, *ROPE_KEYS, *DROPPED_KEYS, "is_causal", "dspine_hub", "config"}
    for place in [*read, *TAP_PLACES, *(place for places in PLACES.values() for place in places)]:
        *parents, last = place.split(".")
        node = kept
        for parent in parents:
            node = node.get(parent) if isinstance(node.get(parent), dict) else {}
        node.pop(last, None)
    # what a writer of SpecForge's layout states anew
    stated = {"tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": None}
    return {key: value for key, value in kept.items() if value != {} and stated.get(key, ABSENT) != value}


def _upgraded(raw: dict, target: dict | None) -> tuple[DSpineConfig, list[str]]:
    fields = {key: value for key, value in raw.items() if key != "auto_map"}
    fields["target"] = fields.get("target") or target
    return _build(fields), []


def _build(fields: dict) -> DSpineConfig:
    try:
        return DSpineConfig(**fields)
    except (ValueError, StrictDataclassError) as error:
        # a rule's own sentence comes last
        raise DSpineHubError(f"the drafter's config breaks a rule: {_cause(error)}") from None


def _cause(error: Exception) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


def specforge_config(config: DSpineConfig) -> dict:
    """Write a drafter's config the way SpecForge reads it."""
    origin = getattr(config, "origin", None) or {}
    kept = copy.deepcopy(origin.get("config") or {}) if origin.get("format") in ("specforge", "reference") else {}
    result = {**kept, **{key: getattr(config, key) for key in SHARED_KEYS}}
    result |= {
        "architectures": ["DSpineDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "is_causal": True,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_parameters": dict(config.rope_parameters),
        # a tie would make its loader look for an embedding
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "dtype": "bfloat16",
    }
    result["dflash_config"] = kept.get("dflash_config", {}) | {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    result["dspine_config"] = kept.get("dspine_config", {}) | {
        "transfer_rank": config.transfer_rank,
        "message_size": config.message_size,
        "top_k": config.num_candidates,
    }
    if config.target is not None:
        result["dspine_hub"] = {"target": dict(config.target)}
    return result
