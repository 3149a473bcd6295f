"""Converted drafters compute what an independent implementation computes from the source's own tensors."""

import json
import stat
from functools import partial
from pathlib import Path

import checkpoints
import pytest
import torch
from checkpoints import LAYERS, MASK, SETTINGS, TAPS
from conftest import build_target, target_record
from oracle import Oracle
from safetensors.torch import load_file, save_file

from dspine_hub.api import convert_drafter, load_drafter
from dspine_hub.checkpoints import tensors as reading
from dspine_hub.checkpoints.formats import FORMATS, RULES, TAP_MEANINGS
from dspine_hub.checkpoints.loading import load_drafter_checkpoint
from dspine_hub.checkpoints.settings import read_settings, read_taps
from dspine_hub.conversion import writing as stream
from dspine_hub.conversion.detect import detect
from dspine_hub.errors import DSpineHubError
from dspine_hub.folders import file_sha256
from dspine_hub.generation_dspine import TapRecorder

TEXT = [3, 1, 4, 15, 92, 65, 35]
# float32 against float64 through three layers of width 32
FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved target in bfloat16 values, so that every reader sees the same head."""
    target = build_target().bfloat16().float()
    place = tmp_path_factory.mktemp("target")
    target.save_pretrained(place)
    return place, target


def head_of(target):
    return target.get_output_embeddings().weight.detach()


WRITERS = {
    "hub": lambda place, target: checkpoints.write_hub(place, head_of(target), target_record(target)),
    "specforge": lambda place, target: checkpoints.write_specforge(place, head_of(target)),
    "reference": lambda place, target: checkpoints.write_reference(place, head_of(target)),
    "reference-flat": lambda place, target: checkpoints.write_reference(place, head_of(target), nested=False),
    "specforge-sharded": lambda place, target: checkpoints.write_sharded(
        place, checkpoints.specforge_config(), checkpoints.drafter(head_of(target))
    ),
}


def block_of(drafter, target, anchor):
    """Run one block of a drafter after the target's own taps; returns context, states, final and drafts."""
    with torch.no_grad(), TapRecorder(target, drafter.config.target_layer_ids) as taps:
        target(torch.tensor([TEXT]))
        context = taps.take()
    ids = torch.tensor([[anchor] + [MASK] * (drafter.config.block_size - 1)])
    embeds = target.get_input_embeddings()(ids)
    with torch.no_grad():
        output = drafter(embeds, context, anchor_ids=torch.tensor([anchor]))
    return context[0], output, drafter.draft(context, torch.tensor([anchor]))


@pytest.mark.parametrize("storage", ["codes", "basis"])
@pytest.mark.parametrize("kind", WRITERS)
def test_converted_checkpoint_computes_what_the_oracle_computes(folder, tmp_path, kind, storage):
    """Catches a tensor under another's name, a lost layer, other codes, a wrong block length, tap or mask token."""
    place, target = folder
    source = WRITERS[kind](tmp_path / "source", target)
    convert_drafter(source, tmp_path / "out", target=place, storage=storage)
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


def test_backbone_starts_as_itself_run_causally(folder, tmp_path):
    """Catches an injection that is not silent at the start, and anything random in it: two conversions are equal."""
    place, target = folder
    source = checkpoints.write_dflash(tmp_path / "source")
    for name in ("out", "again"):
        result = convert_drafter(source, tmp_path / name, target=place)
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


# tensors


def test_round_trips_keep_every_byte_and_every_setting(folder, tmp_path):
    """Catches a way back that casts, drops or rounds, and training settings that do not survive."""
    place, target = folder
    first = WRITERS["specforge"](tmp_path / "specforge", target)
    convert_drafter(first, tmp_path / "hub", target=place)
    convert_drafter(tmp_path / "hub", tmp_path / "back", to_format="specforge")
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
    convert_drafter(tmp_path / "back", tmp_path / "hub-again")
    names = ("model.safetensors", "config.json", "README.md", "provenance.json", "modeling_dspine.py")
    for name in names:
        assert (tmp_path / "hub" / name).read_bytes() == (tmp_path / "hub-again" / name).read_bytes(), name


def test_early_bundle_is_upgraded(folder, tmp_path):
    """Catches an upgrade that leaves old code or a config without the fields of today."""
    place, target = folder
    source = WRITERS["hub"](tmp_path / "source", target)
    convert_drafter(source, tmp_path / "out")
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
def test_community_copies_give_the_same_weights(folder, tmp_path, change):
    """Catches a rule that cuts in the wrong place, takes the wrong name, or casts to another dtype."""
    place, target = folder
    tensors = checkpoints.drafter(head_of(target))
    checkpoints.write(tmp_path / "plain", checkpoints.specforge_config(), tensors)
    checkpoints.write(tmp_path / "changed", checkpoints.specforge_config(), change(dict(tensors)))
    for name in ("plain", "changed"):
        convert_drafter(tmp_path / name, tmp_path / f"{name}-out", target=place)
    outs = [file_sha256(tmp_path / f"{name}-out" / "model.safetensors") for name in ("plain", "changed")]
    assert outs[0] == outs[1]


