"""Requests that the loop cannot decode are refused by name."""

import pytest
import torch
from helpers.scripted import PROMPT, greedy
from helpers.tiny import target_record
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from dspine_hub.configuration_dspine import tokenizer_fingerprint
from dspine_hub.generation_dspine import dspine_decode
from dspine_hub.modeling_dspine import DSpineDraft


def prefilled(target):
    cache = DynamicCache()
    with torch.no_grad():
        target(torch.tensor([PROMPT[:3]]), past_key_values=cache, use_cache=True)
    return cache


ONE = torch.tensor([PROMPT])


@pytest.mark.parametrize(
    ("ids", "kwargs", "match"),
    [
        pytest.param(
            ONE.repeat(2, 1), {}, r"`input_ids` must hold one prompt \(\[1, P\]\), got \[2, 7\].*batch 1", id="batch"
        ),
        pytest.param(
            ONE, {"num_return_sequences": 2, "temperature": 0.7}, r"`num_return_sequences` must be 1", id="n=2"
        ),
        pytest.param(ONE, {"num_beams": 2}, "`num_beams` must be 1 in speculative decoding, got 2", id="beams"),
        pytest.param(
            ONE,
            {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1]])},
            "`attention_mask` must be all ones, got padding",
            id="padding",
        ),
        pytest.param(
            ONE, {"past_key_values": prefilled}, "`past_key_values` must be empty, got 3 rows", id="prefilled"
        ),
        pytest.param(ONE, {"temperature": -1.0}, "`temperature` must be >= 0, got -1.0", id="temperature"),
        pytest.param(ONE, {"max_new_tokens": 0}, "`max_new_tokens` must be >= 1, got 0", id="no-tokens"),
        pytest.param(
            ONE, {"stop_strings": "aa"}, "`tokenizer` must be given with `stop_strings`, got None", id="strings"
        ),
    ],
)
def test_requests_the_loop_cannot_decode_are_refused_by_name(target, drafter, ids, kwargs, match):
    """Catches a request that would be decoded wrongly, or die in a shape error far from its cause."""
    kwargs = {"temperature": 0, "max_new_tokens": 5, **kwargs}
    if callable(kwargs.get("past_key_values")):
        kwargs["past_key_values"] = kwargs["past_key_values"](target)
    with pytest.raises(ValueError, match=match):
        drafter.spec_generate(target, ids, **kwargs)


def test_an_empty_cache_and_a_full_mask_are_no_reason_to_refuse(target, drafter):
    """Catches a check that refuses what every chat template call passes along."""
    found = drafter.spec_generate(
        target, ONE, 6, temperature=0, past_key_values=DynamicCache(), attention_mask=torch.ones_like(ONE)
    )
    assert found.tolist() == [greedy(target, PROMPT, 6)]


def test_recurrent_targets_are_refused(target, drafter, monkeypatch):
    """Catches a target whose state cannot be taken back after a rejected draft."""
    monkeypatch.setattr(target.config, "layer_types", ["linear_attention"] + ["full_attention"] * 5)
    with pytest.raises(ValueError, match=r"`target` must keep a cache .* got layers of type \['linear_attention'\]"):
        dspine_decode(
            target,
            ONE,
            drafter=drafter,
            logits_processor=LogitsProcessorList(),
            stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(9)]),
            generation_config=GenerationConfig(do_sample=False),
        )


def test_another_target_is_refused(drafter, make_target):
    """Catches a drafter used with a model it was not made for."""
    with pytest.raises(
        ValueError, match="`num_target_layers` of the drafter must equal the target's, got 6 .* with 5"
    ):
        drafter.spec_generate(make_target(num_hidden_layers=5), ONE, 5, temperature=0)


@pytest.mark.parametrize("bound", [False, True], ids=["unbound", "already-bound"])
def test_another_tokenizer_is_refused(target, make_drafter, tokenizer, bound):
    """Catches a wrong tokenizer that passes because an earlier call already bound the drafter."""
    drafter = make_drafter(bind=False)
    drafter.config.target = target_record(target, tokenizer_sha256="0" * 64)
    if bound:
        drafter.bind(target)
    with pytest.raises(ValueError, match="`tokenizer` must map ids to the same strings"):
        drafter.spec_generate(target, ONE, 5, temperature=0, tokenizer=tokenizer)
    drafter.config.target["tokenizer_sha256"] = tokenizer_fingerprint(tokenizer)
    drafter.spec_generate(target, ONE, 5, temperature=0, tokenizer=tokenizer)


def test_a_draft_is_a_plain_record():
    """Catches a field renamed under the loop: tokens, candidates, q and scores are its whole interface."""
    assert list(DSpineDraft.__dataclass_fields__) == ["tokens", "candidates", "q", "scores"]
