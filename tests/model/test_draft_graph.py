"""The static pass a CUDA graph captures, run without a graph: it must draft as the growing cache does."""

import pytest
import torch

from dspine_hub.draft_graph_dspine import CompiledDraft, GraphContextCache
from dspine_hub.modeling_dspine import DSpineContextCache

TEXT = [3, 17, 42, 8, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 83, 27, 95, 2, 88, 54]


@pytest.fixture
def compiled(drafter, monkeypatch):
    """A drafter whose static pass runs without a graph."""
    monkeypatch.setattr(drafter, "_compiled", CompiledDraft(drafter, 32, (1,), capture=False))
    return drafter


def draft(drafter, context, anchor, cache, seed=0):
    temperature = torch.tensor([0.8])
    return drafter.draft(context, torch.tensor([anchor]), temperature, torch.Generator().manual_seed(seed), cache)


@pytest.mark.parametrize("prompt", [1, 3, 5, 9], ids=lambda n: f"prompt-{n}")
def test_every_round_drafts_as_the_growing_cache_does(compiled, taps, prompt):
    """Catches a row written past the count that is seen, a prompt appended twice, a position off by a round."""
    context = taps(TEXT, compiled)
    mine, plain = compiled.new_cache(), DSpineContextCache()
    start = 0
    for rows in (prompt, 1, 5, 2, 3):
        end = start + rows
        found = draft(compiled, context[:, start:end], TEXT[end], mine, seed=end)
        expected = draft(compiled, context[:, start:end], TEXT[end], plain, seed=end)
        assert torch.equal(found.tokens, expected.tokens)
        # the same sums over wider, masked rows
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4)
        assert mine.get_seq_length() == plain.get_seq_length() == end
        start = end


def test_past_its_buffers_a_text_is_drafted_without_the_graph(drafter, taps, monkeypatch):
    """Catches a long text refused, or drafted from buffers that lost its beginning."""
    monkeypatch.setattr(drafter, "_compiled", CompiledDraft(drafter, 12, (1,), capture=False))
    context, cache, plain = taps(TEXT, drafter), drafter.new_cache(), DSpineContextCache()
    for start, end in ((0, 4), (4, 7), (7, 12), (12, 14)):
        found = draft(drafter, context[:, start:end], TEXT[end], cache, seed=end)
        assert torch.equal(found.tokens, draft(drafter, context[:, start:end], TEXT[end], plain, seed=end).tokens)


def test_a_text_decodes_to_the_targets_own(compiled, target):
    """Catches a loop that does not hand the graph's cache on: greedy text must stay the target's."""
    ids = torch.tensor([TEXT[:6]])
    expected = target.generate(ids, max_new_tokens=20, do_sample=False)
    found = compiled.spec_generate(target, ids, 20, temperature=0.0)
    assert torch.equal(found, expected)
    assert isinstance(compiled.new_cache(), GraphContextCache)


def test_an_earlier_cache_is_refused_by_name(compiled, taps):
    """Catches two requests that overwrite each other's rows."""
    context, cache = taps(TEXT, compiled), compiled.new_cache()
    compiled.new_cache()
    with pytest.raises(ValueError, match="`cache` must be the one `new_cache` returned last, got an earlier one"):
        draft(compiled, context[:, :3], TEXT[3], cache)


def test_new_weights_or_another_target_drop_the_graph(compiled, target):
    """Catches a graph that replays tables of weights no longer there."""
    compiled.bind(target)
    assert type(compiled.new_cache()) is DSpineContextCache
    compiled._compiled = object()
    assert compiled.double()._compiled is None


def test_tables_follow_the_weights(drafter):
    """Catches drafts from tables of the weights before a training step."""
    before = drafter.prepare()
    assert drafter.prepare() is before
    drafter.train()
    with torch.no_grad():
        drafter.injection.message.weight.add_(1)
    drafter.eval()
    after = drafter.prepare()
    assert not torch.equal(after.predecessors.values, before.predecessors.values)
    drafter.load_state_dict(drafter.state_dict())
    assert drafter.prepare() is not after
    drafter.invalidate()
    drafter.head_messages = False
    assert drafter.prepare().head_messages is None


@pytest.mark.parametrize("name", ["injection.message.weight", "injection.writes.2.weight", "norm.weight", "codes"])
@pytest.mark.parametrize("through", ["data", "no_grad"])
def test_a_request_drafts_from_the_weights_as_they_are(make_drafter, target, name, through):
    """Catches a write nobody announced, `.data` above all: texts stay right, drafts are those of other weights."""
    ids, drafters = torch.tensor([TEXT]), []
    for written in (False, True):
        drafter = make_drafter()
        if not written:
            # prepared with the old weights
            drafter.spec_generate(target, ids, max_new_tokens=8, temperature=0.0)
        weight = drafter.transfer_codes if name == "codes" else drafter.get_parameter(name)
        with torch.no_grad():
            (weight.data if through == "data" else weight).mul_(-1.5)
        drafters.append(drafter)
    seen = [
        drafter.spec_generate(target, ids, max_new_tokens=24, temperature=0.0, return_dict_in_generate=True)
        for drafter in drafters
    ]
    assert seen[0].statistics.accepted == seen[1].statistics.accepted
    for mine, theirs in zip(drafters[0].prepare().predecessors, drafters[1].prepare().predecessors, strict=True):
        assert torch.equal(mine, theirs)


def test_a_changed_weight_is_drafted_from_without_the_graph(compiled, taps):
    """Catches a graph that goes on drafting from tables of weights no longer there: right text, only slow."""
    context, cache = taps(TEXT, compiled), compiled.new_cache()
    draft(compiled, context[:, :3], TEXT[3], cache)
    with torch.no_grad():
        for write in compiled.injection.writes:
            write.weight.mul_(-1)
    compiled.invalidate_if_changed()
    found = draft(compiled, context[:, 3:5], TEXT[5], cache, seed=5)
    expected = draft(compiled, context[:, :5], TEXT[5], DSpineContextCache(), seed=5)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4)


def test_drafts_without_the_table_of_head_messages_are_the_same(drafter, taps):
    """Catches a setting that drafting does not read, and rows computed otherwise than the table's."""
    context = taps(TEXT, drafter)
    expected = draft(drafter, context[:, :5], TEXT[5], None)
    drafter.invalidate()
    drafter.head_messages = False
    found = draft(drafter, context[:, :5], TEXT[5], None)
    assert drafter.prepare().head_messages is None
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-4, atol=1e-4)


def test_refusals(drafter):
    """Catches a graph asked of a CPU, and buffers that hold no block."""
    with pytest.raises(ValueError, match="`compile_draft` needs a drafter on a CUDA device, got one on `cpu`"):
        drafter.compile_draft()
    with pytest.raises(ValueError, match="`max_length` must exceed `block_size` = 5, got 5"):
        CompiledDraft(drafter, 5, (1,), capture=False)
