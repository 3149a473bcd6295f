"""Every rule of a config, as a table; both spellings of RoPE; the round trip through `config.json`."""

import json

import pytest
import torch
from helpers.tiny import config_fields
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError

from dspine_hub.configuration_dspine import (
    REQUIRED_FIELDS,
    TARGET_FIELDS,
    DSpineConfig,
    head_fingerprint,
    tokenizer_fingerprint,
)

REFUSALS = (ValueError, StrictDataclassClassValidationError, StrictDataclassFieldValidationError)

RECORD = {
    "id": "lab/Tiny",
    "revision": "main",
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "vocab_size": 95,
    "padded_vocab_size": 97,
    "tokenizer_sha256": None,
    "lm_head_sha256": None,
    "chat_template_sha256": None,
    "enable_thinking": None,
}

ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def without(record, key):
    return {name: value for name, value in record.items() if name != key}


# field, bad value, what the message must say
RULES = [
    ("vocab_size", 0, r"`vocab_size` must be >= 1, got 0"),
    ("hidden_size", 0, r"`hidden_size` must be >= 1, got 0"),
    ("intermediate_size", -1, r"`intermediate_size` must be >= 1, got -1"),
    ("num_hidden_layers", 0, r"`num_hidden_layers` must be >= 1, got 0"),
    ("num_attention_heads", 0, r"`num_attention_heads` must be >= 1, got 0"),
    ("num_attention_heads", 3, r"`num_attention_heads` must be a multiple of `num_key_value_heads`, got 3 and 2"),
    ("num_key_value_heads", 0, r"`num_key_value_heads` must be >= 1, got 0"),
    ("head_dim", 0, r"`head_dim` must be >= 1, got 0"),
    ("head_dim", 7, r"even.*`head_dim`=7|`head_dim` must be even .* got 7"),  # newer transformers checks it first
    ("max_position_embeddings", 0, r"`max_position_embeddings` must be >= 1, got 0"),
    ("num_target_layers", 0, r"`num_target_layers` must be >= 1, got 0"),
    ("message_size", 0, r"`message_size` must be >= 1, got 0"),
    ("block_size", 1, r"`block_size` counts the anchor and must be >= 2, got 1"),
    ("block_size", "7", r"block_size.*(int|`int`)"),
    ("mask_token_id", -1, r"`mask_token_id` must lie in \[0, 97\), got -1"),
    ("mask_token_id", 97, r"`mask_token_id` must lie in \[0, 97\), got 97"),
    ("num_candidates", 0, r"`num_candidates` must lie in \[1, 97\], got 0"),
    ("num_candidates", 98, r"`num_candidates` must lie in \[1, 97\], got 98"),
    ("target_layer_ids", [], r"`target_layer_ids` must be sorted and unique and name at least one layer, got \[\]"),
    ("target_layer_ids", [2, 0], r"`target_layer_ids` must be sorted and unique .* got \[2, 0\]"),
    ("target_layer_ids", [1, 1], r"`target_layer_ids` must be sorted and unique .* got \[1, 1\]"),
    ("target_layer_ids", [-1, 2], r"`target_layer_ids` must lie in \[0, 5\), got \[-1, 2\]"),
    ("target_layer_ids", [0, 6], r"`target_layer_ids` must lie in \[0, 5\), got \[0, 6\]"),
    ("target_layer_ids", [0, 5], r"`target_layer_ids` must not tap the last layer \(5\)"),
    ("target_layer_ids", [0.5], r"target_layer_ids"),
    ("transfer_rank", 0, r"`transfer_rank` must lie in \[1, .*\[1, 32\], got 0"),
    ("transfer_rank", 33, r"`transfer_rank` must lie in \[1, .*\[1, 32\], got 33"),
    ("transfer_storage", "files", r"`transfer_storage` must be 'codes' or 'basis', got 'files'"),
    ("is_causal", False, r"`is_causal` must be true, got False"),
    ("layer_types", ["full_attention"], r"`layer_types` must be 'full_attention' for all 3 layers"),
    ("layer_types", ["full_attention", "sliding_attention", "full_attention"], r"`layer_types`.*sliding"),
    ("rope_theta", None, r"`rope_parameters` must give `rope_theta`"),
    ("rope_theta", 0, r"`rope_theta` must be a positive number, got 0"),
    ("rope_theta", True, r"`rope_theta` must be a positive number, got True"),
    ("rope_parameters", {**ROPE, "rope_theta": -1.0}, r"`rope_theta` must be a positive number, got -1.0"),
    ("rope_parameters", {**ROPE, "rope_theta": "1e4"}, r"`rope_theta` must be a positive number, got '1e4'"),
    ("rope_parameters", {**ROPE, "rope_type": "yarn", "factor": 4.0}, r"`rope_parameters` must be plain RoPE.*'yarn'"),
    ("rope_parameters", {**ROPE, "partial_rotary_factor": 0.25}, r"`partial_rotary_factor` must be 1 or absent"),
    ("rope_parameters", {**ROPE, "mrope_section": [1, 2, 1]}, r"`rope_parameters`.*M-RoPE"),
    ("rope_parameters", {"full_attention": ROPE}, r"`rope_parameters`"),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0}, r"`rope_parameters` must be plain RoPE.*'linear'"),
    ("rope_scaling", {"type": "mrope", "mrope_section": [1, 2, 1]}, r"`rope_parameters`.*M-RoPE"),
    ("partial_rotary_factor", 0.5, r"`partial_rotary_factor` must be 1 or absent, got 0.5"),
    ("target", {}, r"`target` must have exactly the keys"),
    ("target", without(RECORD, "lm_head_sha256"), r"`target`.*missing \['lm_head_sha256'\], unknown \[\]"),
    ("target", {**RECORD, "sha": "x"}, r"`target`.*missing \[\], unknown \['sha'\]"),
    ("target", {**RECORD, "hidden_size": 64}, r"`target.hidden_size` must equal the drafter's own value 32, got 64"),
    ("target", {**RECORD, "num_hidden_layers": 7}, r"`target.num_hidden_layers` must equal .* 6, got 7"),
    ("target", {**RECORD, "padded_vocab_size": 96}, r"`target.padded_vocab_size` must equal .* 97, got 96"),
    ("target", {**RECORD, "vocab_size": 98}, r"`target.vocab_size` .* must lie in \[1, 97\], got 98"),
    ("target", {**RECORD, "vocab_size": None}, r"`target.vocab_size` .* must lie in \[1, 97\], got None"),
]


