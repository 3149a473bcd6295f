"""Configs and arguments of an engine: what is filled in, and what cannot work."""

import json

import pytest
from helpers.paths import MINI
from helpers.serving import server_arguments, trainer_config

from dspine_hub.api import convert
from dspine_hub.configuration_dspine import DSpineConfig
from dspine_hub.errors import DSpineHubError
from dspine_hub.sglang_plugin import startup


def test_a_trainers_config_is_read():
    """Catches sizes or taps lost between two formats."""
    ours = startup.drafter_config(json.loads((MINI / "drafter" / "config.json").read_text()))
    theirs = startup.drafter_config(trainer_config())
    names = set(DSpineConfig.__dataclass_fields__) - {"target", "architectures", "transformers_version", "dtype"}
    assert {name: getattr(theirs, name) for name in names} == {name: getattr(ours, name) for name in names}


CONFIGS = {
    "sliding": ({"layer_types": ["sliding_attention"] * 3}, "`layer_types` must be 'full_attention' everywhere"),
    "bidirectional": ({"is_causal": False}, "`is_causal` must be true"),
    "no-method": ({"dspine_config": None}, "this is no DSpine drafter"),
    "two-blocks": ({"dspine_config": {"block_size": 16}}, "`block_size` must be the same wherever it is given"),
}


@pytest.mark.parametrize(("changes", "message"), CONFIGS.values(), ids=CONFIGS)
def test_attention_that_is_not_dspines_is_refused(changes, message):
    """Catches a window or a bidirectional block served as full and causal, in silence (sglang#32595)."""
    with pytest.raises(DSpineHubError, match=message):
        startup.drafter_config(trainer_config(**changes))


def test_arguments_are_filled_in(stand_ins, bundle):
    """Catches a block, a count of requests or a backend left to defaults of other algorithms."""
    arguments = server_arguments(bundle)
    startup.check_pair_of(arguments)
    startup.resolve_arguments(arguments)
    assert (arguments.speculative_num_steps, arguments.speculative_eagle_topk) == (1, 1)
    assert (arguments.speculative_num_draft_tokens, arguments.max_running_requests) == (8, 48)
    assert arguments.speculative_draft_attention_backend == "fa3"
    arguments = server_arguments(bundle, attention_backend="torch_native", speculative_num_draft_tokens=4)
    startup.resolve_arguments(arguments)
    assert arguments.speculative_draft_attention_backend == "flashinfer"
    assert arguments.speculative_num_draft_tokens == 4


ARGUMENTS = {
    "device": ({"device": "cpu"}, "`--device` must be one of"),
    "pipeline": ({"pp_size": 2}, "`--pp-size` must be 1 for DSPINE, got 2"),
    "dp-attention": ({"enable_dp_attention": True}, "`--enable-dp-attention` must be False"),
    "window": ({"speculative_draft_window_size": 4}, "must be at least the block's 8 rows, got 4"),
}


@pytest.mark.parametrize(("changes", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_cannot_work_are_refused(stand_ins, bundle, changes, message):
    with pytest.raises(DSpineHubError, match=message):
        startup.resolve_arguments(server_arguments(bundle, **changes))


def test_no_drafter_is_refused(bundle):
    with pytest.raises(DSpineHubError, match="must name the drafter for DSPINE, got nothing"):
        startup.check_pair_of(server_arguments(None))


OTHER_TARGETS = {
    "hidden-size": ({"hidden_size": 256}, "`hidden_size` of the drafter must equal the target's, got 256"),
    "layers": ({"num_target_layers": 36}, "`num_target_layers` of the drafter must equal the target's, got 36"),
    "vocabulary": ({"vocab_size": 9000}, "`vocab_size` of the drafter must equal the target's, got 9000"),
}


@pytest.mark.parametrize(("changes", "message"), OTHER_TARGETS.values(), ids=OTHER_TARGETS)
def test_a_trainers_drafter_must_fit_the_target_too(tmp_path, changes, message):
    """Catches a checkpoint in another format that reaches the engine unchecked."""
    (tmp_path / "config.json").write_text(json.dumps(trainer_config(**changes)))
    with pytest.raises(DSpineHubError, match=message):
        startup.check_pair_of(server_arguments(str(tmp_path)))


def test_a_quantised_drafter_is_refused(tmp_path):
    """Catches weights of 8 bits that an engine loads as they are, or refuses without a word about the drafter."""
    convert(MINI / "drafter", tmp_path / "fp8", quantize="fp8")
    with pytest.raises(DSpineHubError, match="Serve the bundle it was quantised from"):
        startup.check_pair_of(server_arguments(str(tmp_path / "fp8")))
