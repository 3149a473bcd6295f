"""Binding a drafter to its target: what is refused, what only warns, and what a bound drafter knows."""

import logging

import pytest
import torch
from helpers.block_pass import TEXT
from helpers.tiny import build_drafter, target_record
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from dspine_hub.configuration_dspine import tokenizer_fingerprint
from dspine_hub.modeling_dspine import DSpineForSpeculation


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        pytest.param(
            {"hidden_size": 16}, "`hidden_size` of the drafter must equal the target's, got 32 .* with 16", id="hidden"
        ),
        pytest.param({"num_hidden_layers": 7}, "`num_target_layers` .* got 6 for a target with 7", id="layers"),
        pytest.param({"vocab_size": 131}, "`vocab_size` .* got 97 for a target with 131", id="vocab"),
    ],
)
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "no-record"])
def test_a_target_of_another_shape_is_refused(make_drafter, make_target, target, fields, match, recorded):
    """Catches a sibling model of the family: most of them share two of the three sizes."""
    drafter = build_drafter(target, bind=False)
    if recorded:
        drafter.config.target = target_record(target)
        match += ".*`lab/Tiny`"
    with pytest.raises(ValueError, match=match):
        drafter.bind(make_target(**fields))
    with pytest.raises(ValueError, match="`bind"):
        drafter.bound()


@pytest.mark.parametrize("use", ["draft", "forward", "bound"])
def test_an_unbound_drafter_is_refused(make_drafter, use):
    """Catches a drafter used before it has an embedding and a head."""
    drafter = make_drafter(bind=False)
    calls = {
        "draft": lambda: drafter.draft(torch.zeros(1, 2, 96), torch.tensor([7])),
        "forward": lambda: drafter(torch.zeros(1, 5, 32), torch.zeros(1, 2, 96)),
        "bound": drafter.bound,
    }
    with pytest.raises(ValueError, match=r"`bind\(target\)` must be called before a drafter is used, got an unbound"):
        calls[use]()


def test_a_drafter_without_transfer_space_is_refused(make_drafter, target):
    """Catches a table of zeros: its drafts look fine and its messages are empty."""
    with pytest.raises(ValueError, match="`transfer_ready` must be true, got false.*`initialize_transfer_space"):
        make_drafter(ready=False).bind(target)


def test_a_negative_temperature_is_refused(make_drafter, taps):
    """Catches a negative temperature, which would prefer the worst candidates."""
    drafter = make_drafter()
    with pytest.raises(ValueError, match=r"`temperature` must be >= 0, got -0.5"):
        drafter.draft(taps(TEXT, drafter), torch.tensor([7]), temperature=-0.5)


def test_another_head_warns_with_codes_and_is_refused_with_a_basis(make_target, target, caplog):
    """Catches compact codes rebuilt from a fine-tuned head: they would not be the codes the drafter learned."""
    fine_tuned = make_target()
    with torch.no_grad():
        fine_tuned.lm_head.weight[5] += 1
    record = target_record(target)
    drafter = build_drafter(target, bind=False)
    drafter.config.target = record
    with caplog.at_level(logging.WARNING):
        drafter.bind(target)
        assert caplog.text == ""
        drafter.bind(fine_tuned)
    assert "`lm_head_sha256` of `lab/Tiny`" in caplog.text
    assert "acceptance may fall" in caplog.text
    assert drafter.is_bound_to(fine_tuned)
    compact = build_drafter(target, bind=False, transfer_storage="basis")
    compact.config.target = record
    with pytest.raises(
        ValueError, match="`lm_head_sha256` of `lab/Tiny`.*only be rebuilt from the head they were made"
    ):
        compact.bind(fine_tuned)
    assert compact.bind(target) is compact


def test_a_compact_drafter_bound_anew_has_the_codes_of_its_own_head(make_target, make_drafter, target, tmp_path):
    """Catches codes rebuilt from one head and kept for the next: without a recorded head nothing else would notice."""
    drafter = make_drafter(transfer_storage="basis")
    drafter.save_pretrained(tmp_path)
    loaded = DSpineForSpeculation.from_pretrained(tmp_path)
    loaded.bind(make_target(seed=9))
    loaded.bind(target)
    assert torch.equal(loaded.transfer_codes, drafter.transfer_codes)


def make_tokenizer(words):
    vocabulary = {word: index for index, word in enumerate(words)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token=words[0])))


def test_another_tokenizer_is_refused(make_drafter, target):
    """Catches a tokenizer with the right size and other strings: prompts would be other text."""
    right, wrong = make_tokenizer([f"w{i}" for i in range(97)]), make_tokenizer([f"x{i}" for i in range(97)])
    drafter = make_drafter(bind=False)
    drafter.config.target = target_record(target, tokenizer_sha256=tokenizer_fingerprint(right))
    with pytest.raises(
        ValueError, match="`tokenizer` must map ids to the same strings .*Load the tokenizer of `lab/Tiny`"
    ):
        drafter.bind(target, wrong)
    drafter.bind(target, right)
    drafter.config.target["tokenizer_sha256"] = None
    drafter.bind(target, wrong)


def test_a_bound_drafter_knows_its_target(make_drafter, make_target, target):
    """Catches a drafter that keeps the head of an earlier target."""
    drafter = make_drafter()
    assert drafter.is_bound_to(target)
    other = make_target(seed=9)
    assert not drafter.is_bound_to(other)
    drafter.bind(other)
    assert drafter.is_bound_to(other)
    assert drafter.bound().head is other.lm_head
