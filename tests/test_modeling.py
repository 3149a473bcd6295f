"""The drafter: against the oracle, against Qwen3 itself, cached against uncached, saved against loaded."""

import json
import logging
import math

import pytest
import torch
from conftest import build_drafter, config_fields, target_record
from oracle import Oracle, transfer_codes
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

from dspine_hub.configuration_dspine import DSpineConfig, tokenizer_fingerprint
from dspine_hub.modeling_dspine import DSpineContextCache, DSpineForSpeculation

TEXT = [3, 1, 4, 15, 92, 65, 35, 89, 79, 32, 38]

# float32 against float64 through three layers of width 32: a few hundred roundings of values below 10
FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}

# drafter shapes: the default, one slot, one layer, odd sizes, rank = hidden, biases
SHAPES = [
    pytest.param({}, id="default"),
    pytest.param({"block_size": 2, "num_candidates": 1}, id="one-slot,K=1"),
    pytest.param({"num_hidden_layers": 1, "target_layer_ids": [3]}, id="one-layer,one-tap"),
    pytest.param({"block_size": 4, "transfer_rank": 13, "message_size": 3, "num_candidates": 5}, id="odd"),
    pytest.param({"transfer_rank": 32, "message_size": 33, "num_candidates": 97}, id="R=H,K=V"),
    pytest.param({"attention_bias": True, "num_key_value_heads": 4, "rope_theta": 1e6}, id="bias,no-GQA"),
]


def noise(drafter, anchor):
    """Embed `[anchor, mask, ...]`, `[B, N, H]`."""
    anchor = torch.tensor([anchor]) if isinstance(anchor, int) else anchor
    ids = torch.full((len(anchor), drafter.config.block_size), drafter.config.mask_token_id)
    ids[:, 0] = anchor
    return drafter.bound().embedding(ids)


def oracle_of(drafter):
    bound = drafter.bound()
    return Oracle(drafter, bound.embedding.weight, bound.head.weight)


def block_mask(starts, seen, context, size):
    """Mask of packed blocks `[1, 1, Q, context + Q]`: each sees `seen[i]` context rows and itself, causally."""
    rows = len(starts) * size
    mask = torch.zeros(rows, context + rows, dtype=torch.bool)
    for block, rows_seen in enumerate(seen):
        for j in range(size):
            row = block * size + j
            mask[row, :rows_seen] = True
            mask[row, context + block * size : context + row + 1] = True
    return mask[None, None]


def run_packed(drafter, context, anchors, starts, embeds=None, **kwargs):
    """Run blocks anchored at positions `starts` in one pass over `context` `[1, n, T * H]`."""
    size = drafter.config.block_size
    if embeds is None:
        embeds = torch.cat([noise(drafter, anchor) for anchor in anchors], dim=1)
    n = context.shape[1]
    positions = [*range(n)] + [start + j for start in starts for j in range(size)]
    return drafter.run_blocks(
        embeds,
        context,
        torch.tensor([positions]),
        block_mask(starts, starts, n, size),
        drafter.transfer_codes[torch.tensor(anchors)],
        **kwargs,
    )


# -- the pass over a block ------------------------------------------------------------------------------------------


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
    """Catches labels that leak into inference, into other blocks, or into layers past `teacher_layers`."""
    drafter = make_drafter()
    context = taps(TEXT, drafter)
    labels = torch.tensor([[15, 92, 65, 35], [35, 89, 79, 32]])
    teacher = drafter.transfer_codes[labels]

    def run(**kwargs):
        with torch.no_grad():
            return run_packed(drafter, context, [15, 35], [3, 6], output_features=True, **kwargs)

    plain = run()
    for kwargs in (
        {"teacher": teacher, "replace": torch.tensor([False, False]), "teacher_layers": 3},
        {"teacher": teacher, "replace": torch.tensor([True, True]), "teacher_layers": 0},
    ):
        torch.testing.assert_close(run(**kwargs).last_hidden_state, plain.last_hidden_state, rtol=0, atol=0)
    one = run(teacher=teacher, replace=torch.tensor([False, True]), teacher_layers=1)
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


