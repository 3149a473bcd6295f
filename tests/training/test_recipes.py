"""The YAML of a run: defaults, rules, overrides."""

from pathlib import Path

import pytest
import yaml
from helpers.paths import MINI
from helpers.training import run_fields

from dspine_hub.errors import DSpineHubError
from dspine_hub.training.config import SourceConfig, load_config


@pytest.fixture
def write_config(tmp_path):
    """Return `write(**fields)`, which writes a YAML run; a value of `...` drops the key."""

    def write(**fields):
        fields = {**run_fields("out", "t", "a.bin"), **fields}
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({name: value for name, value in fields.items() if value is not ...}))
        return path

    return write


def test_defaults_are_the_public_recipe(write_config):
    """A silent change of a default changes every later run."""
    config = load_config(write_config())
    assert config.objective.model_dump() == {
        "anchors": 512,
        "ce_weight": 0.1,
        "slot_decay": 7.0,
        "alignment_weight": 0.5,
        "alignment_warmup_steps": 146,
        "replacement_layers": 3,
        "replacement_probability": 0.5,
        "replacement_hold_ratio": 1 / 6,
        "replacement_end_ratio": 1 / 3,
        "candidate_mass_threshold": 1e-4,
        "rows_per_chunk": 8192,
        "injection": True,
    }
    assert config.optimizer.clip == 1.0 and config.optimizer.warmup_ratio == 0.04


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_example_recipes_are_valid(name):
    """A renamed key must be renamed in the recipes."""
    assert load_config(MINI / "recipe" / f"{name}.yaml").output == Path(f"runs/mini/{name}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"stepz": 3}, r"`stepz`", id="unknown"),
        pytest.param({"objective": {"anchor": 3}}, r"`objective\.anchor`", id="unknown-nested"),
        pytest.param({"data": {"train": [], "sequence_length": 8}}, r"`data\.train`", id="no-source"),
        pytest.param({"steps": ...}, r"`steps`", id="missing"),
        pytest.param({"optimizer": {}}, r"`optimizer\.learning_rate`", id="missing-nested"),
        pytest.param({"steps": 0}, r"`steps`.*got 0", id="range"),
        pytest.param({"kind": "eagle"}, r"`kind`.*got 'eagle'", id="choice"),
        pytest.param(
            {"objective": {"replacement_hold_ratio": 0.5}}, r"`replacement_hold_ratio`.*0\.5", id="ratios-in-order"
        ),
    ],
)
def test_broken_rules_are_named(write_config, fields, message):
    """A misspelt key that is ignored trains the wrong run for days."""
    path = write_config(**fields)
    with pytest.raises(DSpineHubError, match=message) as error:
        load_config(path)
    assert f"`{path}`" in str(error.value)


def test_all_broken_rules_are_listed_at_once(write_config):
    """One error a start is a slow way to fix a file."""
    with pytest.raises(DSpineHubError, match=r"2 rule\(s\)") as error:
        load_config(write_config(stepz=3, steps=0))
    assert "`stepz`" in str(error.value) and "`steps`" in str(error.value)


def test_a_bare_no_is_a_word_and_not_false(write_config):
    """Catches `mixed_precision: no`, which YAML reads as false, refused in words nobody can act on."""
    assert load_config(write_config(), ("mixed_precision=no",)).mixed_precision == "no"


def test_overrides_apply_as_yaml(write_config):
    """Catches values kept as strings, a section replaced instead of changed, and a section that is not there yet."""
    overrides = (
        "steps=9",
        "data.sequence_length=64",
        "optimizer.learning_rate=1e-3",
        "objective.injection=false",
        "data.train=[{path: b.bin, repeat: 2}]",
        "output=a=b",
    )
    config = load_config(write_config(), overrides)
    assert config.steps == 9 and config.data.sequence_length == 64
    assert config.optimizer.learning_rate == 1e-3 and config.objective.injection is False
    assert config.objective.anchors == 512
    assert config.data.train == [SourceConfig(path="b.bin", repeat=2)]
    assert config.output == Path("a=b")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param("steps", r"`--set` takes dotted\.key=value, got 'steps'", id="no-value"),
        pytest.param("stepz=3", r"`stepz`", id="unknown"),
        pytest.param("steps=many", r"`steps`.*'many'", id="type"),
        pytest.param("steps.deep=3", r"steps\.deep|`steps`", id="below-a-number"),
        pytest.param("steps.deep.er=3", r"steps\.deep|`steps`", id="far-below-a-number"),
        pytest.param("data.train.0.path=b.bin", r"data\.train", id="below-a-list"),
        pytest.param("steps=[", r"`--set`", id="no-YAML"),
    ],
)
def test_bad_overrides_are_refused(write_config, override, message):
    """A user's `--set` is a user's error and never ends in a traceback."""
    with pytest.raises(DSpineHubError, match=message):
        load_config(write_config(), (override,))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, r"`CONFIG` must name a YAML file, got `.*run\.yaml`", id="missing"),
        pytest.param("- 1\n- 2\n", r"`.*run\.yaml` must hold a YAML mapping, got list", id="list"),
        pytest.param("", r"`.*run\.yaml` must hold a YAML mapping, got NoneType", id="empty"),
        pytest.param("a: [", r"`.*run\.yaml` must be valid YAML", id="syntax"),
    ],
)
def test_unreadable_configs_are_refused(tmp_path, content, message):
    """Catches a traceback where the file is the problem."""
    if content is not None:
        (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(DSpineHubError, match=message):
        load_config(tmp_path / "run.yaml")
