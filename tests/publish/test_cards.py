"""Cards say what config and receipts say, and nothing the Hub refuses or no receipt supports."""

import hashlib
import json
import re
import shutil

import pytest
from click.testing import CliRunner
from helpers.paths import MINI
from helpers.receipts import SAMPLED, build_receipt
from huggingface_hub import ModelCard

from dspine_hub.checkpoints.sources import is_repo_id
from dspine_hub.cli.card import command as card
from dspine_hub.errors import DSpineHubError
from dspine_hub.publish import cards
from dspine_hub.publish.bundle import Bundle
from dspine_hub.publish.card_checks import check_bundle_card, check_card, claimed_numbers

TARGET = {"id": "Org/Target", "revision": "abc1234", "enable_thinking": False, "chat_template_sha256": "c" * 64}


def render_card(folder, repo_id=None):
    """Render the card of a folder."""
    return cards.render_card(Bundle.read(folder), repo_id)


@pytest.fixture
def bundle(tmp_path):
    """Return `bundle(receipts=(changes, ...), card=text, target={...})`: a folder as `dspine-hub bundle` writes it."""

    def make(receipts=(), card='license = "apache-2.0"\n', target=TARGET, training=False, **config):
        folder = tmp_path / "bundle"
        (folder / "receipts").mkdir(parents=True)
        mini = json.loads((MINI / "drafter/config.json").read_text())
        mini.update({"block_size": 4, **config})
        mini["target"].update(target)
        (folder / "config.json").write_text(json.dumps(mini))
        for index, changes in enumerate(receipts):
            (folder / "receipts" / f"{index}.json").write_text(json.dumps(build_receipt(changes)))
        if card is not None:
            (folder / "card.toml").write_text(card)
        if training:
            shutil.copyfile(MINI / "drafter" / "training.json", folder / "training.json")
        return folder

    return make


def check(folder):
    return check_card(render_card(folder), Bundle.read(folder).receipts)


def errors(report):
    return [finding.rule for finding in report.findings if finding.severity == "error"]


FRONT_MATTER = """---
base_model: Org/Target
datasets:
- org/data
language:
- en
library_name: transformers
license: apache-2.0
pipeline_tag: text-generation
tags:
- dspine
- speculative-decoding
- draft-model
- sglang
---
"""


def test_front_matter(bundle):
    """Catches a key the Hub does not know, an invented relation, and a changed tag."""
    text = render_card(bundle(card='license = "apache-2.0"\nlanguage = ["en"]\ndatasets = ["org/data"]\n'))
    head, body = text.split("\n---\n", 1)
    assert sorted(head.splitlines()) == sorted(FRONT_MATTER.strip().removesuffix("\n---").splitlines())
    assert body.startswith("\n# A DSpine drafter for `Org/Target`\n")


def test_family_comes_from_the_catalog(bundle):
    """Catches a tag guessed from a name."""
    data = ModelCard(render_card(bundle(target={**TARGET, "id": "Qwen/Qwen3-8B"}))).data
    assert data.tags == ["dspine", "speculative-decoding", "draft-model", "sglang", "qwen3"]


def test_the_serving_command_needs_no_remote_code(bundle):
    text = render_card(bundle())
    assert "--speculative-draft-model-quantization unquant" in text and "trust-remote-code" not in text


def test_no_command_serves_a_quantised_drafter(bundle):
    """Catches a command the engine refuses."""
    text = render_card(bundle(quantization_config={"quant_method": "compressed-tensors"}))
    assert "sglang.launch_server" not in text and "serve the bfloat16 bundle" in text


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        ("Qwen/Qwen3-8B", True),
        ("z-lab/Qwen3.6-27B-DFlash", True),
        ("examples/mini/target", False),
        ("./target", False),
        ("../runs/target", False),
        ("/data/target", False),
        ("~/target", False),
        ("runs\\target", False),
        ("target", False),
        ("", False),
    ],
)
def test_repository_or_path(identifier, expected):
    """Catches a local path as base model, which the Hub refuses after a long upload."""
    assert is_repo_id(identifier) is expected


