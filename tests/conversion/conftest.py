"""A target on disk whose head the checkpoints of this room were made for."""

import pytest
from helpers.tiny import build_target


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The target's folder and its head, in float32."""
    model, place = build_target(), tmp_path_factory.mktemp("target")
    model.save_pretrained(place)
    return place, model.get_output_embeddings().weight.detach()
