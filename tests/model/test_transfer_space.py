"""The transfer space: codes from a target's head, and heads that cannot give any."""

import pytest
import torch
from helpers.oracle import transfer_codes
from helpers.tiny import build_drafter


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