@pytest.mark.parametrize(
    ("field", "value", "match"), RULES, ids=[f"{field}={str(value)[:40]}" for field, value, _ in RULES]
)
def test_a_broken_rule_is_refused_by_name(field, value, match):
    """Catches a config that builds and only fails, or silently loses acceptance, much later."""
    with pytest.raises(REFUSALS, match=match):
        DSpineConfig(**config_fields(**{field: value}))


@pytest.mark.parametrize("field", REQUIRED_FIELDS)
def test_required_fields_are_never_guessed(field):
    """Catches a checkpoint's constant as class default: a drafter of another layout would load without a word."""
    fields = config_fields()
    del fields[field]
    with pytest.raises(REFUSALS, match=rf"^`{field}` must be set"):
        DSpineConfig(**fields)


def test_all_missing_fields_are_named_at_once():
    """Catches an error that names one field a run."""
    with pytest.raises(REFUSALS) as caught:
        DSpineConfig()
    assert all(f"`{field}`" in str(caught.value) for field in REQUIRED_FIELDS)


@pytest.mark.parametrize(
    "style",
    [
        pytest.param({"rope_theta": 500000}, id="top-level"),
        pytest.param({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, id="parameters"),
        pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}, id="parameters-win"),
        pytest.param({"rope_theta": 5e5, "rope_scaling": None}, id="null-scaling"),
        pytest.param({"rope_theta": 5e5, "partial_rotary_factor": 1.0}, id="full-rotary"),
        pytest.param({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, id="old-type"),
    ],
)
def test_rope_spellings_are_equal(style):
    """Catches a RoPE base read from one spelling and defaulted in the other."""
    config = DSpineConfig(**config_fields(**style))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    expected = DSpineConfig(**config_fields(rope_theta=5e5))
    assert config.to_dict() == expected.to_dict()


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"transfer_storage": "basis", "target": RECORD}, id="basis+record"),
        pytest.param({"attention_bias": True, "num_key_value_heads": 4, "hidden_act": "gelu"}, id="qwen3-options"),
        pytest.param({"dtype": "bfloat16", "architectures": ["DSpineForSpeculation"]}, id="base-class-fields"),
    ],
)
def test_save_and_load_keep_every_field(tmp_path, extra):
    """Catches a derived default that is written in another form than it is read."""
    config = DSpineConfig(**config_fields(**extra))
    config.save_pretrained(tmp_path)
    loaded = DSpineConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "dspine"
    # written out, so that a reader of config.json need not know the defaults
    for name in ("layer_types", "is_causal", "transfer_storage", "rope_parameters", *REQUIRED_FIELDS):
        assert written[name] == getattr(config, name), name


