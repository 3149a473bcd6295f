"""A load accounts for every tensor of a checkpoint."""

import pytest
import torch
from helpers.tiny import build_drafter

from dspine_hub.checkpoints.expected import expected_tensors
from dspine_hub.sglang_plugin.target_head import rebuild_codes
from dspine_hub.sglang_plugin.tensors import TensorAccount


@pytest.mark.parametrize("changes", [{}, {"transfer_storage": "basis"}, {"attention_bias": True}], ids=str)
def test_expected_tensors_are_the_models_own(target, changes):
    """Catches a list that drifts from the model: a load would then refuse every checkpoint."""
    drafter = build_drafter(target, **changes)
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert expected_tensors(drafter.config) == expected


def test_a_load_accounts_for_every_tensor():
    """Catches a tensor that is dropped, missing, doubled or of another shape without a word."""
    account = TensorAccount({"norm.weight": (4,), "injection.bias": (2,)})
    assert account.take("model.norm.weight", torch.zeros(4)) == "norm.weight"
    with pytest.raises(ValueError, match="`norm.weight` must be stored once"):
        account.take("norm.weight", torch.zeros(4))
    with pytest.raises(ValueError, match=r"`codebook` \[3\] is no tensor of a drafter"):
        account.take("codebook", torch.zeros(3))
    with pytest.raises(ValueError, match=r"`injection.bias` must have shape \[2\], got \[3\]"):
        account.take("injection.bias", torch.zeros(3))
    with pytest.raises(ValueError, match=r"must hold `injection.bias` \[2\], got none"):
        account.close()
    account.take("injection.bias", torch.zeros(2))
    account.close()


@pytest.mark.parametrize("tied", [True, False])
def test_codes_of_a_compact_checkpoint_come_from_the_targets_files(make_target, tmp_path, tied):
    """Catches codes made of the embedding where the head is another matrix."""
    target = make_target(tie_word_embeddings=tied)
    target.save_pretrained(tmp_path)
    drafter = build_drafter(target, transfer_storage="basis")
    basis = {name: getattr(drafter.transfer_basis, name) for name in ("mean", "directions", "eigenvalues")}
    assert torch.equal(rebuild_codes(str(tmp_path), None, basis, torch.device("cpu")), drafter.transfer_codes)
