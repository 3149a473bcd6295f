"""Every public mistake in a checkpoint ends in one message that names it, and in no folder."""

import pytest
import torch
from helpers import checkpoints
from helpers.mutations import (
    add_head,
    config,
    cut,
    lose,
    misplace,
    nest,
    pickle,
    poison,
    shorten,
    tie,
    transpose,
    twice,
    weights,
)

from dspine_hub.api import convert
from dspine_hub.errors import DSpineHubError

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
NO_TAPS = (
    "`target_layer_ids` must be given, in one of `dflash_config.target_layer_ids`, `target_layer_ids`, "
    "`aux_hidden_state_layer_ids`, `dflash_config.aux_hidden_state_layer_ids`, `eagle_aux_hidden_state_layer_ids`, "
    "got none: which layers were tapped is a choice made in training, and never guessed."
)
RULE = "the drafter's config breaks a rule: "

# mutation of SpecForge's export -> the whole message
MUTATIONS = {
    "dropped-key": (
        weights(lambda tensors: tensors.pop("injection.writes.1.weight")),
        "every tensor must be there, got 1 missing: `injection.writes.1.weight` [32, 8].",
    ),
    "extra-key": (
        weights(lambda tensors: tensors.update({"markov_head.weight": torch.zeros(97, 4)})),
        "every tensor must belong to the format, got 1 unknown: `markov_head.weight` [97, 4]. If the "
        "drafter needs them it is of another method; `dspine-hub inspect` shows what it looks like.",
    ),
    "transposed-weight": (
        weights(transpose),
        "`fc.weight` must have shape [32, 96], got [96, 32]: it is transposed.",
    ),
    "missing-codes": (
        weights(lambda tensors: tensors.pop("transfer_codes")),
        "`transfer_codes` must be stored, or `codes` in a file of its own, got neither: eigenvectors have "
        "no fixed sign, so the table cannot be made again from the target. Ask whoever trained it for the "
        "file.",
    ),
    "missing-ready": (
        weights(lambda tensors: tensors.pop("transfer_ready")),
        "every tensor must be there, got 1 missing: `transfer_ready` [].",
    ),
    "codes-of-another-vocabulary": (
        weights(shorten),
        "`transfer_codes` must have shape [vocabulary, rank] = [97, 16], got [90, 16]: codes of another "
        "vocabulary or rank belong to another drafter.",
    ),
    "nan": (
        weights(poison),
        "`fc.weight` must hold finite numbers, got 1 that are not: the source is damaged, or was saved "
        "after its training diverged.",
    ),
    "never-trained": (
        weights(lambda tensors: tensors.update(transfer_ready=torch.tensor(False))),
        "`transfer_ready` must be true, got false: this drafter was never trained.",
    ),
    "quantised": (
        weights(lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 96, dtype=torch.int8)})),
        "`fc.weight` must be stored as F32 or F16 or BF16, got I8: a quantised source is not converted; "
        "start from its unquantised weights.",
    ),
    "taps-absent": (
        config(dflash_config__target_layer_ids=None),
        NO_TAPS,
    ),
    "taps-unsorted": (
        config(dflash_config__target_layer_ids=[2, 0, 4]),
        RULE + "`target_layer_ids` must be sorted and unique and name at least one layer, got [2, 0, 4].",
    ),
    "taps-duplicated": (
        config(dflash_config__target_layer_ids=[0, 2, 2]),
        RULE + "`target_layer_ids` must be sorted and unique and name at least one layer, got [0, 2, 2].",
    ),
    "taps-negative": (
        config(dflash_config__target_layer_ids=[-1, 2, 4]),
        RULE + "`target_layer_ids` must lie in [0, 5), got [-1, 2, 4].",
    ),
    "taps-last-layer": (
        config(dflash_config__target_layer_ids=[0, 2, 5]),
        RULE + "`target_layer_ids` must not tap the last layer (5): its entry in `hidden_states` is already "
        "normed, got [0, 2, 5].",
    ),
    "taps-out-of-range": (
        config(dflash_config__target_layer_ids=[0, 2, 9]),
        RULE + "`target_layer_ids` must lie in [0, 5), got [0, 2, 9].",
    ),
    "taps-too-few": (
        config(dflash_config__target_layer_ids=[0, 2]),
        "`fc.weight` must have shape [32, 64], got [32, 96]: it reads 3 tapped layers, and "
        "`target_layer_ids` names 2.",
    ),
    "taps-not-numbers": (
        config(dflash_config__target_layer_ids=["0", "2", "4"]),
        "`dflash_config.target_layer_ids` must be a list of layer numbers, got ['0', '2', '4'].",
    ),
    "taps-disagree": (
        config(aux_hidden_state_layer_ids=[0, 2, 4]),
        "`target_layer_ids` must be the same wherever it is given, got [0, 2, 4] from "
        "`dflash_config.target_layer_ids`, [-1, 1, 3] from `aux_hidden_state_layer_ids`.",
    ),
    "mask-missing": (
        config(dflash_config__mask_token_id=None),
        "`mask_token_id` must be given, in `dflash_config.mask_token_id` or `mask_token_id`, got none: it "
        "is a choice made in training, and never guessed.",
    ),
    "mask-is-eos": (
        config(dflash_config__mask_token_id=90),
        "`mask_token_id` must not be a token in use, got 90, the config's `eos_token_id`.",
    ),
    "mask-is-one-of-eos": (
        config(eos_token_id=[5, 96]),
        "`mask_token_id` must not be a token in use, got 96, the config's `eos_token_id`.",
    ),
    "mask-is-pad": (
        config(pad_token_id=96),
        "`mask_token_id` must not be a token in use, got 96, the config's `pad_token_id`.",
    ),
    "mask-out-of-range": (
        config(dflash_config__mask_token_id=97),
        RULE + "`mask_token_id` must lie in [0, 97), got 97.",
    ),
    "rope-missing": (
        config(rope_theta=None),
        RULE + "`rope_parameters` must give `rope_theta` (or the config a top-level `rope_theta`), got neither: a "
        "guessed base silently ruins acceptance.",
    ),
    "rope-missing-in-the-new-style": (
        config(rope_theta=None, rope_parameters={"rope_type": "default"}),
        RULE + "`rope_parameters` must give `rope_theta` (or the config a top-level `rope_theta`), got neither: a "
        "guessed base silently ruins acceptance.",
    ),
    "rope-given-twice": (
        config(rope_parameters={**ROPE, "rope_theta": 5e5}),
        "`rope_theta` must be the same wherever it is given, got 500000.0 from "
        "`rope_parameters.rope_theta`, 10000.0 from `rope_theta`.",
    ),
    "rope-partial-new": (
        config(rope_theta=None, rope_parameters={**ROPE, "partial_rotary_factor": 0.25}),
        RULE + "`partial_rotary_factor` must be 1 or absent, got 0.25: a drafter rotates its full head dim; the "
        "value belongs to the target's config.",
    ),
    "rope-partial-old": (
        config(partial_rotary_factor=0.25),
        RULE + "`partial_rotary_factor` must be 1 or absent, got 0.25: a drafter rotates its full head dim; the "
        "value belongs to the target's config.",
    ),
    "rope-of-a-multimodal-target": (
        config(rope_scaling={"mrope_section": [24, 20, 20], "rope_type": "default"}),
        RULE + "`rope_parameters` must be plain RoPE, got the M-RoPE parameters {'mrope_section': [24, 20, 20], "
        "'rope_type': 'default'}: they belong to a multimodal target; a drafter sees text positions only.",
    ),
    "rope-scaled": (
        config(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        RULE + "`rope_parameters` must be plain RoPE (`rope_type` 'default' and `rope_theta`), got 'yarn' with "
        "{'factor': 4.0}: scaled or per-layer RoPE is not supported.",
    ),
    "tied-with-separate-head": (
        tie,
        "`tie_word_embeddings` must be false beside a stored `lm_head.weight`, got true and [97, 32]: the "
        "flag was copied from the target, and which of the two was used in training cannot be told.",
    ),
    "head-without-target": (
        weights(add_head),
        "`lm_head.weight` [97, 32] must equal the target's head, and cannot be compared without it: give `--target`.",
    ),
    "head-of-its-own": (
        weights(add_head),
        "`lm_head.weight` [97, 32] must equal the target's head, got other values: the LM head is the target's, and a "
        "drafter that was trained with another would be used wrongly.",
    ),
    "sample-from-anchor": (
        config(sample_from_anchor=True),
        "`sample_from_anchor` must be absent or False, got True: it changes what the weights compute, and DSpine has "
        "no such part.",
    ),
    "block-in-three-places": (
        config(dflash_config__block_size=4, dspine_config__block_size=8),
        "`block_size` must be the same wherever it is given, got 5 from `block_size`, 4 from "
        "`dflash_config.block_size`, 8 from `dspine_config.block_size`.",
    ),
    "block-missing": (
        config(block_size=None, dflash_config__block_size=None),
        RULE + "`block_size` must be set: a drafter's layout is never guessed, got no value.",
    ),
    "rank-disagrees": (
        config(dspine_config__transfer_rank=8),
        "`transfer_rank` must be 16, the rows of `injection.readouts.0.weight`, got 8.",
    ),
    "nested-config": (
        nest,
        "`config.json` must hold its fields at the top in the format `specforge`, got them nested under "
        "`config`, as the reference layout has them: move them up, or pass `--from reference`.",
    ),
    "truncated-shard": (
        cut,
        "`SRC/model-00002-of-00002.safetensors` must be a complete safetensors file, got one that cannot "
        "be read (Error while deserializing header: incomplete metadata, file not fully covered). It may "
        "be cut off: copy or download it again.",
    ),
    "index-names-a-missing-file": (
        lose,
        "`model.safetensors.index.json` of `SRC` must name files that exist, got "
        "`model-00002-of-00002.safetensors`, which is missing: download it again.",
    ),
    "index-names-the-wrong-shard": (
        misplace,
        "`model-00002-of-00002.safetensors` of `SRC` must hold `fc.weight`, as "
        "`model.safetensors.index.json` says; it does not.",
    ),
    "stored-twice": (
        twice,
        "`fc.weight` must be stored once, got it in `model.safetensors` and `more.safetensors`.",
    ),
    "pickled": (
        pickle,
        "`SRC` must hold safetensors weights, got pickles (pytorch_model.bin), which run code when loaded.",
    ),
    "no-config": (
        lambda folder: (folder / "config.json").unlink(),
        "`SRC` must hold a `config.json`, got none.",
    ),
    "broken-config": (
        lambda folder: (folder / "config.json").write_text("{"),
        "`SRC/config.json` must be valid JSON: Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1).",
    ),
    "config-is-a-list": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "`SRC/config.json` must be a JSON object, got list.",
    ),
    "sliding-layers": (
        config(layer_types=["full_attention", "full_attention", "sliding_attention"]),
        "`layer_types` must be 'full_attention' everywhere, got ['sliding_attention']: context rows "
        "outside a window would have to be forgotten, which neither the cache nor the kernels do yet.",
    ),
    "sliding-by-flag": (
        config(layer_types=None, use_sliding_window=True),
        "`layer_types` must be 'full_attention' everywhere, got `use_sliding_window`: context rows outside "
        "a window would have to be forgotten, which neither the cache nor the kernels do yet.",
    ),
    "bidirectional": (
        config(is_causal=False),
        RULE + "`is_causal` must be true, got False: DSpine attends causally inside a block; a bidirectional "
        "drafter is another method.",
    ),
    "softcapped": (
        config(final_logit_softcapping=30.0),
        "`final_logit_softcapping` must be absent or 0, got 30.0: it changes what the weights compute, and "
        "DSpine has no such part.",
    ),
    "draft-vocabulary": (
        config(draft_vocab_size=64),
        "`draft_vocab_size` must equal `vocab_size` 97, got 64: candidates are scored with the target's own LM head.",
    ),
    "quantisation-config": (
        config(quantization_config={"quant_method": "fp8"}),
        "`quantization_config` must be absent, got {'quant_method': 'fp8'}: it changes what the weights "
        "compute, and DSpine has no such part.",
    ),
    "heads-of-its-own-vocabulary": (
        weights(lambda tensors: tensors.update({"d2t": torch.ones(97, dtype=torch.int64)})),
        "`d2t` [97] must map every token to itself, got other values: a drafter has the target's whole "
        "vocabulary, and a drafter that was trained with another would be used wrongly.",
    ),
    "given-twice": (
        weights(lambda tensors: tensors.update({"model.fc.weight": tensors["fc.weight"].clone()})),
        "`fc.weight` must be given once, got it from `fc.weight` and `model.fc.weight`.",
    ),
    "fused-of-another-size": (
        weights(lambda tensors: tensors.update({"layers.0.mlp.gate_up_proj.weight": torch.zeros(70, 32)})),
        "`layers.0.mlp.gate_up_proj.weight` must have shape [80, 32], got [70, 32].",
    ),
}


