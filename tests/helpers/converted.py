"""Checkpoints of every format for a tiny target, and what one block of them computes."""

import torch
from helpers import checkpoints
from helpers.checkpoints import MASK
from helpers.tiny import target_record

from dspine_hub.generation_dspine import TapRecorder

TEXT = [3, 1, 4, 15, 92, 65, 35]
# float32 against float64 through three layers of width 32
FLOAT32 = {"rtol": 1e-4, "atol": 1e-4}


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
