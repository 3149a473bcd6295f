"""Small rounds through every kernel, to be run under NVIDIA's checkers on a GPU.

`PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/sanitizer.py`
`compute-sanitizer --tool racecheck python tests/sanitizer.py --serial`

Without caching every tensor is an allocation of its own, so that reading past one is seen. A case is a line of output.
"""

import dataclasses
import sys

import torch

from dspine_hub.evaluation.ops.round import Shape, random_drafter, random_round, run_round
from dspine_hub.kernels_dspine import (
    BackboneLogits,
    adjacent_injection,
    top_candidates,
    transition_scores,
    triton_support,
)

# sizes that fill no tile, one request, rows beyond a tile, rows whose products are the library's
CASES = (
    (Shape(H=160, R=96, M=40, L=2, N=5, K=5, V=300), 3),
    (Shape(H=256, R=128, M=64, L=2, V=500), 1),
    (Shape(H=256, R=256, M=64, L=2, V=500), 5),
    (Shape(H=256, R=128, M=64, L=2, V=500), 18),
)


def run_case(shape: Shape, batch: int, dtype: torch.dtype) -> None:
    """Run greedy, sampled, without the `[V, M]` table, without the head's rows, and choose candidates."""
    drafter = random_drafter(shape, dtype, "cuda", seed=0)
    inputs = random_round(shape, batch, dtype, "cuda", seed=0)
    run_round(drafter, inputs)
    warm = torch.full((batch,), 0.7, device="cuda")
    run_round(drafter, inputs._replace(temperature=warm, uniforms=torch.rand_like(inputs.uniforms)))
    tables = dataclasses.replace(drafter.tables, head_messages=None)
    state, rest = inputs.states[-1][:, 1:], (inputs.candidates, inputs.anchor)
    transition_scores(state, *rest, tables)
    injected = adjacent_injection(inputs.states[-1], inputs.anchor, tables.last, drafter.tables)
    logits = torch.randn(inputs.candidates.shape, device="cuda")
    backbone = BackboneLogits(logits, injected.message[:, 1:], injected.hidden[:, 1:].norm(dim=-1))
    transition_scores(state, *rest, drafter.tables, injected.projection.slots(), backbone)
    top_candidates(torch.randn(batch, shape.N - 1, shape.V, device="cuda").to(dtype), shape.K)
    torch.cuda.synchronize()


def main() -> None:
    """Run all cases; `--serial` keeps launches from overlapping, for a checker that cannot follow two at once."""
    if "--serial" in sys.argv[1:]:
        triton_support.can_overlap = lambda x: False
    for dtype in (torch.bfloat16, torch.float32):
        for shape, batch in CASES:
            run_case(shape, batch, dtype)
            print("ran", dtype, shape, "batch", batch, flush=True)


if __name__ == "__main__":
    main()
