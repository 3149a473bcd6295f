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
    _run_streams_on_the_cpu()
    _judge_blocks_in_torch_native()
    _judge_samples_in_torch()
    _allow_the_device()
    if os.environ.get("DSPINE_DUMP"):
        _dump_drafts(Path(os.environ["DSPINE_DUMP"]))


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


def _judge_samples_in_torch():
    """Stand in for the Triton kernel of rejection sampling: accept with p / q, else sample what p has more than q."""
    from sglang.kernels.ops.speculative.dspark import dspark_accept

    def judge(
        *, predicts, accept_index, accept_token_num, candidates, retrive_index, uniform_samples, target_probs,
        draft_probs, uniform_samples_for_final_sampling, **unused
    ):  # fmt: skip
        for row, tokens in enumerate(candidates.tolist()):
            accepted = 0
            for slot, token in enumerate(tokens[1:]):
                p, q = float(target_probs[row, slot, token]), float(draft_probs[row, slot, token])
                if not (q > 0 and float(uniform_samples[row, slot]) * q < p):
                    break
                predicts[retrive_index[row, slot]] = token
                accepted += 1
            accept_index[row, : accepted + 1] = retrive_index[row, : accepted + 1]
            accept_token_num[row] = accepted
            rest = target_probs[row, accepted]
            if accepted < len(tokens) - 1:
                rest = (rest - draft_probs[row, accepted]).clamp(min=0)
            total = rest.cumsum(0)
            own = (total <= uniform_samples_for_final_sampling[row] * total[-1]).sum().clamp(max=len(total) - 1)
            predicts[retrive_index[row, accepted]] = own.to(predicts.dtype)

    dspark_accept.chain_speculative_sampling_triton = judge


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
    if not hasattr(speculative_hook, "current_platform"):
        # 0.5.19 tests the name of the device: no way around by the name DFLASH
        return
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
