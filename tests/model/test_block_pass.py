"""The pass over a block: the oracle's numbers, causality inside a block, and nothing from its neighbours."""

import pytest
import torch
from helpers.block_pass import FLOAT32, SHAPES, TEXT, noise, oracle_of, run_packed
from transformers import Qwen3Config, Qwen3Model


@pytest.mark.parametrize("fields", SHAPES)
def test_a_block_equals_the_oracle(make_drafter, taps, fields):
    """Catches any slip in the layer or the injection: bidirectional attention, a position off by one, features read
    after the write, labels in place of predicted features (the oracle has none to feed)."""
    drafter = make_drafter(**fields)
    context = taps(TEXT, drafter)
    with torch.no_grad():
        output = drafter(noise(drafter, 7), context)
        packed = run_packed(drafter, context, [7], [len(TEXT)], output_features=True)
    expected = oracle_of(drafter).block(7, context[0])
    torch.testing.assert_close(output.last_hidden_state[0].double(), torch.stack(expected["final"]), **FLOAT32)
    torch.testing.assert_close(output.pre_injection_state[0].double(), torch.stack(expected["states"]), **FLOAT32)
    assert output.layer_features is None
    assert len(packed.layer_features) == drafter.config.num_hidden_layers
    for found, features in zip(packed.layer_features, expected["features"], strict=True):
        torch.testing.assert_close(found[0].double(), torch.stack(features), rtol=1e-3, atol=1e-3)


def test_zero_writes_are_the_causal_backbone_bit_for_bit(make_drafter, taps):
    """Catches an injection that leaves a trace while silent: the backbone must not depend on it at all."""
    drafter = make_drafter(writes=False)
    with torch.no_grad():
        drafter.injection.predecessor_gate.weight.normal_()
        context, embeds = taps(TEXT, drafter), noise(drafter, 7)
        silent = drafter(embeds, context).last_hidden_state
        drafter.injection.forward = lambda hidden, *args: hidden
        backbone = drafter(embeds, context).last_hidden_state
    assert torch.equal(silent, backbone)


def test_the_backbone_without_context_is_qwen3(make_drafter):
    """Catches a layer that is no Qwen3 layer: transformers' own model carries the same weights and agrees."""
    drafter = make_drafter(writes=False)
    config = drafter.config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    fields = {name: getattr(config, name) for name in (*names, "head_dim", "rms_norm_eps", "vocab_size")}
    qwen = Qwen3Model(Qwen3Config(**fields, rope_parameters=dict(config.rope_parameters))).eval()
    missing, _ = qwen.load_state_dict(drafter.state_dict(), strict=False)
    assert missing == ["embed_tokens.weight"]
    embeds = noise(drafter, 7)
    with torch.no_grad():
        found = drafter(embeds, torch.zeros(1, 0, 3 * config.hidden_size)).last_hidden_state
        expected = qwen(inputs_embeds=embeds).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_later_slots_cannot_change_an_earlier_slot(make_drafter, taps, implementation):
    """Catches bidirectional attention inside a block, or an injection that reads its right neighbour."""
    drafter = make_drafter(attn_implementation=implementation)
    assert drafter.config._attn_implementation == implementation
    context, embeds = taps(TEXT, drafter), noise(drafter, 7).detach()
    with torch.no_grad():
        before = drafter(embeds, context).last_hidden_state
    for slot in range(1, 5):
        changed = embeds.clone()
        changed[:, slot:] += torch.randn(1, 5 - slot, 32)
        with torch.no_grad():
            after = drafter(changed, context).last_hidden_state
        assert torch.equal(after[:, :slot], before[:, :slot])
        assert not torch.equal(after[:, slot:], before[:, slot:])


def test_other_packed_blocks_cannot_change_a_block(make_drafter, taps):
    """Catches an injection that crosses block borders, or reads row 0 of the next block, when blocks are packed."""
    drafter = make_drafter()
    context = taps(TEXT, drafter)
    starts, anchors = [3, 6, 11], [15, 35, 7]
    embeds = torch.cat([noise(drafter, anchor) for anchor in anchors], dim=1).detach()
    with torch.no_grad():
        packed = run_packed(drafter, context, anchors, starts, embeds)
        changed = embeds.clone()
        changed[:, 5:10] += 1
        after = run_packed(drafter, context, [15, 36, 7], starts, changed)
    kept = [*range(5), *range(10, 15)]
    assert torch.equal(packed.last_hidden_state[:, kept], after.last_hidden_state[:, kept])
    for index, (start, anchor) in enumerate(zip(starts, anchors, strict=True)):
        with torch.no_grad():
            alone = drafter(noise(drafter, anchor), context[:, :start])
        rows = slice(5 * index, 5 * index + 5)
        torch.testing.assert_close(packed.last_hidden_state[:, rows], alone.last_hidden_state, **FLOAT32)
        torch.testing.assert_close(packed.pre_injection_state[:, rows], alone.pre_injection_state, **FLOAT32)


def test_the_anchor_row_is_never_written(make_drafter, taps):
    """Catches a write to row 0 through any layer: it equals the silent backbone's, whatever the writes."""
    loud, quiet = make_drafter(), make_drafter()
    with torch.no_grad():
        for write in quiet.injection.writes:
            write.weight.zero_()
        context = taps(TEXT, loud)
        with_writes = loud(noise(loud, 7), context).last_hidden_state
        without = quiet(noise(quiet, 7), context).last_hidden_state
    assert torch.equal(with_writes[:, 0], without[:, 0])
    assert bool((with_writes[:, 1:] != without[:, 1:]).any(-1).all())