# -- drafting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", SHAPES)
def test_every_cached_score_equals_direct_refinement(make_drafter, taps, fields):
    """Catches a score computed from the wrong slot, the post-injection state or another predecessor."""
    drafter = make_drafter(**fields)
    context = taps(TEXT, drafter)
    draft = drafter.draft(context, torch.tensor([7]))
    oracle = oracle_of(drafter)
    block = oracle.block(7, context[0])
    for slot, ids in enumerate(draft.candidates[0].tolist()):
        logits = oracle.head @ block["final"][slot + 1]
        assert sorted(ids) == sorted(logits.topk(len(ids)).indices.tolist())
        for c in range(len(ids)):
            before = 7 if slot == 0 else int(draft.candidates[0, slot - 1, c])
            expected = oracle.head[ids] @ oracle.refine(block["states"][slot + 1], before)
            torch.testing.assert_close(draft.scores[0, slot, c].double(), expected, **FLOAT32)
            if len(ids) > 20 and c > 3:
                break  # K = V: a few rows are enough of a loop in Python


@pytest.mark.parametrize("fields", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.6], ids=["greedy", "T=0.7", "T=1.6"])
def test_the_cached_walk_equals_the_sequential_walk(make_drafter, taps, fields, temperature):
    """Catches a walk that follows another row than the token just chosen; sampled walks read the same uniforms."""
    drafter = make_drafter(**fields)
    oracle = oracle_of(drafter)
    slots = drafter.config.block_size - 1
    for seed, anchor in enumerate([7, 20, 76]):
        context = taps(TEXT[: 3 + seed], drafter)
        draft = drafter.draft(context, torch.tensor([anchor]), temperature, torch.Generator().manual_seed(seed))
        uniforms = torch.rand(1, slots, generator=torch.Generator().manual_seed(seed))[0].tolist()
        states = oracle.block(anchor, context[0])["states"]
        expected = oracle.sequential_walk(states, draft.candidates[0].tolist(), anchor, temperature, uniforms)
        assert draft.tokens[0].tolist() == expected


def test_the_walk_is_not_the_backbones_own_argmax(make_drafter, taps):
    """Catches fixtures so tame that every equality above would hold without any refinement."""
    drafter = make_drafter()
    different = 0
    for anchor in range(20):
        context = taps(TEXT, drafter)
        draft = drafter.draft(context, torch.tensor([anchor]))
        different += draft.tokens[0].tolist() != draft.candidates[0, :, 0].tolist()
    assert different > 5


def test_q_is_the_row_each_draft_was_drawn_from(make_drafter, taps):
    """Catches a q of the backbone or of another predecessor: sampling would no longer be lossless."""
    drafter = make_drafter()
    draft = drafter.draft(taps(TEXT, drafter), torch.tensor([7]), 0.7, torch.Generator().manual_seed(3))
    row = 0
    for slot in range(4):
        torch.testing.assert_close(draft.q[0, slot], torch.softmax(draft.scores[0, slot, row] / 0.7, dim=-1))
        row = int((draft.candidates[0, slot] == draft.tokens[0, slot]).nonzero())


@pytest.mark.parametrize("accepted", [[4, 4, 4], [0, 0, 0, 0], [0, 4, 1, 3, 2]], ids=["all", "none", "mixed"])
def test_cached_drafting_equals_drafting_from_scratch(make_drafter, taps, accepted):
    """Catches block rows left in the cache, positions that restart, and buffers that lose rows when they grow."""
    drafter = make_drafter()
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(96, (3,), generator=generator).tolist()
    cache, held = drafter.new_cache(), 0
    for count in [*accepted, 0]:
        anchor = torch.randint(96, (1,), generator=generator)
        context = taps(text, drafter)
        cached = drafter.draft(context[:, held:], anchor, cache=cache)
        scratch = drafter.draft(context, anchor)
        held = len(text)
        assert cache.get_seq_length() == held
        assert torch.equal(cached.tokens, scratch.tokens)
        # two gemms of other shapes over the same float32 numbers
        torch.testing.assert_close(cached.scores, scratch.scores, rtol=1e-4, atol=1e-4)
        text += [int(anchor), *torch.randint(96, (count,), generator=generator).tolist()]


