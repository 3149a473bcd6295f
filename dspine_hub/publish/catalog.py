"""The zoo: what a drafter must know about each target, one TOML a target, every fact with its source.

A fact without a source cannot be loaded, and an absent fact reads as unknown; nothing here is a default.
"""

import difflib
import functools
import importlib.resources
import tomllib
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from dspine_hub.errors import DSpineHubError, describe_problems

UNKNOWN = "unknown"

# facts that one source states together: group -> facts
FACT_GROUPS = {
    "shape": ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "vocabulary": ("vocab_size",),
    "tokenizer": ("tokenizer_size",),
    "head": ("tied_head",),
    "rope": ("rope_theta", "partial_rotary_factor", "mrope"),
    "attention": ("linear_attention",),
    "taps": ("target_layer_ids",),
    "mask": ("mask_token_id", "mask_token"),
    "thinking": ("thinking",),
}

LABELS = {
    "hidden_size": "hidden size",
    "num_hidden_layers": "decoder layers",
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key/value heads",
    "head_dim": "head dim",
    "vocab_size": "vocabulary, rows of the LM head (padding included)",
    "tokenizer_size": "tokenizer entries",
    "tied_head": "LM head tied to the embedding",
    "rope_theta": "RoPE theta",
    "partial_rotary_factor": "rotated share of the head dim",
    "mrope": "M-RoPE",
    "linear_attention": "linear-attention layers",
    "target_layer_ids": "suggested taps (0 = first decoder layer)",
    "mask_token_id": "mask token id",
    "mask_token": "what the mask id is",
    "thinking": "thinking mode",
}

THINKING = {
    "switchable": "switchable: the chat template takes `enable_thinking`",
    "always": "always on",
    "never": "never",
}

