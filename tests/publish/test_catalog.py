"""The catalog: every fact has a source, every name finds one entry, every page is in step with its TOML."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from helpers.paths import ROOT

from dspine_hub.cli.list import command as list_entries
from dspine_hub.cli.show import command as show
from dspine_hub.errors import DSpineHubError
from dspine_hub.publish.cards import render_entry
from dspine_hub.publish.catalog import (
    FACT_GROUPS,
    LABELS,
    STATUS,
    UNKNOWN,
    Facts,
    find,
    find_target,
    load_catalog,
    parse_entry,
)

NAMES = [entry.name for entry in load_catalog()]

SMALL = """
name = "small"
target = "Org/Small"
family = "qwen3"
status = "wanted"

[facts]
num_hidden_layers = 4
target_layer_ids = [0, 2]

[sources]
shape = "somewhere"
taps = "elsewhere"
"""


def test_issue_targets_are_listed():
    """Catches a target that fell out of the catalog."""
    sizes = ["0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b", "coder-30b-a3b", "coder-480b-a35b"]
    dated = [f"{size}-{kind}-2507" for size in ("4b", "30b-a3b", "235b-a22b") for kind in ("instruct", "thinking")]
    qwen3 = [f"qwen3-{size}" for size in [*sizes, "coder-next", *dated]]
    qwen35 = [f"qwen3.5-{size}" for size in ("0.8b", "2b", "4b", "9b", "27b", "35b-a3b", "122b-a10b", "397b-a17b")]
    assert sorted([*qwen3, *qwen35, "qwen3.6-27b", "qwen3.6-35b-a3b", "qwen3.8-27b", "mini"]) == sorted(NAMES)


def test_every_fact_is_labelled_and_grouped():
    """Catches a fact that would be loaded without a source or shown without a name."""
    grouped = [name for names in FACT_GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(Facts.model_fields) == sorted(LABELS)


@pytest.mark.parametrize("name", NAMES)
def test_page_is_in_step(name):
    """Catches a TOML or template edited without its page: rewrite it with `dspine-hub show NAME`."""
    entry = find(name)
    page = (ROOT / "model_cards" / f"{name}.md").read_text(encoding="utf-8")
    assert page == render_entry(entry)
    assert f"Status: **{entry.status}**, {STATUS[entry.status]}." in page
    assert "dspine-hub train" in page and "dspine-hub bundle" in page


def test_no_page_without_an_entry():
    """Catches the page of a removed entry."""
    assert {path.stem for path in (ROOT / "model_cards").glob("*.md")} == set(NAMES)


def test_mini_equals_its_config():
    """Catches facts that drifted from the pair in this repository."""
    facts = find("mini").facts
    target = json.loads((ROOT / "examples/mini/target/config.json").read_text())
    drafter = json.loads((ROOT / "examples/mini/drafter/config.json").read_text())
    for name in (*FACT_GROUPS["shape"], "vocab_size"):
        assert getattr(facts, name) == target[name], name
    assert facts.tied_head == target["tie_word_embeddings"]
    assert facts.rope_theta == target["rope_parameters"]["rope_theta"]
    assert facts.tokenizer_size == drafter["target"]["vocab_size"]
    assert list(facts.target_layer_ids) == drafter["target_layer_ids"]
    assert facts.mask_token_id == drafter["mask_token_id"]


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("qwen3-8b", "qwen3-8b"),
        ("QWEN3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        (" qwen/qwen3.6-27b ", "qwen3.6-27b"),
        ("Qwen3-Coder-480B", "qwen3-coder-480b-a35b"),
        ("Qwen3-Coder-30B-A3B-Instruct", "qwen3-coder-30b-a3b"),
        ("examples/mini", "mini"),
    ],
)
def test_find(query, name):
    """Catches a lookup that is case sensitive or forgets the repository's name."""
    assert find(query).name == name


def test_find_suggests():
    """Catches a miss without a way on."""
    with pytest.raises(DSpineHubError) as caught:
        find("qwen3-7b")
    assert str(caught.value).startswith("`NAME` must be an entry of the catalog, got 'qwen3-7b'. Did you mean `qwen3-")
    assert str(caught.value).endswith("`dspine-hub list` shows all.")
    with pytest.raises(DSpineHubError, match=r"got 'zzz'\. `dspine-hub list` shows all\.$"):
        find("zzz")