@pytest.mark.parametrize(("change", "message"), MUTATIONS.values(), ids=MUTATIONS)
def test_mutation_is_refused_with_its_message(saved, tmp_path, change, message):
    """Catches a mistake that converts silently, an error that names something else, and a half-written folder."""
    place, head = saved
    source = checkpoints.write_specforge(tmp_path / "source", head)
    change(source)
    before = {path: path.read_bytes() for path in source.iterdir()}
    given = None if "give `--target`" in message else place
    with pytest.raises(DSpineHubError) as error:
        convert(source, tmp_path / "out" / "bundle", target=given)
    assert str(error.value).replace(str(source), "SRC") == message
    assert {path: path.read_bytes() for path in source.iterdir()} == before
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_every_mutation_of_the_list_is_there():
    """Catches a case that got lost from the table."""
    wanted = "dropped-key extra-key transposed-weight missing-codes codes-of-another-vocabulary nan taps-absent "
    wanted += "taps-unsorted taps-duplicated taps-negative taps-last-layer mask-missing mask-is-eos rope-missing "
    wanted += "rope-missing-in-the-new-style rope-partial-new rope-partial-old tied-with-separate-head "
    wanted += "block-in-three-places nested-config truncated-shard index-names-a-missing-file"
    assert set(wanted.split()) <= set(MUTATIONS)
    messages = [message for _, message in MUTATIONS.values()]
    # two ways to the same mistake say the same
    assert len(set(messages)) >= len(messages) - 3


def test_the_unmutated_checkpoint_is_converted(saved, tmp_path):
    """Catches a table in which everything fails for another reason."""
    place, head = saved
    convert(checkpoints.write_specforge(tmp_path / "source", head), tmp_path / "out", target=place)
