"""SGLang stood in for, in this process and in one of two ranks."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.kernel_inputs import weights

from dspine_hub.kernels_dspine.transfer_tables import head_message_table


def stand_in_modules(monkeypatch):
    """Stand in for the few names of SGLang that the modules under test import."""

    def module(name, **names):
        stand_in = ModuleType(name)
        vars(stand_in).update(names)
        monkeypatch.setitem(sys.modules, name, stand_in)

    for name in ("sglang", "sglang.srt", "sglang.srt.distributed", "sglang.srt.layers"):
        module(name)
    module("sglang.srt.distributed.communication_op", tensor_model_parallel_all_gather=None)
    module("sglang.srt.layers.logits_processor", should_apply_lm_head_quant_method=lambda head, method: bool(method))
    module("sglang.srt.runtime_context", get_parallel=lambda: SimpleNamespace(tp_size=1))
    module("sglang.srt.server_args", DRAFT_ATTENTION_BACKEND_CHOICES=["flashinfer", "fa3", "triton"])
    return module


def gather_shards(rank, place, dtype):
    """One of two ranks: gather the table of a split head, and compare it with that of the whole one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as monkeypatch:
        stand_in = stand_in_modules(monkeypatch)

        def gather(shard, dim):
            parts = [torch.empty_like(shard), torch.empty_like(shard)]
            torch.distributed.all_gather(parts, shard)
            return torch.cat(parts, dim=dim)

        stand_in("sglang.srt.distributed.communication_op", tensor_model_parallel_all_gather=gather)
        stand_in("sglang.srt.runtime_context", get_parallel=lambda: SimpleNamespace(tp_size=2))
        cache = importlib.import_module("dspine_hub.sglang_plugin.transition_cache")
        w = {name: v.to(dtype) if torch.is_tensor(v) else v for name, v in weights(16, 32, 8, 64).items()}
        head, found = SimpleNamespace(weight=w["head_weight"].chunk(2)[rank]), []
        space = SimpleNamespace(
            writes=[SimpleNamespace(weight=w["write"])], attach_head=lambda messages, weight: found.append(messages)
        )
        cache.TransitionCache(space, SimpleNamespace(weight=w["norm_weight"]), 8).attach(head)
    expected = head_message_table(w["head_weight"], w["write"], w["norm_weight"])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found[0], expected, strict=True))
    torch.distributed.destroy_process_group()
