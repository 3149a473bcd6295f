"""The plugin in real SGLang engines on the CPU: texts, acceptance, drafts, samples, two ranks.

`make test-all` installs the engines and sets DSPINE_ENGINES. Every engine runs in a process of its own with a time
limit; what those CPU engines are made of is in `helpers/sglang_cpu/`.
"""

import collections
import json

import pytest
import torch
from helpers.engine_runs import (
    MIDDLE,
    NEEDS_ENGINES,
    NEWEST,
    assert_same_acceptance,
    engine_arguments,
    generate,
    greedy,
    loop_rounds,
    prompt_ids,
    reference_pair,
)
from helpers.paths import MINI

from dspine_hub.api import convert

pytestmark = NEEDS_ENGINES


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """Texts of plain decoding by the newest engine."""
    place = tmp_path_factory.mktemp("plain")
    (outputs,) = generate(NEWEST, place, engine_arguments(), [greedy(prompt_ids())])
    return [output["ids"] for output in outputs]


SAMPLED = {"temperature": 1.0, "top_k": 4, "max_new_tokens": 3, "ignore_eos": True}
SAMPLES, SAMPLES_A_CALL = 480, 48


@pytest.fixture(scope="session")
def served(bundle, tmp_path_factory):
    """One engine: greedy texts of all prompts, then samples of one; its first drafts lie beside the result."""
    place = tmp_path_factory.mktemp("served")
    calls = [greedy(prompt_ids()[:1]), greedy(prompt_ids())]
    batch = {"input_ids": [prompt_ids()[1]] * SAMPLES_A_CALL, "sampling_params": SAMPLED}
    calls += [batch] * (SAMPLES // SAMPLES_A_CALL)
    return place, generate(NEWEST, place, engine_arguments(bundle), calls, DSPINE_DUMP=str(place))


def test_greedy_text_is_that_of_plain_decoding(plain, served):
    """Catches any loss, against the same engine without a drafter."""
    _, (first, outputs, *_) = served
    assert [output["ids"] for output in outputs] == plain
    assert first[0]["ids"] == plain[0]
    assert plain == loop_rounds()[1]


def test_text_and_acceptance_are_those_of_the_transformers_loop(served):
    _, (_, outputs, *_) = served
    assert [output["ids"] for output in outputs] == loop_rounds()[1]
    assert_same_acceptance(outputs)


def test_drafts_are_those_of_the_model_for_the_same_text(served):
    """Catches full attention in a block, slots shifted by one, taps off by one, weights under a wrong name."""
    place, (outputs, *_) = served
    target, drafter = reference_pair()
    text = prompt_ids()[0] + outputs[0]["ids"]
    files = sorted(place.glob("*.pt"), key=lambda path: int(path.stem.split("-")[1]))
    assert len(files) == 6
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    taps = torch.cat([states[layer + 1] for layer in drafter.config.target_layer_ids], dim=-1).detach()
    position = len(prompt_ids()[0])
    for path in files:
        found = torch.load(path)
        anchor = found["anchor_token_ids"]
        assert anchor.tolist() == [text[position]]
        context = taps[:, :position]
        if position == len(prompt_ids()[0]):
            torch.testing.assert_close(found["context"][0], context[0], rtol=1e-3, atol=1e-3)
        output = drafter(target.get_input_embeddings()(block_of(drafter, anchor)), context, anchor_ids=anchor)
        rows = torch.cat((output.last_hidden_state, output.pre_injection_state), dim=-1)[:, 1:].detach()
        torch.testing.assert_close(found["hidden_states"][..., : rows.shape[-1]], rows, rtol=1e-3, atol=1e-3)
        draft = drafter.draft(context, anchor)
        assert found["tokens"].tolist() == draft.tokens.tolist()
        assert torch.equal(found["candidate_ids"].sort(-1).values, draft.candidates.sort(-1).values)
        # a greedy draft is certain of its token
        assert torch.equal(found["q"].max(-1).values, torch.ones(1, drafter.config.block_size - 1))
        right = [a == b for a, b in zip(draft.tokens[0].tolist(), text[position + 1 :], strict=False)]
        position += 1 + (right.index(False) if False in right else len(right))


def block_of(drafter, anchor):
    masks = anchor.new_full((1, drafter.config.block_size - 1), drafter.config.mask_token_id)
    return torch.cat((anchor[:, None], masks), dim=1)


def test_samples_have_the_targets_distribution(served):
    """Catches drafts drawn from other rows than `q` says, by the exact distribution of two tokens in a row."""
    _, (_, _, *sampled) = served
    found = collections.Counter(tuple(output["ids"][1:3]) for call in sampled for output in call)
    assert sum(found.values()) == SAMPLES
    expected = exact_pairs(prompt_ids()[1])
    assert set(found) <= set(expected)
    # cells too rare for the statistic are counted together
    rare = [pair for pair, share in expected.items() if share * SAMPLES < 5]
    cells = [(found[pair], share * SAMPLES) for pair, share in expected.items() if pair not in rare]
    if rare:
        cells.append((sum(found[pair] for pair in rare), sum(expected[pair] for pair in rare) * SAMPLES))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells if mean > 0)
    freedom = len(cells) - 1
    # five standard deviations of chi-square: one run in a million fails by chance
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5, (statistic, freedom)
    # drafts were accepted, or nothing was tested
    assert sum(output["rounds"] for call in sampled for output in call) < 1.9 * SAMPLES


def exact_pairs(prompt):
    """Distribution of the second and third new token under temperature 1 and top-k 4."""
    target, _ = reference_pair()

    @torch.no_grad()
    def shares(ids):
        top = target(torch.tensor([ids])).logits[0, -1].topk(4)
        return list(zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True))

    pairs = collections.Counter()
    for first, a in shares(prompt):
        for second, b in shares([*prompt, first]):
            for third, c in shares([*prompt, first, second]):
                pairs[second, third] += a * b * c
    return pairs


def test_two_ranks_draft_alike(bundle, plain, tmp_path):
    """Catches token tables read by a rank that holds other rows of them: split heads are scored another way."""
    engine = engine_arguments(bundle, tp_size=2)
    (outputs,) = generate(NEWEST, tmp_path, engine, [greedy(prompt_ids())], SGLANG_CPU_OMP_THREADS_BIND="0|1")
    assert [output["ids"] for output in outputs] == plain
    assert_same_acceptance(outputs)


def test_the_name_dflash_serves_the_same_drafter(bundle, plain, tmp_path):
    """Catches a checkpoint that only the name DSPINE can serve."""
    engine = engine_arguments(bundle, "DFLASH", disable_overlap_schedule=True)
    (outputs,) = generate(NEWEST, tmp_path, engine, [greedy(prompt_ids())])
    assert [output["ids"] for output in outputs] == plain
    assert_same_acceptance(outputs)


def test_a_trainers_export_is_served_with_cached_prefixes(plain, tmp_path):
    """Catches a checkpoint straight from the trainer, without code or record, that is refused or drafts otherwise.

    The second time every prompt is a cached prefix, whose rows the drafter must have kept too.
    """
    convert(MINI / "drafter", tmp_path / "export", to_format="specforge")
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    # the record of the target is what a trainer's own export lacks
    del config["dspine_hub"]
    (tmp_path / "export" / "config.json").write_text(json.dumps(config))
    engine = engine_arguments(tmp_path / "export", disable_radix_cache=False)
    for outputs in generate(MIDDLE, tmp_path, engine, [greedy(prompt_ids())] * 2):
        assert [output["ids"] for output in outputs] == plain
        assert_same_acceptance(outputs)
