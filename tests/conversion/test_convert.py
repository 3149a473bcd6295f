"""Converted drafters compute what an independent implementation computes from the source's own tensors."""

import json
import stat

import pytest
import torch
from helpers import checkpoints
from helpers.checkpoints import SETTINGS
from helpers.converted import FLOAT32, WRITERS, block_of, head_of
from helpers.oracle import Oracle
from helpers.paths import ROOT
from safetensors.torch import load_file

from dspine_hub.api import convert
from dspine_hub.checkpoints.formats import FORMATS, RULES
from dspine_hub.checkpoints.loading import load_drafter_checkpoint
from dspine_hub.folders import file_sha256


@pytest.mark.parametrize("storage", ["codes", "basis"])
@pytest.mark.parametrize("kind", WRITERS)
def test_converted_checkpoint_computes_what_the_oracle_computes(saved_target, tmp_path, kind, storage):
    """Catches a tensor under another's name, a lost layer, other codes, a wrong block length, tap or mask token."""
    place, target = saved_target
    source = WRITERS[kind](tmp_path / "source", target)
    convert(source, tmp_path / "out", target=place, storage=storage)
    drafter = load_drafter_checkpoint(tmp_path / "out").float().bind(target)
    block = 16 if kind.startswith("reference") else checkpoints.BLOCK
    candidates = 16 if kind.startswith("reference") else checkpoints.TOP_K
    assert (drafter.config.block_size, drafter.config.num_candidates) == (block, candidates)
    settings = {**SETTINGS, "block_size": block}
    tensors, embedding = checkpoints.drafter(head_of(target)), target.get_input_embeddings().weight
    oracle = Oracle.from_tensors(tensors, settings, embedding, head_of(target))
    for anchor in (7, 20):
        context, output, draft = block_of(drafter, target, anchor)
        expected = oracle.block(anchor, context)
        torch.testing.assert_close(output.last_hidden_state[0].double(), torch.stack(expected["final"]), **FLOAT32)
        torch.testing.assert_close(output.pre_injection_state[0].double(), torch.stack(expected["states"]), **FLOAT32)
        walk = oracle.sequential_walk(expected["states"], draft.candidates[0].tolist(), anchor, 0.0, None)
        assert draft.tokens[0].tolist() == walk


def test_backbone_starts_as_itself_run_causally(saved_target, tmp_path):
    """Catches an injection that is not silent at the start, and anything random in it: two conversions are equal."""
    place, target = saved_target
    source = checkpoints.write_dflash(tmp_path / "source")
    for name in ("out", "again"):
        result = convert(source, tmp_path / name, target=place)
    assert file_sha256(tmp_path / "out" / "model.safetensors") == file_sha256(tmp_path / "again" / "model.safetensors")
    assert any("runs causally here" in note for note in result.notes)
    drafter = load_drafter_checkpoint(tmp_path / "out").float().bind(target)
    embedding = target.get_input_embeddings().weight
    oracle = Oracle.from_tensors(checkpoints.backbone(), SETTINGS, embedding, head_of(target))
    context, output, draft = block_of(drafter, target, 7)
    expected = torch.stack(oracle.backbone_block(7, context))
    torch.testing.assert_close(output.last_hidden_state[0].double(), expected, **FLOAT32)
    assert draft.tokens[0].tolist() == (expected[1:] @ head_of(target).double().T).argmax(dim=-1).tolist()
    # a message of zero beside a write of zero would never train
    assert drafter.injection.message.weight.abs().sum() > 0
    codes, _ = checkpoints.transfer_codes(head_of(target), drafter.config.transfer_rank)
    overlap = (drafter.transfer_codes.float() @ drafter.transfer_codes.float().T, (codes @ codes.T).float())
    torch.testing.assert_close(*overlap, rtol=0, atol=2e-2)


