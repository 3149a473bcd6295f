"""Weights on disk: their names, both storages, dtypes, and loads of what is incomplete."""

import json
import math

import pytest
import torch
from helpers.block_pass import TEXT
from helpers.tiny import build_drafter, config_fields
from safetensors.torch import load_file

from dspine_hub.configuration_dspine import DSpineConfig
from dspine_hub.modeling_dspine import DSpineForSpeculation


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


def test_a_tie_flag_copied_from_the_target_changes_nothing(make_target, taps, tmp_path):
    """Catches a head replaced by the embedding, or a failed load, after the flag was copied (SpecForge#139)."""
    target = make_target(tie_word_embeddings=False)
    plain, tied = build_drafter(target), build_drafter(target, tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    loaded = DSpineForSpeculation.from_pretrained(tmp_path).eval().bind(target)
    assert loaded.config.tie_word_embeddings and set(loaded.state_dict()) == set(plain.state_dict())
    context = taps([3, 1, 4, 15, 92], plain, target=target)
    scores = [each.draft(context, torch.tensor([7])).scores for each in (plain, tied, loaded)]
    assert torch.equal(scores[0], scores[1]) and torch.equal(scores[0], scores[2])