def test_a_rule_broken_after_construction_is_refused_at_save(tmp_path):
    """Catches an edited config that would publish a broken drafter."""
    config = DSpineConfig(**config_fields())
    config.target_layer_ids = [0, 5]
    with pytest.raises(REFUSALS, match="`target_layer_ids` must not tap the last layer"):
        config.save_pretrained(tmp_path)


def test_defaults_do_not_leak_between_configs():
    """Catches a shared mutable default."""
    first, second = DSpineConfig(**config_fields()), DSpineConfig(**config_fields())
    first.layer_types.append("x")
    first.rope_parameters["rope_theta"] = 1.0
    assert second.layer_types == ["full_attention"] * 3
    assert second.rope_parameters["rope_theta"] == 10000.0


def test_construction_does_not_change_the_callers_dictionaries():
    """Catches a `pop` on an argument: the same fields build a second config."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1}
    record = dict(RECORD)
    DSpineConfig(**config_fields(rope_parameters=rope, target=record))
    assert rope == {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1}
    assert record == RECORD


def test_record_fields_are_exactly_the_public_list():
    """Catches a list written twice that drifts."""
    assert set(RECORD) == set(TARGET_FIELDS)
    assert DSpineConfig(**config_fields(target=RECORD)).target == RECORD


def test_head_fingerprint_ignores_the_load_dtype():
    """Catches a float32 load of a bfloat16 head that reads as another head."""
    head = torch.randn(17, 5, generator=torch.Generator().manual_seed(0))
    half = head.to(torch.bfloat16)
    assert head_fingerprint(half) == head_fingerprint(half.float()) == head_fingerprint(head)
    other = half.clone()
    other[16, 4] += 1
    assert head_fingerprint(other) != head_fingerprint(half)
    assert head_fingerprint(half.T.contiguous().T) == head_fingerprint(half)


def test_head_fingerprint_reads_past_its_first_chunk():
    """Catches a hash of the first 16,384 rows only: real vocabularies have 151,936."""
    head = torch.zeros(16385, 1)
    before = head_fingerprint(head)
    head[-1] = 1
    assert head_fingerprint(head) != before


def test_tokenizer_fingerprint_depends_on_ids_and_strings_alone():
    """Catches a hash that depends on the order of the vocabulary, or that ignores which id a string has."""

    class Fake:
        def __init__(self, vocabulary):
            self.vocabulary = vocabulary

        def get_vocab(self):
            return self.vocabulary

    base = tokenizer_fingerprint(Fake({"a": 0, "b": 1, "é": 2}))
    assert tokenizer_fingerprint(Fake({"é": 2, "b": 1, "a": 0})) == base
    assert tokenizer_fingerprint(Fake({"a": 1, "b": 0, "é": 2})) != base
    assert tokenizer_fingerprint(Fake({"a": 0, "b": 1, "é": 2, "<new>": 3})) != base
