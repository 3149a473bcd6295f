"""Scores of a served drafter: heads that are quantised, and heads that are split."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.kernel_inputs import FLOAT32, injection_weights, rms_norm, weights
from helpers.sglang_stand_ins import gather_shards

from dspine_hub.kernels_dspine import transition_scores_reference


class EightBitHead(torch.nn.Module):
    """A head of integers: its rows are no matrix anybody may read, only `quant_method` can apply them."""

    def __init__(self, rows):
        super().__init__()
        self.scale = rows.abs().amax(dim=1) / 127
        self.weight = torch.nn.Parameter((rows / self.scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.quant_method = self

    def apply(self, head, hidden, bias):
        return (hidden.float() @ (self.weight.float() * self.scale[:, None]).T).to(hidden.dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, FLOAT32), (torch.bfloat16, 1e-2)], ids=str)
def test_a_quantised_head_is_scored_through_its_own_method(stand_ins, monkeypatch, dtype, bound):
    """Catches integers multiplied as if they were activations, a refusal (sglang#35534), gates of another dtype."""
    monkeypatch.delitem(sys.modules, "dspine_hub.sglang_plugin.transition_cache", raising=False)
    cache = importlib.import_module("dspine_hub.sglang_plugin.transition_cache")
    space = importlib.import_module("dspine_hub.sglang_plugin.transfer_space")
    R, H, M, V = 16, 32, 8, 97
    w = {name: v.to(dtype) if torch.is_tensor(v) else v for name, v in weights(R, H, M, V).items()}
    config = SimpleNamespace(hidden_size=H, transfer_rank=R, message_size=M, num_hidden_layers=1)
    injection = space.TransferSpace(config).to(dtype)
    sources = {"readouts.0.weight": w["readout"], "writes.0.weight": w["write"], "bias": w["bias"]}
    sources |= {f"{name}.weight": w[name] for name in ("message", "receiver_gate", "predecessor_gate")}
    injection.load_state_dict(sources)
    injection.requires_grad_(False)
    norm = SimpleNamespace(weight=w["norm_weight"], variance_epsilon=w["norm_eps"])
    injection.prepare(w["codes"], norm)
    head = EightBitHead(w["head_weight"].float())
    selector = cache.TransitionCache(injection, norm, 8)
    selector.attach(head)
    hidden = torch.randn(2, 5, H, generator=torch.Generator().manual_seed(5)).to(dtype)
    anchor = torch.tensor([3, 96])
    injected = injection.inject(hidden, anchor, 0)
    normed = rms_norm(injected.hidden, w["norm_weight"], w["norm_eps"])
    unary, candidates = head.apply(head, normed[:, 1:], None).float().topk(8, dim=-1)
    rows = cache.pack_selector_rows(normed.flatten(0, 1), hidden.flatten(0, 1), injected, injection.rows_readable)
    found = selector.build_lattice(
        candidate_ids=candidates,
        unary_logits=unary,
        hidden_states=rows.view(2, 5, -1)[:, 1:],
        anchor_token_ids=anchor,
    )
    exact = head.weight.float() * head.scale[:, None]
    wide = {name: v.float() if torch.is_tensor(v) else v for name, v in w.items()}
    expected = transition_scores_reference(
        hidden[:, 1:].float(),
        candidates,
        anchor,
        wide["codes"],
        injection_weights(wide),
        wide["norm_weight"],
        w["norm_eps"],
        exact,
    )
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_gather_the_table_of_a_split_head(tmp_path, dtype):
    """Catches integers of 16 bits handed to a backend that knows none, and rows whose scale stayed on a rank."""
    torch.multiprocessing.spawn(gather_shards, (tmp_path / "store", dtype), nprocs=2)
