"""Tiny real models, seeded, and drafts with a chosen number of errors."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dspine_hub.configuration_dspine import DSpineConfig, head_fingerprint
from dspine_hub.modeling_dspine import DSpineDraft, DSpineForSpeculation

torch.set_num_threads(1)

TARGET_SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}

DRAFTER_SIZES = {
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "block_size": 5,
    "target_layer_ids": [0, 2, 4],
    "transfer_rank": 16,
    "message_size": 8,
    "num_candidates": 8,
    "initializer_range": 0.2,
}


def config_fields(**overrides) -> dict:
    """Fields of a valid drafter config for the default target."""
    target = {"vocab_size": 97, "hidden_size": 32, "num_target_layers": 6, "mask_token_id": 96}
    return {**target, **DRAFTER_SIZES, **overrides}


def build_target(seed: int = 0, **overrides) -> Qwen3ForCausalLM:
    """Build a random target whose logits vary: the usual initialisation would make every arg-max a tie."""
    torch.manual_seed(seed)
    fields = {**TARGET_SIZES, "initializer_range": 0.3, "tie_word_embeddings": True, "rope_theta": 10000.0}
    fields.update({"bos_token_id": None, "eos_token_id": None, "pad_token_id": None})
    return Qwen3ForCausalLM(Qwen3Config(**{**fields, **overrides})).eval()


def build_drafter(target, seed: int = 1, ready: bool = True, bind: bool = True, writes: bool = True, **overrides):
    """Build a random drafter for `target`; `writes=False` leaves the injection as initialised (silent)."""
    text = target.config
    fields = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "num_target_layers": text.num_hidden_layers,
        "mask_token_id": text.vocab_size - 1,
        **overrides,
    }
    torch.manual_seed(seed)
    drafter = DSpineForSpeculation(DSpineConfig(**config_fields(**fields))).eval()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
        if ready:
            drafter.initialize_transfer_space(target.get_output_embeddings().weight)
        if writes:
            for write in drafter.injection.writes:
                write.weight.normal_(std=0.4)
            drafter.injection.predecessor_gate.weight.normal_(std=0.3)
            drafter.injection.bias.normal_(std=0.3)
    return drafter.bind(target) if ready and bind else drafter


def target_record(target, **overrides) -> dict:
    """The `target` entry of a config, for this very target."""
    text = target.config
    record = {
        "id": "lab/Tiny",
        "revision": "0" * 40,
        "hidden_size": text.hidden_size,
        "num_hidden_layers": text.num_hidden_layers,
        "vocab_size": text.vocab_size,
        "padded_vocab_size": text.vocab_size,
        "tokenizer_sha256": None,
        "lm_head_sha256": head_fingerprint(target.get_output_embeddings().weight),
        "chat_template_sha256": None,
        "enable_thinking": False,
    }
    return {**record, **overrides}


class ScriptedDraft:
    """Stand in for `drafter.draft`: the real pass runs, so caches live, but a policy chooses the drafts.

    The committed text is rebuilt from the context rows of every call alone, so a loop that hands over one row
    too many or too few is caught here. `policy(text, temperature)` returns tokens `[S]`, candidates `[S, K]` and q
    `[S, K]`, for the text whose last token is the anchor.
    """

    def __init__(self, drafter, policy, prompt: list[int], run_real: bool = True):
        self.real = drafter.draft if run_real else None
        self.policy, self.text, self.block, self.calls = policy, [], list(prompt), 0

    def __call__(self, context, anchor, temperature=0.0, generator=None, cache=None):
        rows = context.shape[1]
        assert rows <= len(self.block), f"{rows} context rows for a block of {len(self.block)}"
        assert self.calls or rows == len(self.block), "the first call must bring the whole prompt"
        self.text += self.block[:rows]
        self.calls += 1
        if self.real is not None:
            self.real(context, anchor, temperature, generator, cache)
            assert cache.get_seq_length() == len(self.text), "the context cache must hold the committed text"
        tokens, candidates, q = self.policy([*self.text, int(anchor)], temperature)
        self.block = [int(anchor), *tokens.tolist()]
        scores = torch.zeros(1, *candidates.shape, candidates.shape[-1])
        return DSpineDraft(tokens=tokens[None], candidates=candidates[None], q=q[None], scores=scores)


def drafts_with_errors(reference: list[int], right: list[int], slots: int, vocabulary: int, width: int = 4):
    """Make a greedy policy that drafts `reference`, wrong first after `right[i]` drafts in round `i` (cycled)."""
    state = {"round": 0}

    def policy(text, temperature):
        assert text == reference[: len(text)], "the committed text left the target's own greedy text"
        tokens = torch.tensor(reference[len(text) : len(text) + slots])
        assert len(tokens) == slots, "the reference must outlast the request by a block"
        count = right[state["round"] % len(right)]
        state["round"] += 1
        if count < slots:
            tokens[count] = (tokens[count] + 1) % vocabulary
        candidates = (tokens[:, None] + torch.arange(width)) % vocabulary
        q = torch.zeros(slots, width)
        q[:, 0] = 1
        return tokens, candidates, q

    return policy


@pytest.fixture(scope="session")
def target():
    return build_target()


@pytest.fixture
def make_target():
    return build_target


@pytest.fixture
def make_drafter(target):
    """Return `make(target=..., **overrides)`; the default target is the session's."""

    def make(target=target, **overrides):
        return build_drafter(target, **overrides)

    return make


@pytest.fixture
def drafter(make_drafter):
    return make_drafter()


@pytest.fixture
def taps(target):
    """Return `taps(ids, drafter)`: tapped states `[1, n, T * H]`, read through `hidden_states`, not through hooks."""

    @torch.no_grad()
    def read(ids, drafter, target=target):
        states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer + 1] for layer in drafter.config.target_layer_ids], dim=-1)

    return read


@pytest.fixture
def script(monkeypatch):
    """Return `script(drafter, policy, prompt)`, which replaces `drafter.draft` for one test."""

    def install(drafter, policy, prompt, run_real=True):
        scripted = ScriptedDraft(drafter, policy, prompt, run_real)
        monkeypatch.setattr(drafter, "draft", scripted, raising=False)
        return scripted

    return install
