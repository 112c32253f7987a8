"""Lines of a table: time of a kernel, and its share of the GPU's peaks."""

import sys
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

from rosebatch_kernels.common.timing import copy_bandwidth, matmul_rate, median_us


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
    operator: str, shape: str, modules: Sequence[Any], inputs: Sequence[tuple[object, ...]], *, moved: int
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
