"""Times of kernels on a GPU, and the two peaks they are compared with. Every ``bench.py`` uses it."""

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle
from types import ModuleType

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


def report(name: str, microseconds: float, *, moved: int, flops: int = 0) -> None:
    """Write one line of a table to stdout: time, bandwidth, arithmetic rate, and the share of each peak.

    Args:
        name: what was timed, at most 60 characters.
        microseconds: of one call.
        moved: fewest bytes that a call must read and write.
        flops: operations of a call; 0 leaves out their columns.
    """
    seconds = microseconds * 1e-6
    line = f"{name:<60}{microseconds:>10.2f} µs{moved / seconds / 1e9:>8.0f} GB/s"
    line += f"{moved / seconds / copy_bandwidth():>6.0%} of copy"
    if flops:
        line += f"{flops / seconds / 1e12:>8.1f} TFLOP/s{flops / seconds / matmul_rate():>6.0%} of matmul"
    sys.stdout.write(line + "\n")


def compare(
    operator: str, shape: str, modules: Sequence[ModuleType], inputs: Sequence[tuple[object, ...]], *, moved: int
) -> None:
    """Time one function of several modules and write one line for each.

    Args:
        operator: the function's name in each module.
        shape: label in the table.
        modules: an operator's ``kernel`` and its ``reference``.
        inputs: arguments that take turns. Those of a prefill exceed the cache and so come from memory.
        moved: fewest bytes that a call must read and write.
    """
    for module in modules:
        name = f"{operator:<16} {shape:<24} {module.__name__.rpartition('.')[2]}"
        report(name, median_us(_in_turns(getattr(module, operator), inputs)), moved=moved)


def _in_turns(function: Callable[..., object], inputs: Sequence[tuple[object, ...]]) -> Callable[[], object]:
    turns = cycle(inputs)
    return lambda: function(*next(turns))
