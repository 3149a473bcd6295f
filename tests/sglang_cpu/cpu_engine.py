"""What the DFLASH worker of SGLang needs to run on a CPU: patches of SGLang, for tests only.

A plugin of SGLang itself, so that every process of an engine has them. With `DSPINE_DUMP` set to a folder, the first
drafts of a process are written there for comparison.
"""

import copy
import itertools
import os
from pathlib import Path

import torch


def apply():
    """Patch the SGLang of this process."""
    from sglang.version import __version__

    _run_streams_on_the_cpu()
    _judge_blocks_in_torch_native()
    _allow_the_device()
    if os.environ.get("DSPINE_DUMP"):
        _dump_drafts(Path(os.environ["DSPINE_DUMP"]))
    if os.environ.get("TRITON_INTERPRET") == "1":
        # interpreted are SGLang's kernels; ours have tests of their own
        from dspine_hub.kernels import adjacent_injection, candidate_walk, transition_scores  # noqa: F401
        from dspine_hub.kernels import triton_support

        triton_support.triton = None
    assert __version__


def _run_streams_on_the_cpu():
    record = torch.Tensor.record_stream
    torch.Tensor.record_stream = lambda self, stream: None if self.device.type == "cpu" else record(self, stream)


def _judge_blocks_in_torch_native():
    """Give the torch backend the mode in which a block is verified: each row sees the text and the rows before it."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models import dflash

    if "torch_native" not in server_args.DRAFT_ATTENTION_BACKEND_CHOICES:
        server_args.DRAFT_ATTENTION_BACKEND_CHOICES.append("torch_native")

    @register_attention_backend("torch_native")
    def make(runner):
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        class Backend(TorchNativeAttnBackend):
            def forward_extend(self, q, k, v, layer, forward_batch, *args, **kwargs):
                batch = forward_batch
                if batch.forward_mode.is_target_verify():
                    rows = int(batch.spec_info.draft_token_num)
                    batch = copy.copy(forward_batch)
                    batch.extend_prefix_lens = forward_batch.seq_lens
                    batch.extend_seq_lens = torch.full_like(forward_batch.seq_lens, rows)
                    batch.seq_lens = forward_batch.seq_lens + rows
                return super().forward_extend(q, k, v, layer, batch, *args, **kwargs)

        return Backend(runner)

    plain = dflash.DFlashAttention.__init__

    def init(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        # a Triton kernel for bfloat16
        self.use_table_qk_norm_rope = False

    dflash.DFlashAttention.__init__ = init


def _allow_the_device():
    """Let both routes start here: ours checks a list, SGLang's own asks the platform."""
    from sglang.srt.arg_groups import speculative_hook

    from dspine_hub.sglang_plugin import registration, startup

    startup.DEVICES.append("cpu")
    resolve = registration.resolve_arguments

    def resolve_on_cpu(server_args):
        resolve(server_args)
        server_args.disable_overlap_schedule = True

    registration.resolve_arguments = resolve_on_cpu
    platform = speculative_hook.current_platform

    class Platform:
        def is_out_of_tree(self):
            return True

        def supports_speculative_algorithm(self, name):
            return True

        def supports_speculative_draft_attention_backend(self, name, backend):
            return True

        def __getattr__(self, name):
            return getattr(platform, name)

    speculative_hook.current_platform = Platform()


def _dump_drafts(folder: Path, most: int = 6):
    from dspine_hub.sglang_plugin.draft_model import DSpineDraftModel
    from dspine_hub.sglang_plugin.transition_cache import TransitionCache

    count, context, seen = itertools.count(), [], {}
    project, build, sample = (
        DSpineDraftModel.project_target_hidden,
        TransitionCache.build_lattice,
        TransitionCache.sample_path,
    )

    def project_target_hidden(self, states):
        context.append(states.clone())
        return project(self, states)

    def build_lattice(self, **tensors):
        seen.update(tensors, scores=build(self, **tensors))
        return seen["scores"]

    def sample_path(self, **tensors):
        tokens, q = sample(self, **tensors)
        number = next(count)
        if number < most:
            content = {**seen, "tokens": tokens, "q": q, "context": list(context)}
            torch.save(content, folder / f"{os.getpid()}-{number}.pt")
        return tokens, q

    DSpineDraftModel.project_target_hidden = project_target_hidden
    TransitionCache.build_lattice = build_lattice
    TransitionCache.sample_path = sample_path