def test_the_cache_grows_and_crops_by_rows():
    """Catches a crop that frees a stale view, a doubled buffer that drops old rows, layers that share a length."""
    cache, expected = DSpineContextCache(), [[], []]
    generator = torch.Generator().manual_seed(0)
    assert cache.get_seq_length() == 0
    for rows, drop in [(1, 0), (2, 1), (7, 5), (1, 0), (13, 13), (4, 2), (40, 3)]:
        for layer in range(2):
            new = torch.randn(1, 2, rows, 3, generator=generator)
            expected[layer].append(new)
            keys, values = cache.update(new, -new, layer)
            want = torch.cat(expected[layer], dim=2)
            assert torch.equal(keys, want)
            assert torch.equal(values, -want)
        cache.crop(-drop)
        for layer in range(2):
            want = torch.cat(expected[layer], dim=2)
            expected[layer] = [want[:, :, : want.shape[2] - drop]]
            assert cache.get_seq_length(layer) == expected[layer][0].shape[2]


@pytest.mark.parametrize("rows", [1, -4], ids=["positive", "too-many"])
def test_a_crop_out_of_range_is_refused(rows):
    """Catches transformers' older meaning of a positive crop (rows to keep) taken silently."""
    cache = DSpineContextCache()
    cache.update(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), 0)
    with pytest.raises(ValueError, match=r"`tokens_to_remove` must lie in \[-3, 0\]"):
        cache.crop(rows)


def test_greedy_drafting_leaves_the_global_generator_alone(make_drafter, taps):
    """Catches a greedy draft that moves the random stream of the caller's own sampling."""
    drafter = make_drafter()
    context = taps(TEXT, drafter)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drafter.draft(context, torch.tensor([7]))
    assert torch.equal(torch.get_rng_state(), before)


# -- transfer space -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 13, 16, 32])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_codes_equal_the_oracles_up_to_sign(make_target, rank, tied):
    """Catches the embedding read in place of an untied head, a mean or a whitening left out, directions misordered."""
    target = make_target(seed=3, tie_word_embeddings=tied)
    drafter = build_drafter(target, transfer_rank=rank)
    expected, directions = transfer_codes(target.lm_head.weight, rank)
    found = drafter.transfer_codes.double()
    # codes are stored in bfloat16: every entry is off by at most 2**-9 of itself
    torch.testing.assert_close(found @ found.T, expected @ expected.T, rtol=0, atol=2**-7)
    sign = torch.sign((found * expected).sum(dim=0))
    torch.testing.assert_close(found * sign, expected, rtol=2**-8, atol=1e-3)
    for readout in drafter.injection.readouts:
        weight = readout.weight.detach().double()
        torch.testing.assert_close(weight @ weight.T, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-5)
        torch.testing.assert_close(weight * sign[:, None], directions, rtol=0, atol=1e-3)


def test_codes_have_unit_rows(drafter):
    """Catches a table that lost its last normalisation, or was rounded before it."""
    # bfloat16 rounds every entry by at most 2**-9 of itself, so the length by at most that
    torch.testing.assert_close(drafter.transfer_codes.float().norm(dim=-1), torch.ones(97), rtol=0, atol=2**-9)


def test_codes_of_a_head_longer_than_one_chunk(make_target):
    """Catches rows lost or repeated at the border of the chunks in which a head is read (16,384 rows)."""
    torch.manual_seed(0)
    target = make_target(vocab_size=16384 + 17, hidden_size=8, head_dim=4)
    drafter = build_drafter(target, transfer_rank=5, head_dim=4, target_layer_ids=[0])
    assert drafter.transfer_codes.shape == (16401, 5)
    rows = torch.nn.functional.normalize(target.lm_head.weight.detach().double(), dim=-1)
    mean = rows.mean(0)
    values, vectors = torch.linalg.eigh((rows - mean).T @ (rows - mean) / len(rows))
    whitened = (rows - mean) @ (vectors[:, -5:] / values[-5:].sqrt())
    expected = torch.nn.functional.normalize(whitened, dim=-1)
    found = drafter.transfer_codes.double()
    sign = torch.sign((found * expected).sum(dim=0))
    # neighbouring eigenvalues of a random head are close, which turns float32 rounding into 1e-3 of rotation
    torch.testing.assert_close(found * sign, expected, rtol=2**-7, atol=5e-3)


