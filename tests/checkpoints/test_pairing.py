"""A pair that does not fit is named before a weight is loaded, and nothing that fits is refused."""

import json
import shutil

import pytest
from helpers.hub import TOKEN, environment
from helpers.paths import MINI
from helpers.processes import run
from huggingface_hub import CommitOperationAdd, HfApi
from safetensors.torch import load_file, save_file

from dspine_hub.checkpoints.pairing import check_pair
from dspine_hub.checkpoints.sources import Source
from dspine_hub.errors import DSpineHubError


@pytest.fixture
def pair(tmp_path):
    """Copies of both sides, to be damaged; the drafter's weights are not needed and not copied."""
    shutil.copytree(MINI / "target", tmp_path / "target")
    shutil.copytree(MINI / "drafter", tmp_path / "drafter", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "drafter", tmp_path / "target"


def edit(folder, name="config.json", **changes):
    """Change keys of a JSON file; a dotted key reaches into an object, `None` removes the key."""
    value = json.loads((folder / name).read_text())
    for key, new in changes.items():
        *parents, last = key.split("__")
        node = value
        for parent in parents:
            node = node[parent]
        node[last] = new
    (folder / name).write_text(json.dumps(value))


def rules(report, severity=None):
    return {finding.rule for finding in report.findings if severity in (None, finding.severity)}


def test_the_mini_pair_fits_without_a_finding():
    """Catches a check that cries wolf."""
    report = check_pair(MINI / "drafter", MINI / "target")
    assert report.ok and report.findings == []


def other_strings(drafter, target):
    """Swap two ordinary tokens: equal ids, equal count, other strings."""
    path = target / "tokenizer.json"
    data = json.loads(path.read_text())
    vocabulary = data["model"]["vocab"]
    first, second = "a", "b"
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(data))


def other_head(drafter, target):
    tensors = load_file(target / "model.safetensors")
    tensors["model.embed_tokens.weight"][5] += 1
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


MISMATCHES = {
    "hidden-size": (lambda d, t: edit(t, hidden_size=256), {"hidden-size"}),
    "layer-count": (
        lambda d, t: edit(t, num_hidden_layers=16, layer_types=["full_attention"] * 16),
        {"layer-count", "taps"},
    ),
    "padded-vocabulary": (lambda d, t: edit(t, vocab_size=8256), {"vocabulary"}),
    "logical-vocabulary": (lambda d, t: edit(d, target__vocab_size=8000), {"logical-vocabulary"}),
    "tokenizer-with-equal-ids": (other_strings, {"tokenizer"}),
    "mask-is-eos": (lambda d, t: edit(d, mask_token_id=8124), {"mask-token"}),
    "compact-and-other-head": (
        lambda d, t: (other_head(d, t), edit(d, transfer_storage="basis")),
        {"head-sha256"},
    ),
}


@pytest.mark.parametrize(("change", "expected"), MISMATCHES.values(), ids=MISMATCHES)
def test_mismatch_is_an_error_with_its_rule(pair, change, expected):
    """Catches a wrong pair that would load and only be slow."""
    change(*pair)
    report = check_pair(*pair)
    assert not report.ok
    assert rules(report, "error") == expected
    assert all("`" in finding.message for finding in report.findings)


CAUTIONS = {
    "fine-tuned-head": (other_head, "warning", "head-sha256"),
    "short-context": (lambda d, t: edit(d, max_position_embeddings=2048), "warning", "context-length"),
    "other-template": (
        lambda d, t: (t / "chat_template.jinja").write_text("{{ messages }}"),
        "warning",
        "chat-template",
    ),
    "thinking-unsaid": (
        lambda d, t: (t / "chat_template.jinja").write_text("{% if enable_thinking %}x{% endif %}"),
        "warning",
        "thinking",
    ),
    "no-tokenizer": (lambda d, t: (t / "tokenizer_config.json").unlink(), "warning", "tokenizer"),
    "other-dtype": (lambda d, t: edit(t, dtype="float16"), "info", "dtype"),
    "other-rope-base": (lambda d, t: edit(d, rope_parameters__rope_theta=10000.0), "info", "rope"),
    "partial-rope-target": (lambda d, t: edit(t, partial_rotary_factor=0.25), "info", "rope"),
    "quantised-target": (
        lambda d, t: edit(t, quantization_config={"quant_method": "fp8"}),
        "info",
        "quantised-target",
    ),
    "hybrid-target": (
        lambda d, t: edit(t, layer_types=["linear_attention", "full_attention"] * 10),
        "info",
        "hybrid-target",
    ),
}


@pytest.mark.parametrize(("change", "severity", "rule"), CAUTIONS.values(), ids=CAUTIONS)
def test_caution_is_reported_and_does_not_refuse(pair, change, severity, rule):
    """Catches a silent cause of low acceptance, and a usable pair that is turned away."""
    change(*pair)
    report = check_pair(*pair)
    assert report.ok
    assert rule in rules(report, severity)


def test_drafter_that_breaks_a_rule_is_named(pair):
    """Catches an error that hides which rule was broken."""
    edit(pair[0], target_layer_ids=[1, 40])
    with pytest.raises(DSpineHubError, match=r"`target_layer_ids` must lie in \[0, 19\)"):
        check_pair(*pair)


def test_place_that_is_neither_folder_nor_repository_is_refused():
    """Catches a typo in a path that is sent to a Hub as a repository name."""
    for location in ("./none", "/none/at/all", "none"):
        with pytest.raises(DSpineHubError, match="must be a folder or a repository id"):
            Source(location)


PAIR = """
import json, sys
from dspine_hub.checkpoints.pairing import check_pair
report = check_pair(sys.argv[1], sys.argv[2])
print(json.dumps(report.as_dict()))
"""


def test_pair_is_checked_from_headers_of_repositories(server, tmp_path):
    """Catches a check that needs the weights: only configs, tokenizer and headers may be fetched."""
    api = HfApi(endpoint=server.url, token=TOKEN)
    for name, folder in (("org/mini-target", MINI / "target"), ("org/mini-drafter", MINI / "drafter")):
        api.create_repo(name)
        operations = [CommitOperationAdd(path.name, str(path)) for path in sorted(folder.iterdir())]
        api.create_commit(name, operations, commit_message="add")
    server.requests.clear()
    env = environment(server, tmp_path / "home")
    report = run(PAIR, "org/mini-drafter", "org/mini-target", env=env, cwd=tmp_path)
    assert report["ok"]
    # the head's hash needs the weights, which stay where they are
    assert [finding["rule"] for finding in report["findings"]] == ["head-sha256"]
    cached = [path for path in (tmp_path / "home").rglob("*.safetensors") if path.stat().st_size > 1_000_000]
    assert cached == []