def test_copies_of_the_targets_tables_are_left_out_when_they_are_equal(folder, tmp_path):
    """Catches an embedding taken over from the drafter, and one dropped without a look: a random one hides a bug."""
    place, target = folder
    tensors = checkpoints.drafter(head_of(target))
    table = head_of(target).bfloat16()
    tensors |= {"embed_tokens.weight": table, "lm_head.weight": table.clone()}
    checkpoints.write(tmp_path / "source", checkpoints.specforge_config(), tensors)
    result = convert_drafter(tmp_path / "source", tmp_path / "out", target=place)
    assert sorted(note.split("`")[1] for note in result.notes) == ["embed_tokens.weight", "lm_head.weight"]
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(load_file(tmp_path / "out" / "model.safetensors"))


def test_source_is_never_modified(folder, tmp_path):
    """Catches a conversion that writes to its source: a read-only one serves too."""
    place, target = folder
    source = WRITERS["reference"](tmp_path / "source", target)
    before = {path: (file_sha256(path), path.stat().st_mtime_ns) for path in source.iterdir()}
    source.chmod(stat.S_IRUSR | stat.S_IXUSR)
    convert_drafter(source, tmp_path / "out", target=place)
    source.chmod(stat.S_IRWXU)
    assert {path: (file_sha256(path), path.stat().st_mtime_ns) for path in source.iterdir()} == before


def test_every_rule_of_the_table_is_used(folder, tmp_path):
    """Catches a rule that another one shadows."""
    from dspine_hub.conversion.rules import match

    names = ("rotary_emb.inv_freq", "model.embed_tokens.weight", "lm_head.weight", "d2t", "codes", "fc.weight")
    names += ("layers.0.self_attn.qkv_proj.weight", "layers.1.mlp.gate_up_proj.weight")
    assert {id(match(name)[0]) for name in names} == {id(rule) for rule in RULES}


# streaming


def test_stream_writes_what_the_library_writes(tmp_path):
    """Catches another order, padding or header than safetensors' own: readers elsewhere map the file."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "b.odd": torch.randn(3, 5, generator=generator).bfloat16(),
        "a": torch.randn(7, generator=generator),
        "flag": torch.tensor(True),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "ü": torch.randn(2, generator=generator).half().bfloat16(),
    }
    save_file(tensors, tmp_path / "library.safetensors", metadata={"format": "pt"})
    hashes = stream.write_weights(tmp_path, [stream.made(name, tensor) for name, tensor in tensors.items()])
    own = (tmp_path / "model.safetensors").read_bytes()
    assert own == (tmp_path / "library.safetensors").read_bytes()
    assert hashes == {"model.safetensors": file_sha256(tmp_path / "model.safetensors")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -float("nan")], ids=str)
def test_numbers_that_are_not_finite_are_found_and_extremes_are_not(tmp_path, dtype, value):
    """Catches a test on bits that misses one sign or one kind, or refuses the largest number there is."""
    largest = torch.finfo(dtype).max
    numbers = torch.tensor([0.0, -0.0, 1.0, largest, -largest, torch.finfo(dtype).tiny], dtype=dtype)
    stream.write_weights(tmp_path, [stream.made("x", numbers)])
    with pytest.raises(DSpineHubError, match="`x` must hold finite numbers, got 1 that are not"):
        stream.write_weights(tmp_path, [stream.made("x", torch.cat((numbers, torch.tensor([value], dtype=dtype))))])


def test_large_tensors_pass_in_pieces_and_large_files_in_shards(tmp_path, monkeypatch):
    """Catches a seam between two pieces, a buffer reused too early, and an index that names the wrong shard."""
    tensors = {f"t{i}": torch.randn(1000, 7, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(5)}
    save_file(tensors, tmp_path / "source.safetensors")
    monkeypatch.setattr(reading, "PIECE", 1024)
    monkeypatch.setattr(stream, "PIECE", 1024)
    stored = reading.read_file(tmp_path / "source.safetensors")
    items = [stream.Item(name, tensor.shape, tensor.dtype, tensor.pieces) for name, tensor in stored.items()]
    (tmp_path / "out").mkdir()
    hashes = stream.write_weights(tmp_path / "out", items, shard_bytes=30_000)
    assert len(hashes) == 3
    assert hashes == {name: file_sha256(tmp_path / "out" / name) for name in hashes}
    index = json.loads((tmp_path / "out" / reading.INDEX).read_text())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], tensors[name])
    assert index["metadata"]["total_size"] == 5 * 14_000
    assert torch.equal(stored["t3"].rows(10, 20).load(), tensors["t3"][10:20])


# taps


@pytest.mark.parametrize(
    ("place", "meaning", "ids"),
    [
        ("dflash_config.target_layer_ids", None, [0, 2, 4]),
        ("target_layer_ids", "output", [0, 2, 4]),
        ("target_layer_ids", "hidden_states", [1, 3, 5]),
        ("target_layer_ids", "before", [1, 3, 5]),
        ("aux_hidden_state_layer_ids", None, [1, 3, 5]),
    ],
    ids=["specforge", "output", "hidden_states", "before", "speculators"],
)
def test_tapped_states_are_those_the_ids_mean(folder, place, meaning, ids):
    """Catches ids off by one: the same states, read by forward hooks in the way each convention defines them."""
    _, target = folder
    config = {"target_layer_ids": ids}
    if place.startswith("dflash_config"):
        config = {"dflash_config": config}
    elif place != "target_layer_ids":
        config = {place: ids}
    converted = read_taps(config, meaning)
    seen, hooks = {}, []

    def enter(index, module, inputs):
        seen["in", index] = inputs[0]

    def leave(index, module, inputs, output):
        seen["out", index] = output[0] if isinstance(output, tuple) else output

    for index, layer in enumerate(target.model.layers):
        hooks.append(layer.register_forward_pre_hook(partial(enter, index)))
        hooks.append(layer.register_forward_hook(partial(leave, index)))
    with torch.no_grad(), TapRecorder(target, converted) as taps:
        states = target(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
        found = taps.take()
    for hook in hooks:
        hook.remove()
    read = {
        "output": lambda layer: seen["out", layer],
        "hidden_states": lambda layer: states[layer],
        "before": lambda layer: seen["in", layer],
    }
    usual = "before" if place.startswith("aux") else "output"
    expected = torch.cat([read[meaning or usual](layer) for layer in ids], dim=-1)
    assert torch.equal(found, expected)
    assert set(TAP_MEANINGS) == set(read)


def test_tap_ids_option_shifts_what_the_config_says(folder, tmp_path):
    """Catches an option that is read and not applied."""
    place, target = folder
    source = checkpoints.write_specforge(
        tmp_path / "source", head_of(target), dflash_config={"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}
    )
    result = convert_drafter(source, tmp_path / "out", target=place, tap_ids="before")
    assert result.config.target_layer_ids == TAPS and result.config.num_target_layers == LAYERS


def test_speculators_nested_config_is_read(folder):
    """Catches a nested config read as an empty one, with sizes from somebody's defaults."""
    _, target = folder
    flat = json.loads(json.dumps(checkpoints.specforge_config()))
    nested = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": {key: flat[key] for key in (*checkpoints.SIZES, "rope_theta")},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in TAPS],
        "mask_token_id": MASK,
        "block_size": checkpoints.BLOCK,
        "draft_vocab_size": 97,
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoints.backbone().items()}
    files = {"model.safetensors": shapes}
    assert detect(nested, files).format == "dflash"
    config, _ = read_settings(nested, "dflash", shapes, target_record(target))
    assert (config.target_layer_ids, config.block_size, config.mask_token_id) == (TAPS, checkpoints.BLOCK, MASK)
    assert (config.hidden_size, config.head_dim, config.num_target_layers) == (32, 8, LAYERS)