def test_a_repository_is_told_by_its_form_alone(tmp_path, monkeypatch):
    """Catches a card that depends on what lies in the folder it is rendered in."""
    monkeypatch.chdir(tmp_path)
    assert is_repo_id("runs/target")
    (tmp_path / "runs/target").mkdir(parents=True)
    assert is_repo_id("runs/target")


def test_local_target_has_no_base_model(bundle):
    text = render_card(bundle(target={"id": "examples/mini/target", "revision": None}))
    assert "base_model" not in text.split("\n---\n")[0]
    report = check_card(text)
    assert report.ok and [finding.rule for finding in report.findings] == ["base-model", "no-receipt"]


def test_sections_and_snippets(bundle):
    """Catches a lost section, and snippets that name another repository or block."""
    text = render_card(bundle(), "org/target-dspine")
    headings = ["What the text is", "Pairing", "Use", "Results", "Training", "Limitations", "Licence and citation"]
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == headings
    assert "**Not a language model by itself.**" in text
    assert 'AutoModel.from_pretrained("org/target-dspine", trust_remote_code=True' in text
    assert 'custom_generate="org/target-dspine"' in text
    assert "--speculative-draft-model-path org/target-dspine" in text
    assert "--speculative-num-draft-tokens 4" in text
    assert "THIS_REPOSITORY" not in text
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(block, "snippet", "exec")
    assert "No measured result is published here yet." in text
    assert "| thinking, as trained | off |" in text and "other domains, thinking on." in text


def test_hybrid_target_has_no_transformers_snippet(bundle):
    """Catches a snippet the loop refuses."""
    text = render_card(bundle(target={**TARGET, "id": "Qwen/Qwen3.8-27B"}))
    assert "spec_generate" not in text and "whose state cannot take a rejected draft back" in text
    assert "--model-path Qwen/Qwen3.8-27B" in text


TABLE = """\
### transformers 5.24.0, NVIDIA H200, temperature 0.0, thinking off

| suite | prompts | τ pooled | τ per request | τ token weighted | tokens/s | plain tokens/s | speed-up | same text |
|---|---|---|---|---|---|---|---|---|
| gsm8k | 128 | 2.57 | 2.51 | 2.62 | 90.0 | 45.0 | 2.00x | 127 of 128 |
| mbpp | 100 | 2.57 | 2.51 | 2.62 | - | - | - | 100 of 100 |

"""


def test_results_state_their_protocol(bundle):
    """Catches a number without its protocol, and two protocols in one table."""
    second = {"suite.name": "mbpp", "suite.n": 100, "greedy_match": {"equal": 100, "prompts": 100}, "speed": None}
    folder = bundle(receipts=[{}, second, {**SAMPLED, "command": "sampled"}])
    text = render_card(folder)
    assert TABLE in text
    assert text.count("| suite | prompts |") == text.count("Protocol of this table:") == 2
    assert "Tables differ in protocol: never compare numbers across them." in text
    assert "temperature 0.6, top-p 0.95, top-k 20" in text and "| sampled |" in text
    assert "accepted by slot, given all before: 81 %, 72 %, -; 2600 tokens in 1000 rounds" in text
    assert "- Measured with thinking off only." in text
    report = check(folder)
    assert report.ok and report.findings == []


def test_model_index_holds_receipts_only(bundle):
    """Catches results the Hub cannot parse or that lost their protocol."""
    results = ModelCard(render_card(bundle(receipts=[{}]))).data.eval_results
    assert [(result.metric_type, result.metric_value) for result in results] == [
        ("mean_acceptance_length", 2.5678),
        ("speedup", 2.0),
    ]
    assert results[0].dataset_type == "openai/gsm8k" and results[0].metric_args["temperature"] == 0.0


