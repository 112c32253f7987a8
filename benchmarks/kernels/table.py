"""Lines of a table: time of a kernel, and its share of the GPU's peaks."""

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from itertools import cycle
from typing import Any

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.timing import copy_bandwidth, matmul_rate, median_us

Inputs = Iterable[tuple[Any, ...]]


def in_turns_us(step: Callable[..., object], inputs: Inputs, **options: int) -> float:
    """Median microseconds of a step whose arguments take turns; options are those of ``median_us``.

    Arguments that exceed the cache together come from memory, like those of a model's layers.
    """
    turns = cycle(inputs)
    return median_us(lambda: step(*next(turns)), **options)


def bench(
    name: str, step: Callable[..., object], inputs: Inputs, *, moved: int = 0, flops: int = 0, **options: int
) -> float:
    """Time a step, see ``in_turns_us``, and write its line. Returns the microseconds."""
    microseconds = in_turns_us(step, inputs, **options)
    report(name, microseconds, moved=moved, flops=flops)
    return microseconds


def report(name: str, microseconds: float, *, moved: int = 0, flops: int = 0) -> None:
    """Write one line of a table to stdout: time, bandwidth, arithmetic rate, and the share of each peak.

    Args:
        name: what was timed, at most 60 characters.
        microseconds: of one call.
        moved: fewest bytes that a call must read and write; 0 leaves out their columns.
        flops: operations of a call; 0 leaves out their columns.
    """
    seconds = microseconds * 1e-6
    line = f"{name:<60}{microseconds:>10.2f} µs"
    if moved:
        line += f"{moved / seconds / 1e9:>8.0f} GB/s{moved / seconds / copy_bandwidth():>6.0%} of copy"
    if flops:
        line += f"{flops / seconds / 1e12:>8.1f} TFLOP/s{flops / seconds / matmul_rate():>6.0%} of matmul"
    sys.stdout.write(line + "\n")


def implementations(operator: str) -> dict[str, Any]:
    """The kernels of an operator and what they are compared with: modules of ``rosebatch_kernels`` by name."""
    reference = import_module(f"rosebatch_kernels.{operator}.reference")
    return {"kernel": Launchers(f"{operator}.kernel"), "reference": reference}


def compare(operator: str, function: str, shape: str, inputs: Inputs, *, moved: int) -> None:
    """Time a function of each implementation and write one line for each.

    Args:
        operator: a package of ``rosebatch_kernels``.
        function: its name in each module.
        shape: label in the table.
        inputs: arguments that take turns.
        moved: fewest bytes that a call must read and write.
    """
    for name, module in implementations(operator).items():
        bench(f"{function:<16} {shape:<24} {name}", getattr(module, function), inputs, moved=moved)
