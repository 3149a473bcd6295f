"""Configs and arguments as trainers and SGLang hand them to the plugin."""

import json
from types import SimpleNamespace

from helpers.paths import MINI


def trainer_config(**changes):
    """The mini drafter's config as the public trainer writes one."""
    raw = json.loads((MINI / "drafter" / "config.json").read_text())
    method = {"transfer_rank": raw.pop("transfer_rank"), "message_size": raw.pop("message_size"), "ce_weight": 0.1}
    method["top_k"] = raw.pop("num_candidates")
    block = {name: raw.pop(name) for name in ("target_layer_ids", "mask_token_id")}
    for name in ("target", "transfer_storage"):
        raw.pop(name)
    raw |= {"model_type": "qwen3", "architectures": ["DSpineDraftModel"]}
    return {**raw, "dflash_config": block, "dspine_config": method, **changes}


def server_arguments(bundle, **changes):
    arguments = {"model_path": str(MINI / "target"), "revision": None, "speculative_draft_model_path": bundle}
    arguments |= {"speculative_draft_model_revision": None, "device": "cuda", "pp_size": 1}
    arguments |= {"enable_dp_attention": False, "speculative_num_draft_tokens": None, "max_running_requests": None}
    arguments |= {"speculative_draft_window_size": None, "speculative_draft_attention_backend": None}
    return SimpleNamespace(**{**arguments, "attention_backend": "fa3", **changes})
