"""One conversion: read headers, decide, plan, then write config and weights into a given folder.

Everything that can be refused without reading weights is refused before a byte is written. Weights stream through a
few megabytes; the model exists on `meta` only, to say which tensors the destination has.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dspine_hub.checkpoints.expected import START_NAMES, expected_tensors
from dspine_hub.checkpoints.formats import FORMATS
from dspine_hub.checkpoints.settings import read_settings, specforge_config
from dspine_hub.checkpoints.targets import stored_sha256
from dspine_hub.checkpoints.tensors import StoredTensor
from dspine_hub.configuration_dspine import DSpineConfig
from dspine_hub.conversion import transfer
from dspine_hub.conversion.detect import Detection
from dspine_hub.conversion.drafter_files import DrafterFiles
from dspine_hub.conversion.quantize import quantization_config, quantize_items
from dspine_hub.conversion.rules import Plan, check_dtype, make_plan, storage_dtype
from dspine_hub.conversion.writing import Item, made, write_weights
from dspine_hub.errors import DSpineHubError
from dspine_hub.findings import Report


@dataclass
class Conversion:
    """What was converted.

    Args:
        detection ([`Detection`]): The source's format, and why.
        config ([`DSpineConfig`]): The drafter's config.
        notes (`list[str]`): What a reader should know: dropped tensors, settings not as the config says.
        hashes (`dict[str, str]`): Weight file -> sha256.
        report ([`Report`]): Findings about the pair, when a target was given.
    """

    detection: Detection
    config: DSpineConfig
    notes: list[str] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    report: Report = field(default_factory=Report)


def read_source(source: DrafterFiles, target=None, tap_ids: str | None = None) -> tuple[DSpineConfig, list[str]]:
    """Translate a source's config; `target` is one of `targets`' classes."""
    if FORMATS[source.format].needs_target and target is None:
        raise DSpineHubError(
            f"`--target` must be given for the format `{source.format}`, got none: the codes are made of its LM head."
        )
    record = None if target is None else target.record()
    config, notes = read_settings(source.config, source.format, source.shapes(), record, tap_ids)
    if config.target is not None and config.target["lm_head_sha256"] is None and record is not None:
        config.target = {**config.target, "lm_head_sha256": record["lm_head_sha256"]}
    heads = [tensor for name, tensor in source.tensors().items() if name.endswith("lm_head.weight")]
    if heads and source.config.get("tie_word_embeddings"):
        raise DSpineHubError(
            "`tie_word_embeddings` must be false beside a stored `lm_head.weight`, got true and "
            f"{list(heads[0].shape)}: the flag was copied from the target, and which of the "
            "two was used in training cannot be told."
        )
    return config, notes


def write_converted(
    source: DrafterFiles,
    folder: Path,
    to: str,
    target=None,
    storage: str | None = None,
    tap_ids: str | None = None,
    quantize: str | None = None,
    check=None,
) -> Conversion:
    """Write config and weights of a converted drafter.

    Args:
        source ([`DrafterFiles`]): What to convert.
        folder (`Path`): Existing empty folder to write to.
        to (`str`): A key of `FORMATS` that can be written.
        target (*optional*): A target of `targets`.
        storage (`str`, *optional*): `"codes"` or `"basis"`; as in the source by default.
        tap_ids (`str`, *optional*): What the ids of tapped layers mean.
        quantize (`str`, *optional*): A key of `QUANTIZATIONS`.
        check (*optional*): `check(folder) -> Report`, called when the config is written and no weight is.

    Returns:
        [`Conversion`].

    Raises:
        DSpineHubError: When anything is missing, unknown, contradictory or damaged.
    """
    config, notes = read_source(source, target, tap_ids)
    result = Conversion(source.detection, config, notes)
    stored = config.transfer_storage
    wanted = storage or ("codes" if to == "specforge" else stored)
    if to == "specforge" and wanted != "codes":
        raise DSpineHubError("`--compact` must go with `--to hub`, got specforge: it knows only the table of codes.")
    if to == "specforge" and quantize is not None:
        raise DSpineHubError(f"`--quantize {quantize}` must go with `--to hub`, got specforge: it trains in bfloat16.")
    plan, items = plan_weights(source, config, target)
    notes += [f"`{tensor.name}` {list(tensor.shape)} left out: {rule.reason}" for tensor, rule in plan.dropped]
    _check_dropped(plan, target)
    if wanted != stored:
        _check_head(config, target, stored)
    if quantize is not None:
        items, config.quantization_config = quantize_items(items, quantize), quantization_config(quantize)
    _write_config(folder, _with_storage(config, wanted), to)
    if check is not None:
        result.report = check(folder)
    if wanted != stored:
        items = _change_storage(items, plan, config, target, wanted, notes)
        result.config = _with_storage(config, wanted)
        _write_config(folder, result.config, to)
    result.hashes = write_weights(folder, items)
    return result


def plan_names(source: DrafterFiles, config: DSpineConfig) -> Plan:
    """Decide where every tensor of the destination comes from, by names and shapes alone."""
    tensors, expected, from_elsewhere = source.tensors(), expected_tensors(config), set()
    if source.format == "dflash":
        from_elsewhere = {name for name in expected if name.startswith(START_NAMES)}
    elif source.format == "reference":
        from_elsewhere = {"transfer_ready"} - set(tensors)
    if source.format in ("specforge", "reference"):
        _check_codes_are_there(tensors)
    return make_plan(tensors, expected, from_elsewhere)


def plan_weights(source: DrafterFiles, config: DSpineConfig, target=None) -> tuple[Plan, list[Item]]:
    """Return the plan and everything to write."""
    plan = plan_names(source, config)
    for name, tensor in plan.filled.items():
        check_dtype(name, tensor)
    items = [_copied(name, tensor) for name, tensor in plan.filled.items()]
    ready = plan.filled.get("transfer_ready")
    if ready is not None and not bool(ready.load()):
        raise DSpineHubError("`transfer_ready` must be true, got false: this drafter was never trained.")
    if source.format == "dflash":
        items += transfer.silent_start(config, target.head())
    elif ready is None:
        # the reference layout has no such flag; its codes are there
        items.append(made("transfer_ready", torch.tensor(True)))
    return plan, items


def _check_codes_are_there(tensors: dict[str, StoredTensor]) -> None:
    if not any(name == "codes" or name.endswith("transfer_codes") for name in tensors):
        raise DSpineHubError(
            "`transfer_codes` must be stored, or `codes` in a file of its own, got neither: eigenvectors have no "
            "fixed sign, so the table cannot be made again from the target. Ask whoever trained it for the file."
        )


def _copied(name: str, tensor: StoredTensor) -> Item:
    def pieces() -> Iterator[torch.Tensor]:
        return tensor.pieces()

    return Item(name, tensor.shape, storage_dtype(name), pieces)


def _check_dropped(plan: Plan, target) -> None:
    """Compare what is left out with what it must equal."""
    for tensor, rule in plan.dropped:
        if rule.equal_to is None:
            continue
        if rule.equal_to == "identity":
            values = tensor.load()
            same = bool((values == (1 if values.dtype == torch.bool else 0)).all())
            wanted = "map every token to itself"
        elif target is None:
            raise DSpineHubError(
                f"`{tensor.name}` {list(tensor.shape)} must equal the target's {rule.equal_to}, and cannot be "
                "compared without it: give `--target`."
            )
        else:
            theirs = target.head_sha256() if rule.equal_to == "head" else target.embedding_sha256()
            same, wanted = stored_sha256(tensor) == theirs, f"equal the target's {rule.equal_to}"
        if not same:
            raise DSpineHubError(
                f"`{tensor.name}` {list(tensor.shape)} must {wanted}, got other values: {rule.reason}, and a drafter "
                "that was trained with another would be used wrongly."
            )


def _with_storage(config: DSpineConfig, storage: str) -> DSpineConfig:
    return DSpineConfig(**{**config.to_dict(), "transfer_storage": storage})


def _check_head(config: DSpineConfig, target, stored: str) -> None:
    option = "--expand" if stored == "basis" else "--compact"
    if target is None:
        raise DSpineHubError(f"`{option}` needs the target's LM head, got no `--target`.")
    recorded, found = (config.target or {}).get("lm_head_sha256"), target.head_sha256()
    if recorded not in (None, found):
        raise DSpineHubError(
            f"`lm_head_sha256` of the target must be {recorded[:12]}, got {found[:12]}: codes can only be exchanged "
            f"for a basis with the head they were made of. Give `{config.target['id']}` itself."
        )


def _change_storage(items, plan: Plan, config: DSpineConfig, target, wanted: str, notes: list[str]) -> list[Item]:
    kept = [item for item in items if not item.name.startswith(("transfer_codes", "transfer_basis"))]
    head, codes = target.head(), next((item for item in items if item.name == "transfer_codes"), None)
    if wanted == "basis":
        table = torch.cat(list(map(torch.clone, codes.pieces()))).reshape(codes.shape)
        changed, config.transfer_checksums = transfer.compact(head, table)
        config.target = {**config.target, "lm_head_sha256": target.head_sha256()}
        return kept + changed
    basis = tuple(plan.filled[f"transfer_basis.{name}"].load() for name in transfer.BASIS)
    checksums = config.to_dict().get("transfer_checksums") or {}
    changed, found = transfer.expand(head, basis, checksums)
    notes += found
    config.transfer_checksums = None
    return kept + changed


def _write_config(folder: Path, config: DSpineConfig, to: str) -> None:
    if to == "hub":
        config.architectures = ["DSpineForSpeculation"]
        config.dtype = "bfloat16"
        fields = {name: value for name, value in config.to_diff_dict().items() if value is not None}
    else:
        fields = specforge_config(config)
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
