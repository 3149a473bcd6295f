"""Which layers were tapped, in the dialects of four formats."""

import json
from functools import partial

import pytest
import torch
from helpers import checkpoints
from helpers.checkpoints import LAYERS, MASK, TAPS
from helpers.converted import TEXT, head_of
from helpers.tiny import target_record

from dspine_hub.api import convert
from dspine_hub.checkpoints.formats import TAP_MEANINGS
from dspine_hub.checkpoints.settings import read_settings, read_taps
from dspine_hub.conversion.detect import detect
from dspine_hub.generation_dspine import TapRecorder


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
def test_tapped_states_are_those_the_ids_mean(saved_target, place, meaning, ids):
    """Catches ids off by one: the same states, read by forward hooks in the way each convention defines them."""
    _, target = saved_target
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


def test_tap_ids_option_shifts_what_the_config_says(saved_target, tmp_path):
    """Catches an option that is read and not applied."""
    place, target = saved_target
    source = checkpoints.write_specforge(
        tmp_path / "source", head_of(target), dflash_config={"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}
    )
    result = convert(source, tmp_path / "out", target=place, tap_ids="before")
    assert result.config.target_layer_ids == TAPS and result.config.num_target_layers == LAYERS


def test_speculators_nested_config_is_read(saved_target):
    """Catches a nested config read as an empty one, with sizes from somebody's defaults."""
    _, target = saved_target
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
