"""The cache of context rows: it grows and is cropped by rows, and drafts as if there were none."""

import pytest
import torch

from dspine_hub.modeling_dspine import DSpineContextCache


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
