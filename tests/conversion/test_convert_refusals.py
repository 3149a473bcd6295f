"""What a conversion refuses beside a broken checkpoint: targets, heads, formats and folders."""

import json

import pytest
import torch
from helpers import checkpoints
from helpers.mutations import weights
from helpers.tiny import build_target

from dspine_hub.api import convert
from dspine_hub.errors import DSpineHubError


def other_target(tmp_path, **changes):
    model = build_target(seed=5, **changes)
    model.save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def refused(source, out, **arguments):
    with pytest.raises(DSpineHubError) as error:
        convert(source, out, **arguments)
    assert not out.exists()
    return str(error.value).replace(str(source), "SRC")


def test_a_bundle_needs_a_target(saved, tmp_path):
    """Catches a bundle that cannot be paired, and codes made of nothing."""
    _, head = saved
    source = checkpoints.write_specforge(tmp_path / "source", head)
    assert refused(source, tmp_path / "out") == (
        "`--target` must be given, got none, and the source does not record its target: a bundle without it cannot be "
        "paired. A repository like `Qwen/Qwen3-8B` will do."
    )
    source = checkpoints.write_dflash(tmp_path / "dflash")
    assert refused(source, tmp_path / "out") == (
        "`--target` must be given for the format `dflash`, got none: the codes are made of its LM head."
    )


def test_another_target_is_refused(saved, tmp_path):
    """Catches a record of a target the drafter was not trained for."""
    _, head = saved
    source = checkpoints.write_specforge(tmp_path / "source", head)
    other = other_target(tmp_path, num_hidden_layers=8)
    message = refused(source, tmp_path / "out", target=other)
    assert message == (
        "`num_target_layers` of the drafter must equal the target's, got 6 for a target with 8: give the target it "
        "was trained for with `--target`."
    )


def test_codes_and_basis_are_exchanged_with_their_own_head_only(saved, tmp_path):
    """Catches codes rebuilt from a head they were not made of: every draft would be wrong, and nothing would fail."""
    place, head = saved
    source = checkpoints.write_specforge(tmp_path / "source", head)
    other = other_target(tmp_path)
    assert "the codes were made of another head" in refused(source, tmp_path / "out", target=other, storage="basis")
    convert(source, tmp_path / "small", target=place, storage="basis")
    record = json.loads((tmp_path / "small" / "config.json").read_text())["target"]
    for storage in ("codes", None):
        message = refused(tmp_path / "small", tmp_path / "out", target=other, storage=storage)
        assert "lm_head_sha256" in message and record["lm_head_sha256"][:12] in message
    assert refused(tmp_path / "small", tmp_path / "out", storage="codes") == (
        "`--expand` needs the target's LM head, got no `--target`."
    )
    assert "--compact" in refused(source, tmp_path / "out", target=place, storage="basis", to_format="specforge")
    weights(lambda tensors: tensors["transfer_basis.mean"].add_(1e-3))(tmp_path / "small")
    message = refused(tmp_path / "small", tmp_path / "out", target=place, storage="codes")
    assert message.startswith("`transfer_basis` must have the recorded sha256") and "changed after" in message


def test_unknown_format_is_refused_with_its_keys(tmp_path):
    """Catches a drafter of another method taken for the nearest known one."""
    tensors = checkpoints.backbone() | {"layers.0.attention_conv.base_kernel": torch.zeros(2, 2, 32)}
    fields = {**checkpoints.specforge_config(), "architectures": ["DFlash2DraftModel"]}
    source = checkpoints.write(tmp_path / "source", fields, tensors)
    assert refused(source, tmp_path / "out") == (
        "`SRC` must be in a known format (hub, specforge, reference, dflash), got `model_type` 'qwen3', "
        "`architectures` ['DFlash2DraftModel'] and unknown tensors: `layers.0.attention_conv.base_kernel` [2, 2, "
        "32]. If you know better, name it with `--from`."
    )


def test_taken_folder_and_wrong_names_are_refused(saved, tmp_path):
    """Catches an overwritten folder and a format that cannot be written."""
    place, head = saved
    source = checkpoints.write_specforge(tmp_path / "source", head)
    with pytest.raises(DSpineHubError, match="`DST` must not exist yet"):
        convert(source, source, target=place)
    assert refused(source, tmp_path / "out", to_format="dflash") == (
        "`--from` must be one of ['auto', 'hub', 'specforge', 'reference', 'dflash'] and `--to` one of ['hub', "
        "'specforge'], got 'auto' and 'dflash'."
    )
    assert "must be a folder or a repository id" in refused(tmp_path / "none", tmp_path / "out")


def test_failure_while_writing_leaves_no_folder(saved, tmp_path, monkeypatch):
    """Catches a folder that looks converted and is not."""
    place, head = saved
    source = checkpoints.write_specforge(tmp_path / "source", head)

    def fail(*arguments):
        raise OSError("no space left")

    monkeypatch.setattr("dspine_hub.conversion.convert.write_weights", fail)
    with pytest.raises(OSError, match="no space left"):
        convert(source, tmp_path / "out" / "bundle", target=place)
    assert list((tmp_path / "out").iterdir()) == []
