"""What DSpine adds to a round, measured: correct against float64 first, then timed beside what it is compared with.

A round is five injections, the transition scores and the walk, at the shapes of a Qwen3-8B drafter. Every variant
runs as a CUDA graph on the same card in the same run, its weights rotated among copies larger than the L2 cache, as a
cold round would find them. The floor is the larger of two times: the bytes a round must move at the measured copy
bandwidth, and the operations it must do at the measured matrix rate.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from dspine_hub.errors import DSpineHubError
from dspine_hub.kernels import (
    InjectionWeights,
    TransferTables,
    adjacent_injection,
    adjacent_injection_reference,
    candidate_walk,
    candidate_walk_reference,
    top_candidates,
    transfer_tables,
    transition_scores,
    transition_scores_reference,
)

BATCHES = (1, 4, 16, 64)
# weights of one copy: 66 MB of injection, so three copies exceed the 50 MB of an H200's L2 several times
COPIES = 3
# clock cycles, about a millisecond
PAUSE = 2_000_000
BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


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


def in_double(values):
    """Convert a tensor to float64 if it floats, or those of a list or named tuple."""
    if torch.is_tensor(values):
        return values.double() if values.is_floating_point() else values
    kind = type(values)
    return kind(*map(in_double, values)) if hasattr(values, "_fields") else [in_double(value) for value in values]


def check_round(drafter: Drafter, inputs: Round) -> dict:
    """Compare one round with the definition in float64.

    Returns:
        `dict`: `max_rel_err` (largest norm of the error over the norm of the result, states and scores),
        `paths_equal` (blocks whose tokens are those of float64 scores), `blocks`, and `widest_tie` (largest gap of
        float64 scores, over their root mean square, at which another token was chosen first).

    Raises:
        DSpineHubError: When the error exceeds the bound of the dtype.
    """
    written, scores, tokens, _ = run_round(drafter, inputs)
    results = [*written, scores]
    # rows of the head and of the codes are all that is read of them
    needed = torch.cat((inputs.candidates.flatten(), inputs.anchor)).unique()
    renamed = inputs._replace(
        candidates=torch.searchsorted(needed, inputs.candidates), anchor=torch.searchsorted(needed, inputs.anchor)
    )
    exact = Drafter(
        [in_double(weights) for weights in drafter.layers],
        drafter.codes[needed].double(),
        drafter.norm_weight.double(),
        drafter.head[needed].double(),
        None,
    )
    # the definition holds `[B, S, K, H]` values: request by request
    error, norm = torch.zeros(2, len(results), device=scores.device, dtype=torch.float64)
    same, ties = 0, [0.0]
    for b in range(scores.shape[0]):
        one = Round([in_double(state[b : b + 1]) for state in renamed.states], *(t[b : b + 1] for t in renamed[1:]))
        true_written, true_scores, true_tokens, _ = run_reference(exact, one)
        for i, (mine, true) in enumerate(zip(results, [*true_written, true_scores], strict=True)):
            error[i] += (mine[b : b + 1].double() - true).pow(2).sum()
            norm[i] += true.pow(2).sum()
        same += int(torch.equal(needed[true_tokens], tokens[b : b + 1]))
        ties.append(_first_gap(true_scores[0], one.candidates[0], true_tokens[0], needed, tokens[b]))
    worst = float((error / norm).sqrt().max())
    dtype = drafter.layers[0].readout.dtype
    if not worst <= BOUNDS[dtype]:
        raise DSpineHubError(
            f"`max_rel_err` must be at most {BOUNDS[dtype]:.0e} in {dtype} before anything is timed, got {worst:.2e}."
        )
    return {"max_rel_err": worst, "paths_equal": same, "blocks": scores.shape[0], "widest_tie": max(ties)}


def check_blocks(drafter: Drafter, shape: Shape, batch: int, blocks: int = 1024) -> dict:
    """Check rounds of one batch size until at least `blocks` blocks were compared; see [`check_round`]."""
    weight = drafter.layers[0].readout
    found = [
        check_round(drafter, random_round(shape, batch, weight.dtype, weight.device, seed=1000 + seed))
        for seed in range(-(-blocks // batch))
    ]
    return {
        "max_rel_err": max(one["max_rel_err"] for one in found),
        "paths_equal": sum(one["paths_equal"] for one in found) / sum(one["blocks"] for one in found),
        "blocks": sum(one["blocks"] for one in found),
        "widest_tie": max(one["widest_tie"] for one in found),
    }


def _first_gap(scores, candidates, true_tokens, needed, tokens) -> float:
    """Gap of true scores, over their root mean square, between the right token and another chosen in its place."""
    apart = (needed[true_tokens] != tokens).nonzero()
    if not apart.numel():
        return 0.0
    slot = int(apart[0])
    row = int((candidates[slot - 1] == true_tokens[slot - 1]).nonzero()[0]) if slot else 0
    right = scores[slot, row][candidates[slot] == true_tokens[slot]]
    chosen = scores[slot, row][needed[candidates[slot]] == tokens[slot]]
    return float((right - chosen) / scores.pow(2).mean().sqrt())


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


def graph_us(rounds: list, repeats: int = 30) -> dict:
    """Time callables captured one after another in a CUDA graph; returns microseconds a callable.

    Args:
        rounds (`list[Callable]`): Calls of one graph, each on other copies of the weights.
        repeats (`int`): Replays.

    Returns:
        `dict`: `median`, `low` and `high` (quartiles) over the replays.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in rounds:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in rounds:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # the device is kept waiting until all is enqueued: a host that launches slowly is not part of the time
        torch.cuda._sleep(PAUSE)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / len(rounds))
    low, median, high = statistics.quantiles(times, n=4)
    return {"median": median, "low": low, "high": high}


