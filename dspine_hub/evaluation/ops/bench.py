"""What DSpine adds to a round, measured: correct against float64 first, then timed beside what it is compared with.

A round is five injections, the transition scores and the walk, at the shapes of a Qwen3-8B drafter. Every variant
runs as a CUDA graph on the same card in the same run, its weights rotated among copies larger than the L2 cache, as a
cold round would find them. The floor is the larger of two times: the bytes a round must move at the measured copy
bandwidth, and the operations it must do at the measured matrix rate.
"""

import math
from collections.abc import Callable

import torch

from dspine_hub.environment import describe_environment
from dspine_hub.errors import DSpineHubError
from dspine_hub.evaluation.ops.baselines import compiled_us, cycle, dflash2_us
from dspine_hub.evaluation.ops.correctness import check_blocks
from dspine_hub.evaluation.ops.round import (
    Drafter,
    Round,
    Shape,
    random_drafter,
    random_round,
    round_cost,
    run_reference,
    run_round,
)
from dspine_hub.evaluation.ops.timing import COPIES, allocated_by, graph_us, kernel_times, measure_ceilings
from dspine_hub.kernels_dspine import (
    adjacent_injection,
    top_candidates,
    transition_scores,
    transition_scores_reference,
    use_triton,
)

BATCHES = (1, 4, 16, 64)


def bench_ops(
    batches: tuple[int, ...] = BATCHES, baselines: bool = True, progress: Callable[[str], None] = lambda text: None
) -> dict:
    """Measure a round at every batch size.

    Args:
        batches (`tuple[int]`): Batch sizes.
        baselines (`bool`): Also time the compiled reference, DFlash2's parts (where sglang is installed) and the cycle
            the round is a part of.
        progress (`Callable[[str], None]`): Told what runs.

    Returns:
        `dict`: `machine`, `versions`, `commit`, `protocol`, `ceilings`, `rows` (one a batch size).

    Raises:
        DSpineHubError: Without a CUDA device or Triton, or when a result is wrong.
    """
    if not torch.cuda.is_available() or not use_triton(torch.empty(0, device="cuda")):
        raise DSpineHubError(
            "`bench ops` needs a CUDA device and Triton, got none: speeds are measured on a GPU only. The same "
            "operations are checked on a CPU by `TRITON_INTERPRET=1 pytest tests/kernels/test_triton_kernels.py`."
        )
    shape, dtype = Shape(), torch.bfloat16
    progress("ceilings")
    ceilings = measure_ceilings()
    drafters = [random_drafter(shape, dtype, "cuda", seed=0)]
    drafters += [random_drafter(shape, dtype, "cuda", seed=seed, shared=drafters[0]) for seed in range(1, COPIES)]
    rows = []
    for batch in batches:
        progress(f"batch {batch}: correctness")
        inputs = [random_round(shape, batch, dtype, "cuda", seed) for seed in range(COPIES)]
        row = {"batch": batch, **check_blocks(drafters[0], shape, batch)}
        progress(f"batch {batch}: times")
        pairs = list(zip(drafters, inputs, strict=True))
        row |= own_row(shape, batch, pairs, ceilings)
        row |= transition_row(drafters, inputs)
        row |= candidates_row(shape, batch, dtype)
        row["eager_us"] = graph_us([lambda d=d, i=i: run_reference(d, i) for d, i in pairs])["median"]
        if baselines:
            progress(f"batch {batch}: baselines")
            row |= baseline_row(shape, batch, pairs, row["ours_us"])
        rows.append(row)
    return {**describe_environment(), "protocol": protocol(shape), "ceilings": ceilings, "rows": rows}


def protocol(shape: Shape) -> dict:
    """Say how the numbers came about."""
    return {
        "shape": vars(shape),
        "dtype": "bfloat16",
        "weight_copies": COPIES,
        "replays": 30,
        "timed": "CUDA graphs of whole rounds launched behind a pause, CUDA events, median over replays",
        "floor": "max(bytes / copy bandwidth, flops / matrix rate), both measured in this run",
        "cycle": "5-layer backbone, LM head, top-16, 36-layer target verify of B x 16 tokens; compiled, no context",
    }