def test_labels_reach_a_block_only_where_replacement_asks_for_them(make_drafter, taps):
    """Catches labels that leak into inference, into other blocks, or into layers past `replaced_layers`."""
    drafter = make_drafter()
    context = taps(TEXT, drafter)
    labels = torch.tensor([[15, 92, 65, 35], [35, 89, 79, 32]])
    codes = drafter.transfer_codes[labels]

    def run(**kwargs):
        with torch.no_grad():
            return run_packed(drafter, context, [15, 35], [3, 6], output_features=True, **kwargs)

    plain = run()
    for kwargs in (
        {"true_codes": codes, "replaced": torch.tensor([False, False]), "replaced_layers": 3},
        {"true_codes": codes, "replaced": torch.tensor([True, True]), "replaced_layers": 0},
    ):
        torch.testing.assert_close(run(**kwargs).last_hidden_state, plain.last_hidden_state, rtol=0, atol=0)
    one = run(true_codes=codes, replaced=torch.tensor([False, True]), replaced_layers=1)
    assert torch.equal(one.last_hidden_state[:, :5], plain.last_hidden_state[:, :5])
    # slot 1 of a taught block already reads the anchor's code, which is the label before it
    assert torch.equal(one.layer_features[0][:, :7], plain.layer_features[0][:, :7])
    assert bool((one.layer_features[0][:, 7:] != plain.layer_features[0][:, 7:]).any(-1).all())


def test_eager_equals_sdpa(make_drafter, taps):
    """Catches a scale or a mask applied in one implementation only."""
    outputs = []
    for implementation in ("sdpa", "eager"):
        drafter = make_drafter(attn_implementation=implementation)
        assert drafter.config._attn_implementation == implementation
        with torch.no_grad():
            outputs.append(drafter(noise(drafter, 7), taps(TEXT, drafter)).last_hidden_state)
    assert not torch.equal(*outputs), "both ran the same code"
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_attention_can_be_changed_after_loading(make_drafter, taps):
    """Catches `set_attn_implementation` that warns, changes nothing and leaves the caller on the other path."""
    drafter = make_drafter()
    drafter.set_attn_implementation("eager")
    assert {layer.self_attn.config._attn_implementation for layer in drafter.layers} == {"eager"}


def test_a_batch_equals_its_rows(make_drafter, taps):
    """Catches rows that read each other: anchors, context and masks are each request's own."""
    drafter = make_drafter()
    context = torch.cat((taps(TEXT, drafter), taps(TEXT[::-1], drafter)))
    anchors = torch.tensor([7, 8])
    batch = drafter.draft(context, anchors)
    for row in range(2):
        alone = drafter.draft(context[row : row + 1], anchors[row : row + 1])
        assert torch.equal(batch.tokens[row], alone.tokens[0])
        torch.testing.assert_close(batch.scores[row], alone.scores[0], **FLOAT32)


def test_an_attention_mask_hides_padded_context(make_drafter, taps):
    """Catches a mask that shifts or is dropped: padding on the left, with its own positions, changes nothing."""
    drafter = make_drafter()
    context = taps(TEXT, drafter)
    n, pad = len(TEXT), 3
    padded = torch.cat((torch.randn(1, pad, context.shape[-1]), context), dim=1)
    positions = torch.tensor([[0] * pad + [*range(n + 5)]])
    mask = torch.tensor([[0] * pad + [1] * (n + 5)])
    with torch.no_grad():
        found = drafter(noise(drafter, 7), padded, position_ids=positions, attention_mask=mask).last_hidden_state
        expected = drafter(noise(drafter, 7), context).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_anchors_are_found_by_their_embedding(make_drafter, taps):
    """Catches an anchor search that stops at the first equal column, or takes a foreign row for a token."""
    drafter = make_drafter()
    table = drafter.bound().embedding.weight
    context = taps(TEXT, drafter)
    with torch.no_grad():
        saved = table[:, 0].clone()
        table[:, 0] = 0.25
        found = drafter(noise(drafter, 7), context).last_hidden_state
        expected = drafter(noise(drafter, 7), context, anchor_ids=torch.tensor([7])).last_hidden_state
        foreign = noise(drafter, 7) + 0.5
        table[:, 0] = saved
    assert torch.equal(found, expected)
    with pytest.raises(
        ValueError, match="`noise_embeds` must start with an embedding of the bound target.*`anchor_ids`"
    ):
        drafter(foreign, context)


def test_a_block_of_another_size_is_refused(make_drafter, taps):
    """Catches a caller with another block size, whose positions would be wrong without a word."""
    drafter = make_drafter()
    with pytest.raises(ValueError, match="`noise_embeds` must hold `block_size` = 5 rows, got 4"):
        drafter(noise(drafter, 7)[:, :4], taps(TEXT, drafter))


def test_gradients_reach_every_trainable_weight_and_are_finite(make_drafter, taps):
    """Catches a detached branch, and NaN at zero states (a zero embedding row makes the first state 0)."""
    drafter = make_drafter()
    embeds = noise(drafter, 7).detach()
    embeds[:, 2] = 0
    out = run_packed(drafter, taps(TEXT, drafter), [7], [len(TEXT)], embeds, output_features=True)
    loss = out.last_hidden_state.pow(2).sum() + sum(feature[..., 0].sum() for feature in out.layer_features)
    loss.backward()
    bad = [n for n, p in drafter.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert bad == []
    silent = [n for n, p in drafter.named_parameters() if not bool(p.grad.any())]
    assert silent == []