def measure_ceilings() -> dict:
    """Measure the card: copy bandwidth (bytes read and written a second) and bfloat16 matrix rate (FLOP a second)."""
    source = torch.randn(1 << 29, device="cuda")
    sink = torch.empty_like(source)
    # a kernel, since a copy inside a graph may be left to a slower copy engine
    copy = graph_us([lambda: torch.neg(source, out=sink)] * 3)["median"]
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = graph_us([lambda: a @ b] * 3)["median"]
    return {"bytes_per_s": 2 * source.nbytes / copy * 1e6, "flops_per_s": 2 * 8192**3 / product * 1e6}


def kernel_times(drafter: Drafter, inputs: Round, repeats: int = 10) -> dict:
    """Profile rounds launched one by one; returns microseconds a round by kernel."""
    from torch.profiler import ProfilerActivity, profile

    run_round(drafter, inputs)
    with profile(activities=[ProfilerActivity.CUDA]) as measured:
        for _ in range(repeats):
            run_round(drafter, inputs)
        torch.cuda.synchronize()
    times = {event.key: event.device_time_total / repeats for event in measured.key_averages()}
    return {name: time for name, time in times.items() if time > 0.1}


def allocated_by(call) -> int:
    """Return the bytes a call holds at its peak beyond what is held before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def bench_ops(batches: tuple[int, ...] = BATCHES, baselines: bool = True, progress=lambda text: None) -> dict:
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
    from dspine_hub.environment import describe_environment
    from dspine_hub.kernels import use_triton

    if not torch.cuda.is_available() or not use_triton(torch.empty(0, device="cuda")):
        raise DSpineHubError(
            "`bench ops` needs a CUDA device and Triton, got none: speeds are measured on a GPU only. The same "
            "operations are checked on a CPU by `TRITON_INTERPRET=1 pytest tests/test_triton_kernels.py`."
        )
    from dspine_hub.evaluation.ops.baselines import cycle, dflash2_us

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
        cost = round_cost(shape, batch)
        floor = max(cost["bytes"] / ceilings["bytes_per_s"], cost["flops"] / ceilings["flops_per_s"]) * 1e6
        progress(f"batch {batch}: times")
        pairs = list(zip(drafters, inputs, strict=True)) * max(1, 24 // COPIES // max(1, batch // 8))
        ours = graph_us([lambda d=d, i=i: run_round(d, i) for d, i in pairs])
        row |= {"ours_us": ours["median"], "ours_quartiles_us": [ours["low"], ours["high"]], **cost}
        row |= {"floor_us": floor, "over_floor": ours["median"] / floor}
        row |= transition_row(drafters, inputs)
        row |= candidates_row(shape, batch, dtype)
        row["kernels_us"] = kernel_times(drafters[0], inputs[0])
        row["eager_us"] = graph_us([lambda d=d, i=i: run_reference(d, i) for d, i in pairs[:COPIES]])["median"]
        if baselines:
            progress(f"batch {batch}: baselines")
            row["compile_us"] = _compiled_us(pairs[:COPIES])
            row["dflash2_us"] = dflash2_us(shape, batch, inputs)
            row["cycle_us"] = graph_us([cycle(shape, batch, compiled=True)], repeats=10)["median"]
            row["share_of_cycle"] = ours["median"] / row["cycle_us"]
        rows.append(row)
    protocol = {
        "shape": vars(shape),
        "dtype": "bfloat16",
        "weight_copies": COPIES,
        "replays": 30,
        "timed": "CUDA graphs of whole rounds launched behind a pause, CUDA events, median over replays",
        "floor": "max(bytes / copy bandwidth, flops / matrix rate), both measured in this run",
        "cycle": "5-layer backbone, LM head, top-16, 36-layer target verify of B x 16 tokens; compiled, no context",
    }
    return {**describe_environment(), "protocol": protocol, "ceilings": ceilings, "rows": rows}


def _compiled_us(pairs) -> float:
    torch._dynamo.reset()
    compiled = [
        torch.compile(f, fullgraph=True, dynamic=False)
        for f in (adjacent_injection_reference, transition_scores_reference, candidate_walk_reference)
    ]
    return graph_us([lambda d=d, i=i: run_reference(d, i, *compiled) for d, i in pairs])["median"]


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
