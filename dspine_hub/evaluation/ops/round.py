"""DSpine's own work in a round, at random weights: five injections, the transition scores and the walk."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from dspine_hub.kernels_dspine import (
    InjectionWeights,
    TransferTables,
    adjacent_injection,
    adjacent_injection_reference,
    candidate_walk,
    candidate_walk_reference,
    transfer_tables,
    transition_scores,
    transition_scores_reference,
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a drafter: hidden, rank, message, layers, block, candidates, vocabulary."""

    H: int = 4096
    R: int = 1024
    M: int = 512
    L: int = 5
    N: int = 16
    K: int = 16
    V: int = 151936


class Drafter(NamedTuple):
    """Random weights of one copy, and the tables prepared from them."""

    layers: list[InjectionWeights]
    codes: torch.Tensor
    norm_weight: torch.Tensor
    head: torch.Tensor
    tables: TransferTables


class Round(NamedTuple):
    """Inputs of one round: states after every layer, candidates, anchors, temperatures, uniform numbers."""

    states: list[torch.Tensor]
    candidates: torch.Tensor
    anchor: torch.Tensor
    temperature: torch.Tensor
    uniforms: torch.Tensor


def random_drafter(shape: Shape, dtype, device, seed: int, shared: Drafter | None = None) -> Drafter:
    """Draw a drafter whose gates and messages are of order 1; copies share codes and head, which are read by rows."""
    g = torch.Generator(device).manual_seed(seed)

    def normal(*size, scale):
        return (torch.randn(*size, generator=g, device=device) * scale).to(dtype)

    H, R, M = shape.H, shape.R, shape.M
    if shared is None:
        codes = F.normalize(normal(shape.V, R, scale=1.0).float(), dim=-1).to(torch.bfloat16)
        norm_weight, head = 1 + normal(H, scale=0.2), normal(shape.V, H, scale=H**-0.5)
    else:
        codes, norm_weight, head = shared.codes, shared.norm_weight, shared.head
    common = [normal(M, R, scale=R**-0.5) for _ in range(3)] + [normal(M, scale=0.5)]
    # a trained write moves a state by about a third of its length
    layers = [
        InjectionWeights(normal(R, H, scale=H**-0.5), normal(H, M, scale=0.6 * M**-0.5), *common)
        for _ in range(shape.L)
    ]
    tables = transfer_tables(layers, codes, norm_weight, 1e-6, head)
    return Drafter(layers, codes, norm_weight, head, tables)


def random_round(shape: Shape, batch: int, dtype, device, seed: int) -> Round:
    """Draw the inputs of a greedy round."""
    g = torch.Generator(device).manual_seed(seed)
    slots = shape.N - 1
    states = [(4 * torch.randn(batch, shape.N, shape.H, generator=g, device=device)).to(dtype) for _ in range(shape.L)]
    # distinct within a slot: an offset apart
    first = torch.randint(shape.V, (batch, slots, 1), generator=g, device=device)
    candidates = (first + torch.arange(shape.K, device=device) * (shape.V // shape.K)) % shape.V
    anchor = torch.randint(shape.V, (batch,), generator=g, device=device)
    return Round(
        states, candidates, anchor, torch.zeros(batch, device=device), torch.zeros(batch, slots, device=device)
    )


def run_round(drafter: Drafter, inputs: Round):
    """Run DSpine's own work of a round through the public operations; returns states, scores, tokens and q."""
    written = []
    for layer, state in enumerate(inputs.states):
        hidden, projection, _ = adjacent_injection(state, inputs.anchor, layer, drafter.tables)
        written.append(hidden)
    state = inputs.states[-1][:, 1:]
    scores = transition_scores(state, inputs.candidates, inputs.anchor, drafter.tables, projection.slots())
    return written, scores, *candidate_walk(scores, inputs.candidates, inputs.temperature, inputs.uniforms)


def run_reference(drafter: Drafter, inputs: Round, inject=adjacent_injection_reference, score=None, walk=None):
    """Run the same work by definition, in the dtype of the weights."""
    score, walk = score or transition_scores_reference, walk or candidate_walk_reference
    code = F.embedding(inputs.anchor, drafter.codes)
    pairs = zip(drafter.layers, inputs.states, strict=True)
    written = [inject(state, code, weights) for weights, state in pairs]
    scores = score(
        inputs.states[-1][:, 1:],
        inputs.candidates,
        inputs.anchor,
        drafter.codes,
        drafter.layers[-1],
        drafter.norm_weight,
        1e-6,
        drafter.head,
    )
    return written, scores, *walk(scores, inputs.candidates, inputs.temperature, inputs.uniforms)


def round_cost(shape: Shape, batch: int, itemsize: int = 2) -> dict:
    """Count what a round must move and do: every weight, table row and state once.

    Returns:
        `dict`: `bytes` and `flops`.
    """
    H, R, M, L, N, K = shape.H, shape.R, shape.M, shape.L, shape.N, shape.K
    slots = N - 1
    weights = L * (R * H + H * M) + 3 * M * R + M * M
    states = 2 * L * batch * N * H
    # slot 1 has one predecessor, the anchor; candidates of the last slot precede nothing
    predecessors = batch * (1 + (slots - 1) * K)
    rows = predecessors * 2 * M + batch * slots * K * (H + M)
    scores = 2 * 4 * batch * slots * K * K
    injection = batch * slots * (L * (R * H + 3 * M * R + H * M) + H * M)
    transition = predecessors * (M * M + K * M + M) + batch * slots * K * H
    return {
        "bytes": itemsize * (weights + states + rows) + scores,
        "flops": 2 * (injection + transition),
    }
