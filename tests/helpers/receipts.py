"""A valid receipt, and changes to it."""

import copy

RECEIPT = {
    "schema_version": 1,
    "engine": {"name": "transformers", "version": "5.24.0", "commit": None},
    "hardware": {"gpu": "NVIDIA H200", "gpu_count": 1, "cpu": None},
    "decoding": {
        "dtype": "bfloat16",
        "attention_backend": "sdpa",
        "block": 4,
        "temperature": 0.0,
        "top_p": None,
        "top_k": None,
        "enable_thinking": False,
        "chat_template_sha256": "c" * 64,
        "max_new_tokens": 256,
        "concurrency": 1,
        "prefill_included": False,
    },
    "suite": {"name": "gsm8k", "dataset": "openai/gsm8k", "revision": "e53f048", "n": 128, "seed": 0},
    "acceptance": {
        "tau_per_request": 2.51,
        "tau_token_weighted": 2.62,
        "tau_pooled": 2.5678,
        "per_slot": [0.81, 0.72, None],
        "rounds": 1000,
        "tokens": 2600,
    },
    "speed": {"tokens_per_second": 90.04, "baseline_tokens_per_second": 45.02},
    "greedy_match": {"equal": 127, "prompts": 128},
    "target": {"id": "Org/Target", "revision": "abc1234"},
    "drafter": {"id": "org/target-dspine", "revision": None, "weights_sha256": "d" * 64},
    "simulated_acceptance": False,
    "versions": {"torch": "2.11.0"},
    "dspine_hub_commit": "bbc7606",
    "date": "2026-11-30",
    "command": "dspine-hub benchmark",
}


def build_receipt(changes=()):
    """Return the valid receipt with `{"a.b": value}` applied; the value `...` removes the key."""
    receipt = copy.deepcopy(RECEIPT)
    for key, value in dict(changes).items():
        *parents, last = key.split(".")
        place = receipt
        for parent in parents:
            place = place[parent]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return receipt


SAMPLED = {"decoding.temperature": 0.6, "decoding.top_p": 0.95, "decoding.top_k": 20, "greedy_match": None}
