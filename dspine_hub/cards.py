"""Model cards from config, receipts and the catalog, through one template; a number needs a receipt.

`render_card` writes the README of a bundle folder, `render_entry` the page of a catalog entry, and `check_card`
refuses what the Hub would refuse and what no receipt supports.
"""

import json
import re
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from dspine_hub.catalog import STATUS, UNKNOWN, Entry, describe, find_target
from dspine_hub.errors import DSpineHubError
from dspine_hub.findings import Report
from dspine_hub.folders import file_sha256
from dspine_hub.receipts import Receipt, load_receipts, weights_sha256

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

# https://huggingface.co/docs/hub/repositories-licenses
_LICENSES = """
apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
lgpl lgpl-2.1 lgpl-3.0 lgpl-lr isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by
odbl openmdw-1.0 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl deepfloyd-if-license
fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 gemma unknown other
"""
LICENSES = frozenset(_LICENSES.split())

PATTERNS = {
    "pipeline_tag": r"[a-z0-9-]+",
    "library_name": r"[\w.-]+",
    "tags": r"[^\n]{1,100}",
    "language": r"[a-z]{2,3}(-\w+)*|multilingual|code",
}

# what a line must mention for its numbers to need a receipt
CLAIM = re.compile(
    r"τ|\btau\b|\baccept\w*|speed-?\s?ups?\b|\bfaster\b|\bthroughput\b|tok(?:en)?s?\s*(?:/|per)\s*s", re.IGNORECASE
)
MULTIPLE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)(?:[x×](?!\w)|\s?times\b)", re.IGNORECASE)
# with a space it may be a shape like "64 x 512", so it only counts where a line makes a claim
SPACED_MULTIPLE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s[x×](?!\w)", re.IGNORECASE)
RATE = re.compile(r"(\d[\d,]*(?:\.\d+)?)\s*tok(?:en)?s?\s*(?:/|per)\s*s", re.IGNORECASE)
NUMBER = re.compile(r"(?<![\w.])(\d+\.\d+|\d+(?=\s?%))")


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


