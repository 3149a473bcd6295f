"""What a drafter records about its target, and whether a given target is that one.

[`check_pair`] reads configs, tokenizers and tensor headers only, so it answers before a weight is loaded. The LM head
is hashed when its file is local; of a repository only its shape is compared.
"""

from pathlib import Path

from dspine_hub.checkpoints.sources import Source
from dspine_hub.checkpoints.targets import TargetFiles, chat_template_fingerprint, stored_sha256
from dspine_hub.checkpoints.tensors import StoredTensor
from dspine_hub.configuration_dspine import DSpineConfig, tokenizer_fingerprint
from dspine_hub.errors import DSpineHubError
from dspine_hub.findings import Report


def check_pair(drafter: str | Path | Source, target: str | Path | Source) -> Report:
    """Check whether a drafter fits a target, from configs, tokenizers and headers.

    Args:
        drafter (`str`, `Path` or `Source`): Folder or repository of the drafter.
        target (`str`, `Path` or `Source`): Folder or repository of the target.

    Returns:
        [`Report`]: Errors make the pair unusable or silently slow; warnings may cost acceptance.

    Raises:
        DSpineHubError: When a side cannot be read or the drafter's config breaks a rule.
    """
    mine = drafter if isinstance(drafter, Source) else Source(drafter)
    raw = mine.config()
    return check_config(validate_config(raw, mine.name), raw, TargetFiles(target))


def check_config(config: DSpineConfig, raw: dict, theirs: TargetFiles) -> Report:
    """Check a drafter's config against a target as [`check_pair`] does.

    Args:
        config ([`DSpineConfig`]): The drafter's.
        raw (`dict`): The file it was read from, in whatever format.
        theirs ([`TargetFiles`]): The target.
    """
    text, record = theirs.text, config.target or {}
    report = Report()
    _check_sizes(report, config, text)
    _check_head(report, config, record, theirs, theirs.head_header())
    tokenizer = theirs.source.tokenizer()
    _check_tokenizer(report, config, record, tokenizer, theirs.source.name)
    _check_positions(report, config, text)
    _check_dtype(report, raw, text)
    _check_generation(report, record, tokenizer, text)
    return report


def validate_config(raw: dict, name: str) -> DSpineConfig:
    """Build the config of a bundle from its `config.json`; `DSpineHubError` names the rule it breaks."""
    from huggingface_hub.errors import StrictDataclassError

    if raw.get("model_type") != "dspine":
        raise DSpineHubError(
            f"`model_type` of `{name}` must be 'dspine', got {raw.get('model_type')!r}: no DSpine drafter. If it is "
            f"one in another format: `dspine-hub convert {name} OUT`"
        )
    try:
        return DSpineConfig(**raw)
    except (ValueError, StrictDataclassError) as error:
        raise DSpineHubError(f"`config.json` of `{name}` breaks a rule: {error}") from None


def _check_sizes(report: Report, config: DSpineConfig, text: dict) -> None:
    wanted = (config.target or {}).get("id") or "the target it was trained for"
    pairs = (
        ("hidden-size", "hidden_size", config.hidden_size, text.get("hidden_size")),
        ("layer-count", "num_target_layers", config.num_target_layers, text.get("num_hidden_layers")),
        ("vocabulary", "vocab_size", config.vocab_size, text.get("vocab_size")),
    )
    for rule, name, mine, theirs in pairs:
        if mine != theirs:
            message = f"`{name}` of the drafter must equal the target's, got {mine} for a target with {theirs}."
            report.add("error", rule, message, f"use it with `{wanted}`")
    layers = text.get("num_hidden_layers") or 0
    outside = [layer for layer in config.target_layer_ids if layer >= layers - 1]
    if outside:
        report.add("error", "taps", f"`target_layer_ids` must lie in [0, {layers - 1}), got {outside}.")


