"""A receipt states its whole protocol, or it is none."""

import json

import pytest
from helpers.receipts import SAMPLED, build_receipt

from dspine_hub.errors import DSpineHubError
from dspine_hub.evaluation.receipts import parse_receipt
from dspine_hub.publish.bundle import Bundle


def parse(changes=()):
    return parse_receipt(json.dumps(build_receipt(changes)), "receipts/x.json")


def test_valid_receipt_round_trips():
    """Catches a schema that loses or rewrites a value."""
    receipt = parse()
    expected = build_receipt({"speed.speedup": None})
    assert json.loads(receipt.model_dump_json()) == expected
    assert receipt.speed.ratio == 2.0


ACCEPTED = {
    "sampled": SAMPLED,
    "no-speed": {"speed": None},
    "ratio-only": {"speed": {"speedup": 1.9}},
    "cpu": {"hardware": {"gpu": None, "gpu_count": 0, "cpu": "x86"}},
    "raw-prompts": {"decoding.enable_thinking": None, "decoding.chat_template_sha256": None},
    "dirty-commit": {"dspine_hub_commit": "bbc7606-dirty"},
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_variants_are_accepted(changes):
    """Catches a rule stricter than the protocol it guards."""
    parse(changes)


REFUSED = {
    "unknown-key": ({"note": "x"}, "`note`: Extra inputs are not permitted"),
    "no-commit": ({"engine.commit": ...}, "`engine.commit`: Field required"),
    "simulated": ({"simulated_acceptance": True}, "`simulated_acceptance`: Input should be False"),
    "tau-below-one": (
        {"acceptance.tau_pooled": 0.9},
        "`acceptance.tau_pooled` must lie in [1, 4], the block, got 0.9",
    ),
    "tau-above-block": ({"acceptance.tau_per_request": 4.5}, "`acceptance.tau_per_request` must lie in [1, 4]"),
    "tau-text": ({"acceptance.tau_pooled": "2.5"}, "`acceptance.tau_pooled`: Input should be a valid number"),
    "nan": ({"acceptance.tau_pooled": float("nan")}, "`acceptance.tau_pooled`: Input should be a finite number"),
    "slots": ({"acceptance.per_slot": [0.5]}, "`acceptance.per_slot` must have `block` - 1 = 3 entries, got 1"),
    "share": ({"acceptance.per_slot": [1.5, 0.5, 0.5]}, "less than or equal to 1, got 1.5"),
    "no-prompts": ({"suite.n": 0}, "`suite.n`: Input should be greater than or equal to 1, got 0"),
    "no-rounds": ({"acceptance.rounds": 0}, "`acceptance.rounds`: Input should be greater than or equal to 1"),
    "no-baseline": ({"speed": {"tokens_per_second": 9.0}}, "a speed needs its baseline"),
    "wrong-ratio": ({"speed.speedup": 3.0}, "`speedup` must be the ratio of both rates 2.000, got 3.0"),
    "no-greedy-match": ({"greedy_match": None}, "`greedy_match` must be given at temperature 0"),
    "match-above-prompts": ({"greedy_match.equal": 129}, "`equal` must not exceed `prompts` 128, got 129"),
    "match-above-suite": ({"greedy_match": {"equal": 1, "prompts": 129}}, "must not exceed `suite.n` 128, got 129"),
    "greedy-in-disguise": ({**SAMPLED, "decoding.top_k": 1}, "`top_k` must not be 1 with `temperature` 0.6"),
    "thinking-of-what": ({"decoding.chat_template_sha256": None}, "must come with `chat_template_sha256`"),
    "short-hash": ({"drafter.weights_sha256": "d" * 12}, "`drafter.weights_sha256`: String should match pattern"),
    "no-device": ({"hardware": {"gpu": None, "gpu_count": 0, "cpu": None}}, "must be named"),
    "bad-date": ({"date": "yesterday"}, "`date`: Input should be a valid date"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_receipt_is_refused(changes, message):
    """Catches a number that could not be reproduced or cannot be true."""
    with pytest.raises(DSpineHubError) as caught:
        parse(changes)
    assert str(caught.value).startswith("`receipts/x.json` must be a receipt: ")
    assert message in str(caught.value)


PROTOCOL = {
    "engine-version": {"engine.version": "5.23.0"},
    "gpu": {"hardware.gpu": "NVIDIA H100"},
    "temperature": SAMPLED,
    "thinking": {"decoding.enable_thinking": True},
    "prefill": {"decoding.prefill_included": True},
    "target-revision": {"target.revision": "def5678"},
    "weights": {"drafter.weights_sha256": "e" * 64},
}


@pytest.mark.parametrize("changes", PROTOCOL.values(), ids=PROTOCOL)
def test_protocols_differ(changes):
    """Catches two protocols that would share a table."""
    assert parse(changes).protocol != parse().protocol


def test_suites_share_a_protocol():
    """Catches one table a suite, which nobody can read."""
    other = parse({"suite.name": "humaneval", "acceptance.tau_pooled": 3.0, "command": "again", "date": "2026-12-01"})
    assert other.protocol == parse().protocol


def test_load_receipts(tmp_path):
    """Catches a folder order that changes the card, and a broken file that is skipped."""
    assert Bundle.read(tmp_path).receipts == []
    folder = tmp_path / "receipts"
    folder.mkdir()
    for name, suite in (("b", "second"), ("a", "first")):
        (folder / f"{name}.json").write_text(json.dumps(build_receipt({"suite.name": suite})))
    assert [receipt.suite.name for receipt in Bundle.read(folder.parent).receipts] == ["first", "second"]
    (folder / "c.json").write_text("{")
    with pytest.raises(DSpineHubError, match=r"`receipts/c\.json` must be a receipt: Invalid JSON"):
        _ = Bundle.read(folder.parent).receipts


def test_weights_hash(tmp_path):
    """Catches a hash that ignores a shard or its name."""
    assert Bundle.read(tmp_path).weights_sha256 is None
    (tmp_path / "a.safetensors").write_bytes(b"a")
    one = Bundle.read(tmp_path).weights_sha256
    assert one == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    (tmp_path / "b.safetensors").write_bytes(b"b")
    two = Bundle.read(tmp_path).weights_sha256
    (tmp_path / "b.safetensors").rename(tmp_path / "c.safetensors")
    assert len({one, two, Bundle.read(tmp_path).weights_sha256}) == 3