# loading


@pytest.mark.parametrize("kind", ["specforge", "dflash", "hub"])
@pytest.mark.parametrize("loaded", [True, False], ids=["model", "folder"])
def test_load_drafter_takes_any_format_and_converts_once(folder, tmp_path, monkeypatch, kind, loaded):
    """Catches a cache that is never hit or hit by other weights, and a drafter that comes back unbound."""
    from huggingface_hub import constants

    from dspine_hub.conversion import convert as conversion

    place, target = folder
    # the tiny target has no tokenizer to load
    monkeypatch.setattr("dspine_hub.checkpoints.loading.load_target", lambda path: (target, None))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    writer = (lambda path, target: checkpoints.write_dflash(path)) if kind == "dflash" else WRITERS[kind]
    source = writer(tmp_path / "source", target)
    # code of others must never run
    (source / "modeling_dspine.py").write_text("raise SystemExit('ran')")
    calls, real = [], conversion.convert
    monkeypatch.setattr(conversion, "convert", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    for _ in range(2):
        drafter = load_drafter(source, target=target if loaded else place)
        assert drafter.is_bound_to(target) and drafter.fc.weight.dtype == target.dtype
        assert len(block_of(drafter, target, 7)[2].tokens[0]) == drafter.config.block_size - 1
    assert len(calls) == (0 if kind == "hub" else 1)
    if kind == "specforge":
        tensors = load_file(source / "model.safetensors")
        tensors["fc.weight"] = tensors["fc.weight"] * 2
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        again = load_drafter(source, target=target)
        assert len(calls) == 2
        assert torch.equal(again.fc.weight, 2 * drafter.fc.weight)


def test_load_drafter_without_a_target_is_unbound(folder, tmp_path, monkeypatch):
    """Catches a load that needs a target where the source needs none."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    _, target = folder
    drafter = load_drafter(WRITERS["specforge"](tmp_path / "source", target))
    with pytest.raises(ValueError, match="must be called before a drafter is used"):
        drafter.bound()


def test_formats_are_read_from_one_table():
    """Catches a format offered by the command and unknown to the code, or missing from the README."""
    from dspine_hub.cli.convert import READS, WRITES

    assert ["auto", *FORMATS] == READS
    assert WRITES == [name for name, entry in FORMATS.items() if entry.writes] == ["hub", "specforge"]
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for name, entry in FORMATS.items():
        assert f"`{name}`" in readme and entry.summary in readme.replace("\n", " ")
