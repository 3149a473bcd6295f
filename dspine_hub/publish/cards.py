"""Model cards from config, receipts and the catalog, through one template; a number needs a receipt.

`render_card` writes the README of a bundle, `render_entry` the page of a catalog entry; `card_checks` refuses
what the Hub would refuse and what no receipt supports.
"""

import hashlib
import re
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dspine_hub.checkpoints.sources import is_repo_id
from dspine_hub.errors import DSpineHubError, describe_problems
from dspine_hub.evaluation.receipts import Receipt
from dspine_hub.folders import write_json
from dspine_hub.publish.bundle import Bundle
from dspine_hub.publish.catalog import STATUS, UNKNOWN, Entry, find_target

# stands for the repository until a push knows its name
PLACEHOLDER = "THIS_REPOSITORY"

TAGS = ("dspine", "speculative-decoding", "draft-model", "sglang")

# what the template shows of a config
SHOWN = (
    "target",
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "num_hidden_layers",
    "num_candidates",
    "transfer_rank",
    "message_size",
    "max_position_embeddings",
)


class CardInfo(BaseModel):
    """What only the author knows: `card.toml` in the folder.

    Args:
        license (`str`, *optional*): Hub licence id; `other` needs `license_name` and `license_link`. Pushing needs it.
        language (`list[str]`, *optional*): ISO codes of the training text.
        datasets (`list[str]`, *optional*): Hub repositories of the training data.
        description, citation (`str`, *optional*): Markdown and BibTeX.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    language: list[str] = []
    datasets: list[str] = []
    description: str | None = None
    citation: str | None = None


def render_card(bundle: Bundle, repo_id: str | None = None) -> str:
    """Render the model card of a bundle.

    Args:
        bundle ([`Bundle`]): Holds `config.json`; optionally `receipts/*.json`, `card.toml`, `training.json`.
        repo_id (`str`, *optional*): Repository the usage snippets name.

    Returns:
        `str`: Markdown with YAML front matter.

    Raises:
        DSpineHubError: When the config, a receipt or `card.toml` is invalid, or a receipt belongs to another drafter.
    """
    config, info, receipts = _shown_config(bundle), _read_info(bundle), bundle.receipts
    _check_receipts(receipts, config)
    target = config["target"]
    entry = find_target(target["id"])
    body = _template().render(
        title=f"A DSpine drafter for `{target['id']}`",
        config=config,
        target=target,
        entry=entry,
        info=info,
        repo=repo_id or PLACEHOLDER,
        tables=result_tables(receipts),
        thinking=_measured_thinking(receipts),
        training=_read_training(bundle),
        unknown=UNKNOWN,
        status=STATUS,
    )
    return f"---\n{_front_matter(config, info, entry, receipts)}\n---\n\n{_tidy(body)}"


def write_card(bundle: Bundle, text: str) -> Path:
    """Write a card as `README.md`, and its hash into `provenance.json` where there is one.

    Args:
        bundle ([`Bundle`]): Read before; what it knows of both files is then out of date.
        text (`str`): The card.

    Returns:
        `Path`: The written file.
    """
    readme = bundle.folder / "README.md"
    readme.write_text(text, encoding="utf-8")
    if bundle.provenance is not None:
        listed = {**bundle.provenance["files"], "README.md": hashlib.sha256(text.encode()).hexdigest()}
        write_json(bundle.folder / "provenance.json", {**bundle.provenance, "files": listed})
    return readme


def render_entry(entry: Entry) -> str:
    """Render the page of a catalog entry: facts with sources, known drafters, how to make one."""
    body = _template().render(
        title=f"DSpine for `{entry.target}`",
        config=None,
        entry=entry,
        tables=[],
        recipe=_recipe(entry),
        unknown=UNKNOWN,
        status=STATUS,
    )
    return _tidy(body)


def result_tables(receipts: list[Receipt]) -> list[dict]:
    """Group receipts by protocol; one group is one table.

    Returns:
        `list[dict]`: `first` (a receipt that states the protocol) and `rows` (every receipt of the group).
    """
    groups: dict[str, list[Receipt]] = {}
    for receipt in receipts:
        groups.setdefault(receipt.protocol, []).append(receipt)
    return [{"first": rows[0], "rows": rows} for rows in groups.values()]


def receipt_metrics(receipt: Receipt) -> list[tuple[str, str, float]]:
    """Return what a card's `model-index` says of a receipt: type, name, value."""
    found = [("mean_acceptance_length", "Acceptance length, pooled", round(receipt.acceptance.tau_pooled, 4))]
    if receipt.speed is not None:
        found.append(("speedup", "Speed-up over plain decoding, same run", round(receipt.speed.ratio, 4)))
    return found