def is_repo_id(identifier: str) -> bool:
    """Tell a Hub repository `owner/name` from a folder."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", identifier)) and not Path(identifier).exists()


def render_card(folder: str | Path, repo_id: str | None = None) -> str:
    """Render the model card of a bundle folder.

    Args:
        folder (`str` or `Path`): Holds `config.json`; optionally `receipts/*.json`, `card.toml`, `training.json`.
        repo_id (`str`, *optional*): Repository the usage snippets name.

    Returns:
        `str`: Markdown with YAML front matter.

    Raises:
        DSpineHubError: When the config, a receipt or `card.toml` is invalid, or a receipt belongs to another drafter.
    """
    folder = Path(folder)
    config = _read_config(folder)
    info = _read_info(folder)
    receipts = load_receipts(folder / "receipts")
    _check_receipts(receipts, config)
    target = config["target"]
    entry = find_target(target["id"])
    tables = result_tables(receipts)
    body = _template().render(
        title=f"A DSpine drafter for `{target['id']}`",
        config=config,
        target=target,
        entry=entry,
        info=info,
        repo=repo_id or PLACEHOLDER,
        tables=tables,
        thinking=_measured_thinking(receipts),
        training=_read_training(folder),
        unknown=UNKNOWN,
        status=STATUS,
    )
    return f"---\n{_front_matter(config, info, entry, receipts)}\n---\n\n{_tidy(body)}"


def write_card(folder: str | Path, text: str) -> Path:
    """Write a card as `README.md`, and its hash into `provenance.json` where there is one.

    Args:
        folder (`str` or `Path`): Bundle folder.
        text (`str`): The card.

    Returns:
        `Path`: The written file.
    """
    readme, provenance = Path(folder) / "README.md", Path(folder) / "provenance.json"
    readme.write_text(text, encoding="utf-8")
    if provenance.is_file():
        record = json.loads(provenance.read_text(encoding="utf-8"))
        record["files"]["README.md"] = file_sha256(readme)
        provenance.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
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


def check_folder(folder: str | Path, text: str | None = None) -> Report:
    """Check the card of a bundle folder, and that its receipts were measured with the weights beside them.

    Args:
        folder (`str` or `Path`): As for `render_card`.
        text (`str`, *optional*): The card; `README.md` of the folder by default.

    Returns:
        `Report`: As of `check_card`.

    Raises:
        DSpineHubError: When a receipt is invalid or there is no card.
    """
    folder = Path(folder)
    receipts = load_receipts(folder / "receipts")
    if text is None:
        if not (folder / "README.md").is_file():
            raise DSpineHubError(
                f"`README.md` must lie in `{folder}`, got none. Run `dspine-hub card {folder} --write`."
            )
        text = (folder / "README.md").read_text(encoding="utf-8")
    report = check_card(text, receipts)
    weights = weights_sha256(folder) if receipts else None
    for receipt in receipts:
        if weights not in (None, receipt.drafter.weights_sha256):
            report.add(
                "warning",
                "receipt-weights",
                f"`drafter.weights_sha256` of the receipt for `{receipt.suite.name}` must be the folder's {weights}, "
                f"got {receipt.drafter.weights_sha256}: it was measured with other weights.",
                "Measure the bundle itself.",
            )
    return report


def check_card(text: str, receipts: list[Receipt] | tuple[Receipt, ...] = ()) -> Report:
    """Check a card before anything is sent.

    Args:
        text (`str`): The card.
        receipts (`list[Receipt]`, *optional*): All that its numbers may come from.

    Returns:
        `Report`: Errors for what the Hub refuses and for numbers without a receipt; warnings for what a reader misses.
    """
    import yaml
    from huggingface_hub import ModelCard

    report = Report()
    try:
        card = ModelCard(text)
        metadata = card.data.to_dict()
    except (ValueError, TypeError, AttributeError, KeyError, yaml.YAMLError) as error:
        report.add("error", "front-matter", f"the front matter must be valid YAML metadata, got: {error}".strip())
        return report
    if not text.lstrip().startswith("---"):
        report.add("error", "front-matter", "the card must open with YAML front matter, got none.", _RENDER)
        return report
    _check_license(report, metadata)
    _check_patterns(report, metadata)
    _check_repositories(report, metadata)
    _check_index(report, metadata, receipts)
    if "base_model_relation" in metadata:
        report.add(
            "error",
            "base-model-relation",
            f"`base_model_relation` must be absent, got {metadata['base_model_relation']!r}: the Hub has no value for "
            "drafters.",
            "Remove the line.",
        )
    allowed = allowed_numbers(receipts)
    for line, number in claimed_numbers(card.text):
        if number not in allowed:
            report.add(
                "error",
                "number-without-receipt",
                f"`{number}` must come from a receipt, got it in: {line.strip()}",
                "Put the receipt into receipts/ or remove the number.",
            )
    if not receipts:
        report.add("warning", "no-receipt", "`receipts/` must hold a result for the card to show one, got none.")
    return report


_RENDER = "Run `dspine-hub card PATH --write`."


def allowed_numbers(receipts: list[Receipt] | tuple[Receipt, ...]) -> set[str]:
    """Return every measured number as the template prints it."""
    numbers: set[str] = set()
    for receipt in receipts:
        acceptance = receipt.acceptance
        for value in (acceptance.tau_pooled, acceptance.tau_per_request, acceptance.tau_token_weighted):
            numbers.add(f"{value:.2f}")
        numbers.update(f"{share * 100:.0f}" for share in acceptance.per_slot if share is not None)
        if receipt.speed is not None:
            numbers.add(f"{receipt.speed.ratio:.2f}")
            for rate in (receipt.speed.tokens_per_second, receipt.speed.baseline_tokens_per_second):
                if rate is not None:
                    numbers.add(f"{rate:.1f}")
    return numbers


def claimed_numbers(body: str) -> list[tuple[str, str]]:
    """Find numbers about speed and acceptance, and every decimal of a table; code is skipped.

    Args:
        body (`str`): Markdown.

    Returns:
        `list[tuple[str, str]]`: Line and number as written, thousands separators removed.
    """
    found = []
    fenced = False
    for line in body.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        if fenced:
            continue
        # hashes, versions and settings stand in backticks
        prose = re.sub(r"`[^`]*`|https?://\S+|\]\([^)]*\)", " ", line)
        numbers = [*MULTIPLE.findall(prose), *(rate.replace(",", "") for rate in RATE.findall(prose))]
        if CLAIM.search(prose):
            numbers += [*SPACED_MULTIPLE.findall(prose), *NUMBER.findall(prose)]
        elif line.lstrip().startswith("|"):
            numbers += NUMBER.findall(prose)
        found += [(line, number) for number in dict.fromkeys(numbers)]
    return found


def _check_license(report: Report, metadata: dict) -> None:
    license_id = metadata.get("license")
    if license_id is None:
        report.add(
            "error", "license", "`license` must be given, got none.", 'Write `license = "apache-2.0"` into card.toml.'
        )
    elif license_id not in LICENSES:
        report.add(
            "error",
            "license",
            f"`license` must be an id the Hub knows, got {license_id!r}.",
            "See https://huggingface.co/docs/hub/repositories-licenses, or use `other` with a name and link.",
        )
    elif license_id == "other" and not (metadata.get("license_name") and metadata.get("license_link")):
        report.add("error", "license", "`license_name` and `license_link` must be given with `license: other`.")


def _check_patterns(report: Report, metadata: dict) -> None:
    for key, pattern in PATTERNS.items():
        values = metadata.get(key)
        for value in values if isinstance(values, list) else [] if values is None else [values]:
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                report.add(
                    "error", "metadata", f"`{key}` must match `{pattern}`, got {value!r}.", "Edit the front matter."
                )


def _check_repositories(report: Report, metadata: dict) -> None:
    for key in ("base_model", "datasets"):
        values = metadata.get(key)
        for value in [values] if isinstance(values, str) else values or []:
            # data sets without an owner exist on the Hub
            bare = key == "datasets" and re.fullmatch(r"[A-Za-z0-9][\w.-]*", str(value))
            if not bare and not is_repo_id(str(value)):
                report.add(
                    "error",
                    key.replace("_", "-"),
                    f"`{key}` must name a Hub repository, got {value!r}, which looks like a local path.",
                    f"Name the repository, or leave `{key}` out.",
                )
    if not metadata.get("base_model"):
        report.add("warning", "base-model", "`base_model` must name the target for the Hub to link it, got none.")


def _check_index(report: Report, metadata: dict, receipts) -> None:
    allowed = {round(value, 4) for receipt in receipts for _, _, value in _metrics(receipt)}
    for model in metadata.get("model-index") or []:
        for result in model.get("results", []):
            for metric in result.get("metrics", []):
                if not isinstance(metric.get("value"), int | float) or round(metric["value"], 4) not in allowed:
                    report.add(
                        "error",
                        "number-without-receipt",
                        f"`model-index` must hold receipts' values only, got {metric.get('value')!r} as "
                        f"{metric.get('type')!r}.",
                        _RENDER,
                    )


def _metrics(receipt: Receipt) -> list[tuple[str, str, float]]:
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
            for kind, name, value in _metrics(receipt)
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


def _read_config(folder: Path) -> dict:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DSpineHubError(
            f"`PATH` must be a folder with `config.json`, got `{folder}`. Write one with `dspine-hub bundle`."
        ) from None
    except ValueError as error:
        raise DSpineHubError(f"`{folder}/config.json` must be valid JSON, got: {error}.") from None
    if not isinstance(config, dict) or config.get("model_type") != "dspine":
        kind = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise DSpineHubError(f"`model_type` in `{folder}/config.json` must be 'dspine', got {kind!r}.")
    missing = [name for name in SHOWN if config.get(name) is None]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        raise DSpineHubError(
            f"{names} must be given in `{folder}/config.json`, got none. Write it with `dspine-hub bundle`."
        )
    return config


def _read_info(folder: Path) -> CardInfo:
    path = folder / "card.toml"
    if not path.exists():
        return CardInfo()
    try:
        return CardInfo.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise DSpineHubError(f"`card.toml` must be valid TOML, got: {error}.") from None
    except ValidationError as error:
        raise DSpineHubError(f"`card.toml` must hold only {list(CardInfo.model_fields)}: {describe(error)}") from None


def _read_training(folder: Path) -> dict | None:
    """Pick what a reader of the recipe wants; losses and training-time acceptance are no measured result."""
    path = folder / "training.json"
    if not path.exists():
        return None
    try:
        training = json.loads(path.read_text(encoding="utf-8"))
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
    except (ValueError, KeyError, TypeError) as error:
        raise DSpineHubError(
            f"`{path.name}` must be what `dspine-hub train` writes, got {type(error).__name__}: {error}."
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