def test_training_is_shown_without_paths_and_losses(bundle):
    """Catches paths of the training machine and training-time acceptance shown as a result."""
    folder = bundle(training=True)
    text = render_card(folder)
    assert "files regenerated.npz (x6), train.bin (x1)" in text
    assert "2650 steps of 64 sequences of 512 tokens, 32 anchors a sequence" in text
    assert "`NVIDIA H200`" in text and "runs/" not in text and "4.18" not in text
    assert check(folder).ok


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoding.block": 5, "acceptance.per_slot": [0.5] * 4}, "`decoding.block` of the receipt for `gsm8k` must"),
        ({"target.id": "Org/Other"}, "`target.id` of the receipt for `gsm8k` must equal the config's 'Org/Target'"),
        ({"target.revision": "0000000"}, "`target.revision` of the receipt"),
    ],
    ids=["block", "target", "revision"],
)
def test_receipt_of_another_pair_is_refused(bundle, changes, message):
    """Catches a good number borrowed from another drafter."""
    with pytest.raises(DSpineHubError) as caught:
        render_card(bundle(receipts=[changes]))
    assert message in str(caught.value)


def test_receipt_of_other_weights_is_reported(bundle):
    """Catches a number that outlived its weights."""
    folder = bundle(receipts=[{}])
    (folder / "README.md").write_text(render_card(folder))
    assert check_bundle_card(Bundle.read(folder)).findings == []
    (folder / "model.safetensors").write_bytes(b"other")
    assert [finding.rule for finding in check_bundle_card(Bundle.read(folder)).findings] == ["receipt-weights"]


CARD_TOML = {
    "none": (None, ["license"]),
    "unknown-license": ('license = "apache2"', ["license"]),
    "bare-other": ('license = "other"', ["license"]),
    "named-other": ('license = "other"\nlicense_name = "own"\nlicense_link = "LICENSE"', []),
    "local-dataset": ('license = "mit"\ndatasets = ["./data/train"]', ["datasets"]),
    "bare-dataset": ('license = "mit"\ndatasets = ["gsm8k"]', []),
    "claim": ('license = "mit"\ndescription = "Up to 3.2x faster."', ["number-without-receipt"]),
    "spaced-claim": ('license = "mit"\ndescription = "It is 4 x faster."', ["number-without-receipt"]),
    "tau-claim": ('license = "mit"\ndescription = "Acceptance length of 6.49."', ["number-without-receipt"]),
    "rate-claim": ('license = "mit"\ndescription = "Reaches 1,210 tok/s."', ["number-without-receipt"]),
    "share-claim": ('license = "mit"\ndescription = "Accepts 97% of drafts."', ["number-without-receipt"]),
    "table-claim": (
        'license = "mit"\ndescription = "| a | b |\\n|---|---|\\n| DFlash | 6.32 |"',
        ["number-without-receipt"],
    ),
    "no-claim": ('license = "mit"\ndescription = "For Qwen3.5-27B, 5 layers, 1.2 B parameters."', []),
    "measured-claim": ('license = "mit"\ndescription = "2.00x faster on gsm8k."', []),
}


@pytest.mark.parametrize(("text", "rules"), CARD_TOML.values(), ids=CARD_TOML)
def test_author_metadata_is_checked(bundle, text, rules):
    """Catches what the Hub refuses, and a claim smuggled in by hand."""
    assert errors(check(bundle(receipts=[{}], card=text))) == rules


EDITS = {
    "no-front-matter": (r"\A---.*?\n---\n", "", "front-matter"),
    "broken-yaml": ("license: apache-2.0", "license: [", "front-matter"),
    "base-model-path": ("base_model: Org/Target", "base_model: ./target", "base-model"),
    "base-model-path-in-list": ("base_model: Org/Target", "base_model:\n- /data/target", "base-model"),
    "relation": ("license: apache-2.0", "license: apache-2.0\nbase_model_relation: draft", "base-model-relation"),
    "edited-number": (r"\| 2\.00x \|", "| 3.00x |", "number-without-receipt"),
    "edited-index": ("value: 2.5678", "value: 5.5", "number-without-receipt"),
}


@pytest.mark.parametrize(("pattern", "new", "rule"), EDITS.values(), ids=EDITS)
def test_edited_card_is_refused(bundle, pattern, new, rule):
    """Catches a README changed behind the renderer's back."""
    folder = bundle(receipts=[{}])
    text, count = re.subn(pattern, new, render_card(folder), count=1, flags=re.DOTALL)
    assert count == 1
    assert errors(check_card(text, Bundle.read(folder).receipts)) == [rule]


