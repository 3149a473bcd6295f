"""What a round of DSpine is compared with on the same card: DFlash2's own parts, and the whole draft-verify cycle."""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from dspine_hub.evaluation.ops.round import Drafter, Round, Shape, run_reference
from dspine_hub.evaluation.ops.timing import COPIES, graph_us
from dspine_hub.kernels_dspine import (
    adjacent_injection_reference,
    candidate_walk_reference,
    top_candidates,
    transition_scores_reference,
)

# public DFlash2 drafters: two taps over groups of 16 channels, codebooks of rank 256
CONV_TAPS, CONV_GROUP, SELECTOR_RANK = 2, 16, 256


def dflash2_us(shape: Shape, batch: int, inputs: list[Round]) -> float | None:
    """Time the convolutions and the selector of an installed sglang, at the shapes of a DFlash2 drafter.

    Args:
        shape ([`Shape`]): Sizes; a DFlash2 drafter wraps attention and MLP of every layer in a convolution.
        batch (`int`): Requests.
        inputs (`list[Round]`): States and candidates to read.

    Returns:
        `float`: Microseconds of a round, `None` where sglang >= 0.5.19 is not installed.
    """
    try:
        from sglang.srt.models.dflash import CandidateSelector, DFlashGroupedConv
    except ImportError:
        return None
    dtype, slots = inputs[0].states[0].dtype, shape.N - 1

    def make(kind, *args, **kwargs):
        with torch.device("cuda"):
            module = kind(*args, **kwargs).to(dtype)
        for parameter in module.parameters():
            parameter.requires_grad_(False).normal_(std=0.02)
        return module

    parts = []
    for _ in range(COPIES):
        convs = [make(DFlashGroupedConv, shape.H, shape.N, CONV_TAPS, CONV_GROUP) for _ in range(2 * shape.L)]
        selector = make(
            CandidateSelector, hidden_size=shape.H, vocab_size=shape.V, state_rank=SELECTOR_RANK, top_k=shape.K
        )
        parts.append((convs, selector))

    greedy = torch.ones(batch, dtype=torch.bool, device="cuda")
    ones = torch.ones(batch, device="cuda")
    unary = torch.randn(batch, slots, shape.K, device="cuda")

    def run(convs, selector, one):
        for index, conv in enumerate(convs):
            rows = one.states[index // 2].flatten(0, 1)
            mixed, coefficients = conv.prepare(rows)
            conv.finish(mixed, coefficients)
        scores = selector.build_lattice(
            candidate_ids=one.candidates,
            unary_logits=unary,
            hidden_states=one.states[-1][:, 1:],
            anchor_token_ids=one.anchor,
        )
        selector.sample_path(
            candidate_ids=one.candidates,
            scores=scores,
            uniforms=one.uniforms,
            temperatures=ones,
            greedy_mask=greedy,
        )

    return graph_us([lambda p=p, i=i: run(*p, i) for p, i in zip(parts, inputs, strict=True)])["median"]


@functools.cache
def _cycle_models(shape: Shape, device: str, target_layers: int):
    """Random weights of a backbone and of a target, both of Qwen3 blocks of the 8B's proportions."""
    from dspine_hub.configuration_dspine import DSpineConfig
    from dspine_hub.modeling_dspine import DSpineDecoderLayer

    config = DSpineConfig(
        hidden_size=shape.H,
        intermediate_size=3 * shape.H,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=shape.L,
        vocab_size=shape.V,
        block_size=shape.N,
        target_layer_ids=[1, 9, 17, 25, 33],
        num_target_layers=36,
        mask_token_id=shape.V - 1,
        max_position_embeddings=40960,
        rope_theta=1e6,
        num_candidates=shape.K,
        transfer_rank=shape.R,
        message_size=shape.M,
    )
    with torch.device(device):
        layers = [DSpineDecoderLayer(config, 0).to(torch.bfloat16) for _ in range(shape.L + target_layers)]
        head = (torch.randn(shape.V, shape.H) * 0.02).to(torch.bfloat16)
    for layer in layers:
        layer.requires_grad_(False)
    return config, layers[: shape.L], layers[shape.L :], head


def cycle(shape: Shape, batch: int, device: str = "cuda", target_layers: int = 36, compiled: bool = False):
    """Return a call that runs a draft-verify cycle without DSpine's own work.

    A 5-layer backbone over `B * N` rows, the LM head and its top-K over `B * S` rows, and a 36-layer target with its
    LM head over `B * N` rows; no context, which only lengthens a cycle.

    Args:
        shape ([`Shape`]): Sizes.
        batch (`int`): Requests.
        device (`str`), target_layers (`int`): Where, and how many layers verify.
        compiled (`bool`): Let `torch.compile` fuse the layers, as an engine's kernels do.

    Returns:
        `Callable`: Runs the cycle; returns the candidates' ids and the target's own tokens.
    """
    from dspine_hub.modeling_dspine import rotary_tables

    config, backbone, target, head = _cycle_models(shape, device, target_layers)
    hidden = torch.randn(batch, shape.N, shape.H, device=device, dtype=torch.bfloat16)
    positions = torch.arange(shape.N, device=device)[None]
    rotary = rotary_tables(positions, config.head_dim, 1e6, torch.bfloat16)
    mask = torch.ones(shape.N, shape.N, dtype=torch.bool, device=device).tril()[None, None]
    nothing = hidden[:, :0]

    def through(layer, x):
        return layer(x, nothing, rotary, mask)

    if compiled:
        through = torch.compile(through, dynamic=False)

    @torch.no_grad()
    def run():
        x = hidden
        for layer in backbone:
            x = through(layer, x)
        _, candidates = top_candidates(F.linear(x[:, 1:], head), shape.K)
        x = hidden
        for layer in target:
            x = through(layer, x)
        return candidates, F.linear(x, head).argmax(dim=-1)

    return run


def compiled_us(pairs: list[tuple[Drafter, Round]]) -> float:
    """Time the reference compiled by `torch.compile`; returns microseconds of a round."""
    torch._dynamo.reset()
    compiled = [
        torch.compile(f, fullgraph=True, dynamic=False)
        for f in (adjacent_injection_reference, transition_scores_reference, candidate_walk_reference)
    ]
    return graph_us([lambda d=d, i=i: run_reference(d, i, *compiled) for d, i in pairs])["median"]
