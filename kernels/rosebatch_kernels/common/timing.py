"""Times of kernels on a GPU, and the two peaks they are compared with."""

import statistics
from collections.abc import Callable
from functools import cache

import torch

_COPY_BYTES = 2**31
_COPIES = 5
_MATMUL_SIZE = 8192


def median_us(function: Callable[[], object], *, repeats: int = 20, calls: int = 50) -> float:
    """Median microseconds of one call, without the gaps between launches from Python.

    One CUDA graph captures ``calls`` calls and is replayed ``repeats`` times between two events. Each call may use
    other inputs, so that they come from memory instead of the cache; the graph keeps them alive.

    Args:
        function: launches work on the current stream; it neither waits for the work nor reads a result.
        repeats: replays; the result is their median.
        calls: calls in the graph. They must last far longer than the start of the graph, a few microseconds.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # The first call compiles the kernels.
        for _ in range(2):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            function()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return float(statistics.median(times))


@cache
def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the device: bytes read plus bytes written.

    The copy is not in a graph: there the driver copies in another way, a fifth slower on an H100.
    """
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(_COPIES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return 2 * _COPY_BYTES / float(statistics.median(times))


@cache
def matmul_rate() -> float:
    """Floating-point operations per second of a square bf16 product of random data; zeros would run faster."""
    a, b = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2 * _MATMUL_SIZE**3 / (median_us(lambda: a @ b, calls=10) * 1e-6)
