"""Times of CUDA graphs and kernels, what a call allocates, and what the card can do at best."""

import statistics

import torch

# weights of one copy: 66 MB of injection, so three copies exceed the 50 MB of an H200's L2 several times
COPIES = 3
# clock cycles, about a millisecond
PAUSE = 2_000_000


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


def kernel_times(call, repeats: int = 10) -> dict:
    """Profile a call launched again and again; returns microseconds a call by kernel."""
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as measured:
        for _ in range(repeats):
            call()
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