def test_receipts_gone_means_numbers_gone(bundle):
    """Catches a card that keeps numbers after their receipts were deleted."""
    assert "number-without-receipt" in errors(check_card(render_card(bundle(receipts=[{}]))))


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        ("speed-up of 2.5", ["2.5"]),
        ("3.2×", ["3.2"]),
        ("3 times as fast", ["3"]),
        ("τ = 4.25, tau 4.3", ["4.25", "4.3"]),
        ("64 x 512 tokens", []),
        ("transformers 5.24 on Qwen3.5-4B", []),
        ("weights `1.23x`, [faster](https://x.y/3.2x)", []),
        ("```\n3.2x faster\n```", []),
    ],
)
def test_claims_are_found(line, numbers):
    """Catches a claim in another spelling, and a version taken for a claim."""
    assert [number for _, number in claimed_numbers(line)] == numbers


BAD_FOLDERS = {
    "missing": (lambda folder: shutil.rmtree(folder), "must be the folder of a bundle"),
    "no-json": (lambda folder: (folder / "config.json").write_text("{"), "`config.json"),
    "other-model": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "qwen3"}'),
        "must be 'dspine', got 'qwen3'",
    ),
    "no-target": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "dspine", "block_size": 4}'),
        "`target`, `target_layer_ids`",
    ),
    "card-key": (lambda folder: (folder / "card.toml").write_text('licence = "mit"'), "`licence`: Extra inputs"),
    "card-toml": (lambda folder: (folder / "card.toml").write_text("license ="), "`card.toml` must be valid TOML"),
    "training": (lambda folder: (folder / "training.json").write_text("{}"), "must be what `dspine-hub train` writes"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD_FOLDERS.values(), ids=BAD_FOLDERS)
def test_bad_folder_ends_in_one_readable_error(bundle, spoil, message):
    """Catches a traceback for what an author can mend."""
    folder = bundle()
    spoil(folder)
    result = CliRunner().invoke(card, [str(folder)])
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    assert result.stderr.startswith("Error: ") and message in result.stderr.replace(f"{folder}/", "")
    assert result.stdout == ""


def test_command_prints_or_writes(bundle):
    """Catches a card written somewhere else, or findings mixed into it."""
    folder = bundle(receipts=[{}])
    printed = CliRunner().invoke(card, [str(folder), "--repo", "org/x"])
    assert (printed.exit_code, printed.stderr) == (0, "")
    assert printed.stdout == render_card(folder, "org/x")
    written = CliRunner().invoke(card, [str(folder), "--write"])
    assert (written.exit_code, written.stdout) == (0, f"{folder}/README.md\n")
    assert (folder / "README.md").read_text(encoding="utf-8") == render_card(folder)


def test_written_card_keeps_provenance_true(bundle):
    """Catches a rewritten card that makes `verify` report a damaged bundle."""
    folder = bundle()
    (folder / "provenance.json").write_text(json.dumps({"dspine_hub": "0", "files": {"README.md": "x", "a": "y"}}))
    assert CliRunner().invoke(card, [str(folder), "--write"]).exit_code == 0
    files = json.loads((folder / "provenance.json").read_text())["files"]
    assert files == {"README.md": hashlib.sha256((folder / "README.md").read_bytes()).hexdigest(), "a": "y"}


def test_command_refuses_a_claim(bundle):
    """Catches a card written with a number nobody measured; a missing licence only warns until the push."""
    folder = bundle(card='description = "9.9x faster"')
    result = CliRunner().invoke(card, [str(folder), "--write"])
    assert result.exit_code == 1 and "[number-without-receipt] `9.9` must come from a receipt" in result.stderr
    assert not (folder / "README.md").exists()
    (folder / "card.toml").unlink()
    result = CliRunner().invoke(card, [str(folder), "--write"])
    assert result.exit_code == 0 and "error: [license]" in result.stderr
