"""`load` takes any format, converts once, and binds where it is given a target."""

import pytest
import torch
from helpers import checkpoints
from helpers.converted import WRITERS, block_of
from safetensors.torch import load_file, save_file

from dspine_hub.api import load


@pytest.mark.parametrize("kind", ["specforge", "dflash", "hub"])
@pytest.mark.parametrize("loaded", [True, False], ids=["model", "folder"])
def test_load_drafter_takes_any_format_and_converts_once(saved_target, tmp_path, monkeypatch, kind, loaded):
    """Catches a cache that is never hit or hit by other weights, and a drafter that comes back unbound."""
    from huggingface_hub import constants

    from dspine_hub.conversion import convert as conversion

    place, target = saved_target
    # the tiny target has no tokenizer to load
    monkeypatch.setattr("dspine_hub.checkpoints.loading.load_target", lambda path: (target, None))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    writer = (lambda path, target: checkpoints.write_dflash(path)) if kind == "dflash" else WRITERS[kind]
    source = writer(tmp_path / "source", target)
    # code of others must never run
    (source / "modeling_dspine.py").write_text("raise SystemExit('ran')")
    calls, real = [], conversion.write_converted
    monkeypatch.setattr(
        conversion, "write_converted", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs)
    )
    for _ in range(2):
        drafter = load(source, target=target if loaded else place)
        assert drafter.is_bound_to(target) and drafter.fc.weight.dtype == target.dtype
        assert len(block_of(drafter, target, 7)[2].tokens[0]) == drafter.config.block_size - 1
    assert len(calls) == (0 if kind == "hub" else 1)
    if kind == "specforge":
        tensors = load_file(source / "model.safetensors")
        tensors["fc.weight"] = tensors["fc.weight"] * 2
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        again = load(source, target=target)
        assert len(calls) == 2
        assert torch.equal(again.fc.weight, 2 * drafter.fc.weight)


def test_load_drafter_without_a_target_is_unbound(saved_target, tmp_path, monkeypatch):
    """Catches a load that needs a target where the source needs none."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    _, target = saved_target
    drafter = load(WRITERS["specforge"](tmp_path / "source", target))
    with pytest.raises(ValueError, match="must be called before a drafter is used"):
        drafter.bound()