def test_round_trips_keep_every_byte_and_every_setting(saved_target, tmp_path):
    """Catches a way back that casts, drops or rounds, and training settings that do not survive."""
    place, target = saved_target
    first = WRITERS["specforge"](tmp_path / "specforge", target)
    convert(first, tmp_path / "hub", target=place)
    convert(tmp_path / "hub", tmp_path / "back", to_format="specforge")
    before, after = load_file(first / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    old, new = (json.loads((path / "config.json").read_text()) for path in (first, tmp_path / "back"))
    new["rope_theta"], old_rope = new.pop("rope_parameters")["rope_theta"], old["rope_theta"]
    assert new["rope_theta"] == old_rope
    added = {"dspine_hub", "dtype", "use_sliding_window", "sliding_window", "hidden_act", "initializer_range"}
    added |= {"attention_bias", "attention_dropout"}
    assert {key: value for key, value in new.items() if key not in added} == old
    assert set(new) - set(old) == added
    convert(tmp_path / "back", tmp_path / "hub-again")
    names = ("model.safetensors", "config.json", "README.md", "provenance.json", "modeling_dspine.py")
    for name in names:
        assert (tmp_path / "hub" / name).read_bytes() == (tmp_path / "hub-again" / name).read_bytes(), name


def test_early_bundle_is_upgraded(saved_target, tmp_path):
    """Catches an upgrade that leaves old code or a config without the fields of today."""
    place, target = saved_target
    source = WRITERS["hub"](tmp_path / "source", target)
    convert(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["transfer_storage"] == "codes" and config["is_causal"] is True
    assert config["auto_map"]["AutoModel"] == "modeling_dspine.DSpineForSpeculation"
    assert (tmp_path / "out" / "generation_dspine.py").is_file()
    assert load_file(source / "model.safetensors").keys() == load_file(tmp_path / "out" / "model.safetensors").keys()


def fuse(tensors):
    for layer in range(3):
        name = f"layers.{layer}.self_attn."
        parts = [tensors.pop(f"{name}{part}_proj.weight") for part in "qkv"]
        tensors[f"{name}qkv_proj.weight"] = torch.cat(parts)
        name = f"layers.{layer}.mlp."
        parts = [tensors.pop(f"{name}{part}_proj.weight") for part in ("gate", "up")]
        tensors[f"{name}gate_up_proj.weight"] = torch.cat(parts)
    return tensors


def prefix(tensors):
    return {f"draft_model.{name}": tensor for name, tensor in tensors.items()}


def widen(tensors):
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def carry(tensors):
    tensors["model.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["t2d"] = torch.ones(97, dtype=torch.bool)
    tensors["d2t"] = torch.zeros(97, dtype=torch.int64)
    return tensors


@pytest.mark.parametrize("change", [fuse, prefix, widen, carry], ids=["split", "rename", "cast", "drop"])
def test_community_copies_give_the_same_weights(saved_target, tmp_path, change):
    """Catches a rule that cuts in the wrong place, takes the wrong name, or casts to another dtype."""
    place, target = saved_target
    tensors = checkpoints.drafter(head_of(target))
    checkpoints.write(tmp_path / "plain", checkpoints.specforge_config(), tensors)
    checkpoints.write(tmp_path / "changed", checkpoints.specforge_config(), change(dict(tensors)))
    for name in ("plain", "changed"):
        convert(tmp_path / name, tmp_path / f"{name}-out", target=place)
    outs = [file_sha256(tmp_path / f"{name}-out" / "model.safetensors") for name in ("plain", "changed")]
    assert outs[0] == outs[1]


def test_copies_of_the_targets_tables_are_left_out_when_they_are_equal(saved_target, tmp_path):
    """Catches an embedding taken over from the drafter, and one dropped without a look: a random one hides a bug."""
    place, target = saved_target
    tensors = checkpoints.drafter(head_of(target))
    table = head_of(target).bfloat16()
    tensors |= {"embed_tokens.weight": table, "lm_head.weight": table.clone()}
    checkpoints.write(tmp_path / "source", checkpoints.specforge_config(), tensors)
    result = convert(tmp_path / "source", tmp_path / "out", target=place)
    assert sorted(note.split("`")[1] for note in result.notes) == ["embed_tokens.weight", "lm_head.weight"]
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(load_file(tmp_path / "out" / "model.safetensors"))


def test_source_is_never_modified(saved_target, tmp_path):
    """Catches a conversion that writes to its source: a read-only one serves too."""
    place, target = saved_target
    source = WRITERS["reference"](tmp_path / "source", target)
    before = {path: (file_sha256(path), path.stat().st_mtime_ns) for path in source.iterdir()}
    source.chmod(stat.S_IRUSR | stat.S_IXUSR)
    convert(source, tmp_path / "out", target=place)
    source.chmod(stat.S_IRWXU)
    assert {path: (file_sha256(path), path.stat().st_mtime_ns) for path in source.iterdir()} == before


def test_every_rule_of_the_table_is_used(saved_target, tmp_path):
    """Catches a rule that another one shadows."""
    from dspine_hub.conversion.rules import match

    names = ("rotary_emb.inv_freq", "model.embed_tokens.weight", "lm_head.weight", "d2t", "codes", "fc.weight")
    names += ("layers.0.self_attn.qkv_proj.weight", "layers.1.mlp.gate_up_proj.weight")
    assert {id(match(name)[0]) for name in names} == {id(rule) for rule in RULES}


def test_formats_are_read_from_one_table():
    """Catches a format offered by the command and unknown to the code, or missing from its page."""
    from dspine_hub.cli.convert import READS, WRITES

    assert ["auto", *FORMATS] == READS
    assert WRITES == [name for name, entry in FORMATS.items() if entry.writes] == ["hub", "specforge"]
    page = (ROOT / "docs" / "convert.md").read_text()
    for name, entry in FORMATS.items():
        assert f"`{name}`" in page and entry.summary in page.replace("\n", " ")