STATUS = {
    "published": "a DSpine drafter is public",
    "reproducible": "the recipe in this repository makes one",
    "wanted": "no public DSpine drafter known",
}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Facts(_Strict):
    """What is known about a target; `None` is unknown.

    Args:
        hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim (`int`, *optional*): Of the
            text model, from its config.
        vocab_size (`int`, *optional*): Rows of the LM head, padding rows included.
        tokenizer_size (`int`, *optional*): Entries of the tokenizer, added tokens included.
        tied_head (`bool`, *optional*): Whether the LM head is the embedding.
        rope_theta (`int`, *optional*): RoPE base; the one rope setting a drafter shares with its target.
        partial_rotary_factor (`float`, *optional*): Share of the head dim the target rotates. Never a drafter's.
        mrope (`bool`, *optional*): Whether the target rotates by image and text position. Never a drafter's.
        linear_attention (`bool`, *optional*): Whether some layers are recurrent, so that rejected drafts cannot be
            taken back from their cache.
        target_layer_ids (`tuple[int]`, *optional*): Taps of a public drafter; 0 is the first decoder layer.
        mask_token_id (`int`, *optional*): Token that public drafters of this target fill their slots with.
        mask_token (`str`, *optional*): What that id is in the tokenizer.
        thinking (`str`, *optional*): A key of `THINKING`.
    """

    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    tokenizer_size: int | None = None
    tied_head: bool | None = None
    rope_theta: int | None = None
    partial_rotary_factor: float | None = None
    mrope: bool | None = None
    linear_attention: bool | None = None
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    mask_token: str | None = None
    thinking: Literal["switchable", "always", "never"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _tuple_of_ids(cls, data):
        # TOML has lists only, and strict validation does not turn one into a tuple
        ids = data.get("target_layer_ids") if isinstance(data, dict) else None
        return {**data, "target_layer_ids": tuple(ids)} if isinstance(ids, list) else data

    @model_validator(mode="after")
    def _consistent(self):
        ids, layers = self.target_layer_ids, self.num_hidden_layers
        if ids is not None:
            if list(ids) != sorted(set(ids)) or not ids or ids[0] < 0:
                raise ValueError(f"`target_layer_ids` must be sorted, unique and >= 0, got {list(ids)}.")
            if layers is not None and ids[-1] >= layers - 1:
                raise ValueError(f"`target_layer_ids` must lie in [0, {layers - 1}), got {list(ids)}.")
        for name in ("tokenizer_size", "mask_token_id"):
            value = getattr(self, name)
            if value is not None and self.vocab_size is not None and value > self.vocab_size:
                raise ValueError(f"`{name}` must not exceed `vocab_size` {self.vocab_size}, got {value}.")
        return self


class Drafter(_Strict):
    """A public drafter of a target.

    Args:
        repo (`str`): Hub repository, or a folder of this repository for the mini pair.
        method (`str`): `dspine`, `dflash`, `dflash2`, `dspark`, `eagle3`.
        format (`str`, *optional*): Of its files: a key of `FORMATS`, or `deepspec`, `speculators`, which nothing here
            reads.
        block (`int`, *optional*): Block as its own repository counts it; methods differ in whether the anchor counts.
        license (`str`, *optional*): Licence of the weights.
        by (`str`): `official` from the authors of the method or target, else `community`.
        source (`str`): Where this was read.
    """

    repo: str
    method: Literal["dspine", "dflash", "dflash2", "dspark", "eagle3"]
    format: Literal["hub", "specforge", "reference", "dflash", "deepspec", "speculators"] | None = None
    block: int | None = None
    license: str | None = None
    by: Literal["official", "community"]
    source: str


class Entry(_Strict):
    """One target of the catalog.

    Args:
        name (`str`): Short name; the stem of its files under `model_cards/`.
        target (`str`): Hub repository of the target, or a folder of this repository for the mini pair.
        family (`str`): Tag of the model family.
        status (`str`): A key of `STATUS`; `published` exactly when a DSpine drafter is listed.
        aliases (`tuple[str]`, *optional*): Further names.
        facts ([`Facts`]): What is known.
        sources (`dict[str, str]`): Where each group of facts was read; keys of `FACT_GROUPS`.
        drafters (`tuple[Drafter]`, *optional*): Known public drafters.
        note (`str`, *optional*): One remark.
    """

    name: str
    target: str
    family: str
    status: Literal["published", "reproducible", "wanted"]
    aliases: tuple[str, ...] = ()
    facts: Facts = Facts()
    sources: dict[str, str] = {}
    drafters: tuple[Drafter, ...] = ()
    note: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _tuples(cls, data):
        lists = {name: tuple(data[name]) for name in ("aliases", "drafters") if isinstance(data.get(name), list)}
        return {**data, **lists}

    @model_validator(mode="after")
    def _sourced(self):
        unknown = sorted(set(self.sources) - set(FACT_GROUPS))
        if unknown:
            raise ValueError(f"`sources` must use the groups {list(FACT_GROUPS)}, got {unknown}.")
        for group, names in FACT_GROUPS.items():
            known = [name for name in names if getattr(self.facts, name) is not None]
            if known and not self.sources.get(group):
                raise ValueError(f"`sources.{group}` must say where {known} was read: a fact needs a source.")
            if not known and group in self.sources:
                raise ValueError(f"`sources.{group}` must belong to a fact, got a source for none of {list(names)}.")
        if (self.status == "published") != any(drafter.method == "dspine" for drafter in self.public_drafters):
            raise ValueError(
                f"`status` must be 'published' exactly when a public DSpine drafter is listed, got {self.status!r}."
            )
        return self

    @property
    def public_drafters(self) -> tuple[Drafter, ...]:
        """Drafters on the Hub, without those that only live in this repository."""
        return tuple(drafter for drafter in self.drafters if drafter.repo.count("/") == 1)

    def fact_rows(self) -> list[tuple[str, str, str]]:
        """Return `(label, value, source)` of every fact, unknown ones included."""
        rows = []
        for group, names in FACT_GROUPS.items():
            for name in names:
                value = getattr(self.facts, name)
                if name == "mask_token" and value is None:
                    continue
                source = self.sources.get(group, "") if value is not None else ""
                rows.append((LABELS[name], UNKNOWN if value is None else _text(name, value), source))
        return rows

    def not_for_drafters(self) -> list[str]:
        """Name the rope settings of the target that a drafter must not copy."""
        facts = self.facts
        found = []
        if facts.partial_rotary_factor not in (None, 1.0):
            found.append(f"`partial_rotary_factor` {facts.partial_rotary_factor:g}")
        if facts.mrope:
            found.append("the M-RoPE sections")
        return found

    def as_dict(self) -> dict:
        """Return the entry for JSON; unknown facts are `null`."""
        return self.model_dump(mode="json")


def _text(name: str, value) -> str:
    if name == "thinking":
        return THINKING[value]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_entry(text: str, name: str) -> Entry:
    """Read one catalog file.

    Args:
        text (`str`): TOML.
        name (`str`): Stem of the file; must equal the entry's `name`.

    Returns:
        `Entry`: The validated entry.

    Raises:
        DSpineHubError: When the text is no TOML, has an unknown key, or a fact without a source.
    """
    place = f"model_cards/{name}.toml"
    try:
        entry = Entry.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise DSpineHubError(f"`{place}` must be valid TOML, got: {error}.") from None
    except ValidationError as error:
        raise DSpineHubError(f"`{place}` must be a catalog entry: {describe_problems(error)}") from None
    if entry.name != name:
        raise DSpineHubError(f"`name` in `{place}` must equal the file's stem, got {entry.name!r}.")
    return entry


@functools.cache
def load_catalog() -> tuple[Entry, ...]:
    """Read every entry, sorted by name.

    Returns:
        `tuple[Entry]`: The catalog.

    Raises:
        DSpineHubError: When a file is invalid or two entries answer to one name.
    """
    folder = importlib.resources.files("dspine_hub.model_cards")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    entries = tuple(parse_entry(file.read_text(encoding="utf-8"), file.name.removesuffix(".toml")) for file in files)
    _names(entries)
    return entries


def _names(entries: tuple[Entry, ...]) -> dict[str, Entry]:
    """Map every lower-case name an entry answers to."""
    names: dict[str, Entry] = {}
    for entry in entries:
        for name in {entry.name, entry.target, entry.target.split("/")[-1], *entry.aliases}:
            other = names.setdefault(name.lower(), entry)
            if other is not entry:
                raise DSpineHubError(f"`{name}` must name one entry, got `{other.name}` and `{entry.name}`.")
    return names


def find(name: str) -> Entry:
    """Look an entry up.

    Args:
        name (`str`): Name, target repository, its last part or an alias, in any case.

    Returns:
        `Entry`: The entry.

    Raises:
        DSpineHubError: When there is none; the message names the closest.
    """
    names = _names(load_catalog())
    key = name.strip().lower()
    if key in names:
        return names[key]
    close = list(dict.fromkeys(names[match].name for match in difflib.get_close_matches(key, names, n=6, cutoff=0.6)))
    hint = f" Did you mean {' or '.join(f'`{match}`' for match in close[:3])}?" if close else ""
    raise DSpineHubError(f"`NAME` must be an entry of the catalog, got {name!r}.{hint} `dspine-hub list` shows all.")


def find_target(target: str) -> Entry | None:
    """Return the entry of a target repository, `None` when the catalog has none."""
    return next((entry for entry in load_catalog() if entry.target.lower() == target.lower()), None)