def test_a_zero_head_row_has_a_finite_code(make_target):
    """Catches NaN from the padding rows of a vocabulary, which are often exactly 0."""
    target = make_target(seed=3, tie_word_embeddings=False)
    with torch.no_grad():
        target.lm_head.weight[90:] = 0
    drafter = build_drafter(target)
    assert bool(drafter.transfer_codes.isfinite().all())


@pytest.mark.parametrize(
    ("head", "match"),
    [
        pytest.param(
            torch.randn(96, 32), r"`head_weight` must have shape \[V, H\] = \[97, 32\], got \[96, 32\]", id="V"
        ),
        pytest.param(
            torch.randn(97, 31), r"`head_weight` must have shape \[V, H\] = \[97, 32\], got \[97, 31\]", id="H"
        ),
        pytest.param(
            torch.ones(97, 32), r"`transfer_rank` must not exceed the directions the head spans", id="rank-0"
        ),
    ],
)
def test_a_head_that_cannot_span_the_space_is_refused(make_drafter, head, match):
    """Catches a space built from noise directions or from another model's head."""
    drafter = make_drafter(ready=False)
    with pytest.raises(ValueError, match=match):
        drafter.initialize_transfer_space(head)
    assert not bool(drafter.transfer_ready)


# -- weights on disk ------------------------------------------------------------------------------------------------


def method_names(layers: int) -> set[str]:
    """Section 6 of the method, spelled out once."""
    names = {"fc.weight", "hidden_norm.weight", "norm.weight", "transfer_codes", "transfer_ready", "injection.bias"}
    names |= {f"injection.{part}.weight" for part in ("message", "receiver_gate", "predecessor_gate")}
    parts = [f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    for layer in range(layers):
        names |= {f"layers.{layer}.{part}.weight" for part in parts}
        names |= {f"injection.readouts.{layer}.weight", f"injection.writes.{layer}.weight"}
    return names


def test_the_state_dict_has_the_public_names_and_no_embedding_or_head(drafter, tmp_path):
    """Catches a renamed weight, and the target's modules slipping in once bound (622 M values for Qwen3-8B)."""
    assert set(drafter.state_dict()) == method_names(3)
    drafter.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == method_names(3)
    assert drafter.get_parameter("fc.weight").shape == (32, 96)
    shapes = {name: tuple(value.shape) for name, value in drafter.state_dict().items()}
    assert shapes["injection.readouts.0.weight"] == (16, 32)
    assert shapes["injection.writes.0.weight"] == (32, 8)
    assert shapes["injection.message.weight"] == (8, 16)
    assert shapes["injection.bias"] == (8,)
    assert shapes["transfer_codes"] == (97, 16)
    assert shapes["transfer_ready"] == ()
    assert drafter.transfer_ready.dtype == torch.bool
    ours = {id(parameter) for parameter in drafter.parameters()}
    assert ours.isdisjoint({id(drafter.bound().head.weight), id(drafter.bound().embedding.weight)})


def test_a_basis_checkpoint_replaces_the_codes_only(make_drafter):
    """Catches a compact checkpoint that still carries the table, or names its parts otherwise."""
    names = set(make_drafter(transfer_storage="basis").state_dict())
    basis = {f"transfer_basis.{part}" for part in ("mean", "directions", "eigenvalues")}
    assert names == method_names(3) - {"transfer_codes"} | basis


@pytest.mark.parametrize("storage", ["codes", "basis"])
def test_save_and_load_keep_the_drafts(make_drafter, target, taps, tmp_path, storage):
    """Catches weights that a load re-initialises, and codes that come back in another sign or dtype."""
    drafter = make_drafter(transfer_storage=storage, target=target)
    drafter.save_pretrained(tmp_path)
    loaded = DSpineForSpeculation.from_pretrained(tmp_path).eval()
    assert bool(loaded.transfer_ready)
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
        assert loaded.state_dict()[name].dtype == value.dtype, name
    loaded.bind(target)
    assert torch.equal(loaded.transfer_codes, drafter.transfer_codes)
    context = taps(TEXT, drafter)
    first, second = (d.draft(context, torch.tensor([7])) for d in (drafter, loaded))
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.scores, second.scores)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["DSpineForSpeculation"]