def _check_head(report, config, record, theirs: TargetFiles, head: StoredTensor | None) -> None:
    quantised = (theirs.config.get("quantization_config") or {}).get("quant_method")
    if quantised:
        report.add(
            "info",
            "quantised-target",
            f"`quantization_config` of the target is {quantised!r}: candidates are scored with LM-head rows, which "
            "must be readable in full precision.",
        )
    if head is None:
        message = f"`{theirs.source.name}` stores no LM head under a known name; it was not compared."
        report.add("info", "head", message)
        return
    expected = (config.vocab_size, config.hidden_size)
    if head.shape != expected and not quantised:
        report.add("error", "head-shape", f"`{head.name}` must have shape {list(expected)}, got {list(head.shape)}.")
        return
    stored = record.get("lm_head_sha256")
    if not stored or quantised:
        return
    if theirs.source.folder is None:
        report.add("info", "head-sha256", "`lm_head_sha256` was not compared: the target's weights are not local.")
        return
    fingerprint = stored_sha256(head)
    if fingerprint != stored:
        message = f"`lm_head_sha256` must be {stored[:12]}, got {fingerprint[:12]} from `{theirs.source.name}`"
        if config.transfer_storage == "basis":
            report.add("error", "head-sha256", f"{message}: compact codes need the head they were made of.")
        else:
            report.add("warning", "head-sha256", f"{message}: a fine-tuned target may be accepted less often.")


def _check_tokenizer(report, config, record, tokenizer, owner: str) -> None:
    if tokenizer is None:
        report.add("warning", "tokenizer", f"`{owner}` holds no tokenizer; it was not compared.")
        return
    if record.get("tokenizer_sha256"):
        fingerprint = tokenizer_fingerprint(tokenizer)
        if fingerprint != record["tokenizer_sha256"]:
            report.add(
                "error",
                "tokenizer",
                f"`tokenizer` must map ids to the same strings as in training (sha256 "
                f"{record['tokenizer_sha256'][:12]}), got {fingerprint[:12]}.",
                f"use the tokenizer of `{record['id']}`",
            )
    if record.get("vocab_size") not in (None, len(tokenizer)):
        message = f"`target.vocab_size` must be the tokenizer's {len(tokenizer)}, got {record['vocab_size']}."
        report.add("error", "logical-vocabulary", message)
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        if getattr(tokenizer, name) == config.mask_token_id:
            report.add(
                "error",
                "mask-token",
                f"`mask_token_id` must not be a token in use, got {config.mask_token_id}, the tokenizer's `{name}`.",
            )


def _check_positions(report: Report, config: DSpineConfig, text: dict) -> None:
    limit = text.get("max_position_embeddings")
    if limit and config.max_position_embeddings < limit:
        report.add(
            "warning",
            "context-length",
            f"`max_position_embeddings` of the drafter is {config.max_position_embeddings}, the target's {limit}: "
            "beyond the smaller one acceptance may fall.",
        )
    rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    partial = text.get("partial_rotary_factor") or rope.get("partial_rotary_factor")
    if partial not in (None, 1) or any(name.startswith("mrope") for name in rope):
        report.add(
            "info", "rope", "`rope_parameters` of the target are partial or M-RoPE; the drafter's are plain, as due."
        )
    theta = text.get("rope_theta") or rope.get("rope_theta")
    if theta and theta != config.rope_parameters["rope_theta"]:
        mine = config.rope_parameters["rope_theta"]
        report.add("info", "rope", f"`rope_theta` of the drafter is {mine:g}, the target's {theta:g}.")
    kinds = sorted(set(text.get("layer_types") or []) - {"full_attention", "sliding_attention"})
    if kinds:
        report.add(
            "info",
            "hybrid-target",
            f"`layer_types` of the target hold {kinds}: the transformers loop cannot take rejected drafts back there.",
            'serve it with the SGLang plugin (`pip install "dspine-hub[sglang]"`)',
        )


def _check_dtype(report: Report, raw: dict, text: dict) -> None:
    mine, theirs = (side.get("dtype") or side.get("torch_dtype") for side in (raw, text))
    if mine and theirs and mine != theirs:
        message = f"`dtype` of the drafter is {mine!r}, the target's {theirs!r}: load the drafter in the target's."
        report.add("info", "dtype", message)


def _check_generation(report: Report, record: dict, tokenizer, text: dict) -> None:
    if tokenizer is None or not record:
        return
    expected, found = record.get("chat_template_sha256"), chat_template_fingerprint(tokenizer)
    if expected and found != expected:
        report.add(
            "warning",
            "chat-template",
            f"`chat_template_sha256` must be {expected[:12]} as in training, got {found and found[:12]}: prompts will "
            "look unlike the training data.",
        )
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if "enable_thinking" in template and record.get("enable_thinking") is None:
        report.add(
            "warning",
            "thinking",
            "`target.enable_thinking` must say whether training answers were made with thinking, got nothing: the "
            "wrong mode can halve acceptance.",
        )
