"""Blocks of a drafter as tests run them, alone or packed."""

import pytest
import torch
from helpers.oracle import Oracle

TEXT = [3, 1, 4, 15, 92, 65, 35, 89, 79, 32, 38]

# float32 against float64 through three layers of width 32: a few hundred roundings of values below 10
FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}

# drafter shapes: the default, one slot, one layer, odd sizes, rank = hidden, biases
SHAPES = [
    pytest.param({}, id="default"),
    pytest.param({"block_size": 2, "num_candidates": 1}, id="one-slot,K=1"),
    pytest.param({"num_hidden_layers": 1, "target_layer_ids": [3]}, id="one-layer,one-tap"),
    pytest.param({"block_size": 4, "transfer_rank": 13, "message_size": 3, "num_candidates": 5}, id="odd"),
    pytest.param({"transfer_rank": 32, "message_size": 33, "num_candidates": 97}, id="R=H,K=V"),
    pytest.param({"attention_bias": True, "num_key_value_heads": 4, "rope_theta": 1e6}, id="bias,no-GQA"),
]


def noise(drafter, anchor):
    """Embed `[anchor, mask, ...]`, `[B, N, H]`."""
    anchor = torch.tensor([anchor]) if isinstance(anchor, int) else anchor
    ids = torch.full((len(anchor), drafter.config.block_size), drafter.config.mask_token_id)
    ids[:, 0] = anchor
    return drafter.bound().embedding(ids)


def oracle_of(drafter):
    bound = drafter.bound()
    return Oracle(drafter, bound.embedding.weight, bound.head.weight)


def block_mask(starts, seen, context, size):
    """Mask of packed blocks `[1, 1, Q, context + Q]`: each sees `seen[i]` context rows and itself, causally."""
    rows = len(starts) * size
    mask = torch.zeros(rows, context + rows, dtype=torch.bool)
    for block, rows_seen in enumerate(seen):
        for j in range(size):
            row = block * size + j
            mask[row, :rows_seen] = True
            mask[row, context + block * size : context + row + 1] = True
    return mask[None, None]


def run_packed(drafter, context, anchors, starts, embeds=None, output_features=False, **teaching):
    """Run blocks anchored at positions `starts` in one pass over `context` `[1, n, T * H]`."""
    size = drafter.config.block_size
    if embeds is None:
        embeds = torch.cat([noise(drafter, anchor) for anchor in anchors], dim=1)
    n = context.shape[1]
    positions = [*range(n)] + [start + j for start in starts for j in range(size)]
    return drafter.run_blocks(
        embeds,
        context,
        torch.tensor([positions]),
        block_mask(starts, starts, n, size),
        drafter.injection.from_weights(drafter.transfer_codes[torch.tensor(anchors)], **teaching),
        output_features=output_features,
    )