def _front_matter(config: dict, info: CardInfo, entry: Entry | None, receipts: list[Receipt]) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    identifier = config["target"]["id"]
    results = []
    for receipt in receipts:
        decoding, hardware = receipt.decoding, receipt.hardware
        arguments = {
            "target": receipt.target.id,
            "engine": f"{receipt.engine.name} {receipt.engine.version}",
            "hardware": hardware.gpu or hardware.cpu,
            "dtype": decoding.dtype,
            "block_size": decoding.block,
            "temperature": decoding.temperature,
            "enable_thinking": decoding.enable_thinking,
            "max_new_tokens": decoding.max_new_tokens,
            "concurrency": decoding.concurrency,
            "n": receipt.suite.n,
        }
        results += [
            EvalResult(
                task_type="text-generation",
                dataset_type=receipt.suite.dataset or receipt.suite.name,
                dataset_name=receipt.suite.name,
                dataset_revision=receipt.suite.revision,
                metric_type=kind,
                metric_name=name,
                metric_value=value,
                metric_args=arguments,
            )
            for kind, name, value in receipt_metrics(receipt)
        ]
    family = [entry.family] if entry is not None else []
    data = ModelCardData(
        license=info.license,
        license_name=info.license_name,
        license_link=info.license_link,
        base_model=identifier if is_repo_id(identifier) else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        language=info.language or None,
        datasets=info.datasets or None,
        tags=[*TAGS, *family],
        model_name=f"DSpine drafter for {identifier}" if results else None,
        eval_results=results or None,
    )
    return data.to_yaml(line_break="\n")


def _shown_config(bundle: Bundle) -> dict:
    """Return the config, which must hold what the template shows of it."""
    config = bundle.config
    if config.get("model_type") != "dspine":
        kind = config.get("model_type")
        raise DSpineHubError(f"`model_type` in `{bundle.folder}/config.json` must be 'dspine', got {kind!r}.")
    missing = [name for name in SHOWN if config.get(name) is None]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        raise DSpineHubError(
            f"{names} must be given in `{bundle.folder}/config.json`, got none. Write it with `dspine-hub bundle`."
        )
    return config


def _read_info(bundle: Bundle) -> CardInfo:
    text = bundle.text("card.toml")
    try:
        return CardInfo.model_validate(tomllib.loads(text or ""))
    except tomllib.TOMLDecodeError as error:
        raise DSpineHubError(f"`card.toml` must be valid TOML, got: {error}.") from None
    except ValidationError as error:
        problems = describe_problems(error)
        raise DSpineHubError(f"`card.toml` must hold only {list(CardInfo.model_fields)}: {problems}") from None


def _read_training(bundle: Bundle) -> dict | None:
    """Pick what a reader of the recipe wants; losses and training-time acceptance are no measured result."""
    training = bundle.json("training.json")
    if training is None:
        return None
    try:
        config, environment = training["config"], training["environment"]
        optimizer, data = config["optimizer"], config["data"]
        return {
            # names only: paths of the training machine mean nothing elsewhere
            "files": [f"{Path(file['path']).name} (x{file['repeat']})" for file in data["train"]],
            "sequence_length": data["sequence_length"],
            "steps": training["steps"],
            "batch_size": config["batch_size"],
            "learning_rate": optimizer["learning_rate"],
            "anchors": config["objective"]["anchors"],
            "seed": config["seed"],
            "device": environment["machine"]["device"],
            "versions": environment["versions"],
            "commit": environment["commit"],
        }
    except (KeyError, TypeError) as error:
        raise DSpineHubError(
            f"`training.json` must be what `dspine-hub train` writes, got {type(error).__name__}: {error}."
        ) from None


def _check_receipts(receipts: list[Receipt], config: dict) -> None:
    target = config["target"]
    for receipt in receipts:
        for name, expected, got in (
            ("decoding.block", config["block_size"], receipt.decoding.block),
            ("target.id", target["id"], receipt.target.id),
            ("target.revision", target["revision"], receipt.target.revision),
        ):
            if expected is not None and got != expected:
                raise DSpineHubError(
                    f"`{name}` of the receipt for `{receipt.suite.name}` must equal the config's {expected!r}, got "
                    f"{got!r}: the number belongs to another pair. Remove the receipt or measure again."
                )


def _measured_thinking(receipts: list[Receipt]) -> str | None:
    modes = {receipt.decoding.enable_thinking for receipt in receipts} - {None}
    return {frozenset({True}): "on", frozenset({False}): "off"}.get(frozenset(modes))


def _recipe(entry: Entry) -> str | None:
    """Return the settings of a training recipe that follow from the target, `None` when one is unknown."""
    facts = entry.facts
    if None in (facts.target_layer_ids, facts.mask_token_id, facts.rope_theta):
        return None
    return "\n".join(
        (
            "model:",
            f"  target_id: {entry.target}",
            f"  target_layer_ids: {list(facts.target_layer_ids)}",
            f"  mask_token_id: {facts.mask_token_id}",
            f"  rope_parameters: {{rope_type: default, rope_theta: {float(facts.rope_theta)}}}",
        )
    )


def _template():
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dspine_hub.model_cards", ""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.md.j2")


def _tidy(text: str) -> str:
    """Leave one blank line where the template left several, and one newline at the end."""
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