def test_find_target_is_exact():
    """Catches a bundle of a fine-tune that would be shown with its base's facts."""
    assert find_target("qwen/qwen3-8b").name == "qwen3-8b"
    assert find_target("someone/Qwen3-8B") is None


def test_unknown_facts_read_as_unknown():
    """Catches a default that would pass for a fact."""
    rows = {label: (value, source) for label, value, source in parse_entry(SMALL, "small").fact_rows()}
    assert rows["decoder layers"] == ("4", "somewhere")
    assert rows["suggested taps (0 = first decoder layer)"] == ("0, 2", "elsewhere")
    assert rows["hidden size"] == (UNKNOWN, "")
    assert rows["LM head tied to the embedding"] == (UNKNOWN, "")


def test_rope_of_hybrid_targets_is_not_for_drafters():
    """Catches the trap that silently ruins acceptance: partial rotation and M-RoPE copied into a drafter."""
    assert find("qwen3.5-9b").not_for_drafters() == ["`partial_rotary_factor` 0.25", "the M-RoPE sections"]
    assert find("qwen3-8b").not_for_drafters() == []
    assert "must not copy the target's `partial_rotary_factor` 0.25" in render_entry(find("qwen3.5-9b"))
    assert "the transformers loop refuses this target" in render_entry(find("qwen3.5-9b"))


BROKEN = {
    "unknown-key": ("status =", "colour = 'red'\nstatus =", "`colour`: Extra inputs are not permitted"),
    "unknown-fact": ("[facts]", "[facts]\nheads = 4", "`facts.heads`: Extra inputs are not permitted"),
    "no-source": ('taps = "elsewhere"', "", "`sources.taps` must say where ['target_layer_ids'] was read"),
    "empty-source": ('"elsewhere"', '""', "`sources.taps` must say where"),
    "idle-source": ('taps = "', 'mask = "x"\ntaps = "', "`sources.mask` must belong to a fact"),
    "wrong-group": ('taps = "', 'layers = "x"\ntaps = "', "`sources` must use the groups"),
    "wrong-type": ("= 4", '= "4"', "`facts.num_hidden_layers`: Input should be a valid integer, got '4'"),
    "last-layer": ("[0, 2]", "[0, 3]", "`target_layer_ids` must lie in [0, 3), got [0, 3]"),
    "unsorted": ("[0, 2]", "[2, 0]", "`target_layer_ids` must be sorted, unique and >= 0, got [2, 0]"),
    "status": ("wanted", "published", "must be 'published' exactly when a public DSpine drafter is listed"),
    "other-status": ("wanted", "soon", "`status`: Input should be"),
    "name": ('"small"', '"big"', "`name` in `model_cards/small.toml` must equal the file's stem, got 'big'."),
    "no-toml": ("[facts]", "[facts", "`model_cards/small.toml` must be valid TOML"),
}


@pytest.mark.parametrize(("old", "new", "message"), BROKEN.values(), ids=BROKEN)
def test_bad_entry_is_refused(old, new, message):
    """Catches a fact without a source, a typo in a key, and taps that do not exist."""
    assert SMALL.count(old) == 1
    with pytest.raises(DSpineHubError) as caught:
        parse_entry(SMALL.replace(old, new), "small")
    assert message in str(caught.value)


def test_list_and_show():
    """Catches output that is not one JSON value, and a page that differs from the committed one."""
    rows = json.loads(CliRunner().invoke(list_entries, ["--json"]).stdout)
    assert [row["name"] for row in rows] == NAMES
    assert {"name": "mini", "target": "examples/mini/target", "status": "reproducible", "drafters": 0} in rows
    assert "qwen3-8b" in CliRunner().invoke(list_entries, []).stdout
    shown = json.loads(CliRunner().invoke(show, ["Qwen/Qwen3-8B", "--json"]).stdout)
    assert shown["facts"]["hidden_size"] == 4096 and shown["facts"]["mrope"] is None
    assert shown["facts"]["target_layer_ids"] == [1, 9, 17, 25, 33]
    assert CliRunner().invoke(show, ["mini"]).stdout == (ROOT / "model_cards/mini.md").read_text(encoding="utf-8")
    missed = CliRunner().invoke(show, ["qwen3-8"])
    assert missed.exit_code == 1 and "Did you mean `qwen3-8b`" in missed.stderr


def test_catalog_needs_no_torch():
    """Catches a slow `dspine-hub list`."""
    code = (
        "import sys, dspine_hub.publish.cards, dspine_hub.publish.catalog; dspine_hub.publish.catalog.load_catalog(); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
