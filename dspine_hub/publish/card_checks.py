"""What a card must be before it is sent: metadata the Hub takes, and no number without a receipt."""

import re

from dspine_hub.checkpoints.sources import is_repo_id
from dspine_hub.errors import DSpineHubError
from dspine_hub.evaluation.receipts import Receipt
from dspine_hub.findings import Report
from dspine_hub.publish.bundle import Bundle
from dspine_hub.publish.cards import receipt_metrics

_RENDER = "Run `dspine-hub card PATH --write`."

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


def check_bundle_card(bundle: Bundle, text: str | None = None) -> Report:
    """Check the card of a bundle, and that its receipts were measured with the weights beside them.

    Args:
        bundle ([`Bundle`]): As for `render_card`.
        text (`str`, *optional*): The card; `README.md` of the bundle by default.

    Returns:
        `Report`: As of `check_card`.

    Raises:
        DSpineHubError: When a receipt is invalid or there is no card.
    """
    text = bundle.text("README.md") if text is None else text
    if text is None:
        raise DSpineHubError(
            f"`README.md` must lie in `{bundle.folder}`, got none. Run `dspine-hub card {bundle.folder} --write`."
        )
    receipts = bundle.receipts
    report = check_card(text, receipts)
    weights = bundle.weights_sha256 if receipts else None
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
    allowed = {round(value, 4) for receipt in receipts for _, _, value in receipt_metrics(receipt)}
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