def test_a_basis_stays_float32_in_a_bfloat16_load(make_drafter, make_target, target, tmp_path):
    """Catches eigenvalues rounded by `dtype=`: whitening would give other codes, and acceptance would fall."""
    drafter = make_drafter(transfer_storage="basis")
    drafter.save_pretrained(tmp_path)
    loaded = DSpineForSpeculation.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.fc.weight.dtype == torch.bfloat16
    for name in ("mean", "directions", "eigenvalues"):
        found = getattr(loaded.transfer_basis, name)
        assert found.dtype == torch.float32
        assert torch.equal(found, getattr(drafter.transfer_basis, name))
    loaded.bind(target)
    # the same float32 sums: at most one step of bfloat16 (2**-8) apart
    torch.testing.assert_close(loaded.transfer_codes.float(), drafter.transfer_codes.float(), rtol=2**-7, atol=2**-9)
    # a head rounded to bfloat16 moves every unit row by up to 2**-9; whitening may multiply that by the spread
    half = DSpineForSpeculation.from_pretrained(tmp_path, dtype=torch.bfloat16).bind(make_target().to(torch.bfloat16))
    alike = torch.nn.functional.cosine_similarity(half.transfer_codes.float(), drafter.transfer_codes.float(), dim=-1)
    assert float(alike.min()) > 1 - 2**-9 * 2


def test_a_bfloat16_pair_drafts(make_drafter, make_target, taps, tmp_path):
    """Catches an operation that refuses mixed dtypes: codes are bfloat16, norms float32."""
    make_drafter().save_pretrained(tmp_path)
    half = make_target().to(torch.bfloat16)
    drafter = DSpineForSpeculation.from_pretrained(tmp_path, dtype=torch.bfloat16).bind(half)
    draft = drafter.draft(taps(TEXT, drafter, target=half), torch.tensor([7]), 0.7)
    assert draft.tokens.shape == (1, 4)
    assert bool(draft.scores.isfinite().all())


@pytest.mark.parametrize("storage", ["codes", "basis"])
def test_construction_on_meta_then_load_works(make_drafter, target, taps, storage):
    """Catches a buffer computed at construction (inverse RoPE frequencies), which a `meta` load leaves as noise."""
    drafter = make_drafter(transfer_storage=storage)
    with torch.device("meta"):
        empty = DSpineForSpeculation(DSpineConfig(**config_fields(transfer_storage=storage)))
    assert all(value.device.type == "meta" for value in empty.state_dict().values())
    empty.load_state_dict(drafter.state_dict(), strict=True, assign=True)
    leftovers = [name for name, b in empty.named_buffers() if b.device.type == "meta"]
    assert leftovers == []
    context = taps(TEXT, drafter)
    found = empty.eval().bind(target).draft(context, torch.tensor([7]))
    assert torch.equal(found.scores, drafter.draft(context, torch.tensor([7])).scores)


def test_a_partial_checkpoint_initialises_what_is_missing(make_drafter, tmp_path):
    """Catches missing writes or gates filled with noise, and loaded ones zeroed again by the initialisation."""
    drafter = make_drafter()
    kept = {n: v for n, v in drafter.state_dict().items() if n not in ("injection.writes.1.weight", "injection.bias")}
    drafter.save_pretrained(tmp_path, state_dict=kept)
    loaded = DSpineForSpeculation.from_pretrained(tmp_path)
    assert not bool(loaded.injection.writes[1].weight.any())
    assert not bool(loaded.injection.bias.any())
    for name, value in kept.items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_a_fresh_drafter_has_silent_writes(make_drafter):
    """Catches an initialisation under which training does not start at the causal backbone."""
    drafter = make_drafter(writes=False)
    zero = [*(f"injection.writes.{i}.weight" for i in range(3)), "injection.predecessor_gate.weight", "injection.bias"]
    for name in zero:
        assert not bool(drafter.get_parameter(name).any()), name
    assert bool(drafter.injection.receiver_gate.weight.any())
    assert bool(drafter.injection.message.weight.any())
    assert math.isclose(float(drafter.fc.weight.detach().std()), 0.2, rel_tol=0.1)


# -- binding --------------------------------------------------------------------------------------------------------


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