def own_row(shape: Shape, batch: int, pairs: list[tuple[Drafter, Round]], ceilings: dict) -> dict:
    """Time DSpine's own work, and set it beside its floor."""
    # one graph holds enough rounds for its time to be measured
    repeated = pairs * max(1, 24 // COPIES // max(1, batch // 8))
    ours, cost = graph_us([lambda d=d, i=i: run_round(d, i) for d, i in repeated]), round_cost(shape, batch)
    floor = max(cost["bytes"] / ceilings["bytes_per_s"], cost["flops"] / ceilings["flops_per_s"]) * 1e6
    return {
        "ours_us": ours["median"],
        "ours_quartiles_us": [ours["low"], ours["high"]],
        **cost,
        "floor_us": floor,
        "over_floor": ours["median"] / floor,
        "kernels_us": kernel_times(lambda: run_round(*pairs[0])),
    }


def baseline_row(shape: Shape, batch: int, pairs: list[tuple[Drafter, Round]], ours_us: float) -> dict:
    """Time what a round is compared with."""
    cycle_us = graph_us([cycle(shape, batch, compiled=True)], repeats=10)["median"]
    return {
        "compile_us": compiled_us(pairs),
        "dflash2_us": dflash2_us(shape, batch, [inputs for _, inputs in pairs]),
        "cycle_us": cycle_us,
        "share_of_cycle": ours_us / cycle_us,
    }


def transition_row(drafters: list[Drafter], inputs: list[Round]) -> dict:
    """Time and weigh the transition scores alone, beside their hidden-space form."""
    ready = []
    for drafter, one in zip(drafters, inputs, strict=True):
        last = drafter.tables.last
        projection = adjacent_injection(one.states[-1], one.anchor, last, drafter.tables).projection.slots()
        ready.append((one.states[-1][:, 1:], one.candidates, one.anchor, drafter, projection))

    def ours(state, candidates, anchor, drafter, projection):
        return transition_scores(state, candidates, anchor, drafter.tables, projection)

    def hidden(state, candidates, anchor, drafter, projection):
        return transition_scores_reference(
            state, candidates, anchor, drafter.codes, drafter.layers[-1], drafter.norm_weight, 1e-6, drafter.head
        )

    calls = {name: [lambda f=f, a=a: f(*a) for a in ready] for name, f in (("ours", ours), ("hidden", hidden))}
    times = {name: graph_us(many)["median"] for name, many in calls.items()}
    scores = calls["ours"][0]()
    return {
        "transition_us": times["ours"],
        "transition_hidden_space_us": times["hidden"],
        "transition_bytes_beyond_scores": allocated_by(calls["ours"][0]) - math.prod(scores.shape) * 4,
        "transition_hidden_space_bytes": allocated_by(calls["hidden"][0]),
    }


def candidates_row(shape: Shape, batch: int, dtype: torch.dtype) -> dict:
    """Time the choice of candidates, once it is right, beside PyTorch's."""
    logits = [torch.randn(batch * (shape.N - 1), shape.V, device="cuda").to(dtype) for _ in range(COPIES)]
    values, ids = top_candidates(logits[0], shape.K)
    right = logits[0].float().sort(dim=-1, descending=True, stable=True).indices[:, : shape.K]
    if not torch.equal(ids, right) or not torch.equal(values, logits[0].gather(-1, right)):
        raise DSpineHubError(
            "`top_candidates` must choose what a stable sort chooses before it is timed: it does not."
        )
    choices = {"candidates_us": top_candidates, "candidates_torch_us": torch.topk}
    return {name: graph_us([lambda x=x, f=f: f(x, shape.K) for x in logits])["median"] for name, f in choices.items()}
