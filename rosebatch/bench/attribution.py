"""Where an engine's time on a GPU goes: the kernels in a trace of PyTorch's profiler, and the kind of work of each.

Kernels of one graph may overlap. So a kernel's share is the time by which it extends the end of all kernels so far.
These shares add up to the whole.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from rosebatch.engine.engine import Engine
from rosebatch.request import Request

_FEEDBACK = "feedback"
# The first pattern that matches a kernel's name decides. Kernels that match none are PyTorch's own.
_PARTS = {
    "attention": r"^_(gated_)?(decode|prefill)",
    "norms": r"^_(norm|uclip)",
    "KV and rotary": r"^_(prepare|append|copy_blocks)",
    "sampling": r"^_(summarise|choose)",
    _FEEDBACK: r"^_advance",
    "activations": r"^_(activation|bias_residual)",
    "matrix products": r"^_product|gemm|nvjet|cutlass|cublas|splitK",
}
_OTHER = "the rest"
_DECODES = re.compile(r"^_(gated_)?decode")
# Decode steps whose results a profiled run waits for. When those of the first plan arrive, the second plan runs
# already. The trace of a whole run would have hundreds of megabytes.
_DECODE_STEPS = 2


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel, in microseconds.

    Attributes:
        name: without namespaces and arguments.
        part: the kind of work.
        duration: from its start to its end.
        advances: from the end of all earlier kernels to its own end; 0 if it ended earlier.
    """

    name: str
    part: str
    duration: float
    advances: float


class Steps(NamedTuple):
    """The kernels of each step: steps with prompts, and decode steps."""

    prompts: list[list[KernelTime]]
    decodes: list[list[KernelTime]]


def attribute(engine: Engine, requests: Iterable[Request]) -> dict[str, Any]:
    """Run requests to their end, and look at the beginning of the run. The engine must use our attention kernels.

    Returns:
        ``prefill_us``: microseconds of each part, over all prompt steps before the first decode step.
        ``decode_step_us``: the same for one early decode step. ``decode_kernels``: the number of its kernels.
    """
    engine.restart_stats()
    for request in requests:
        engine.add(request)

    def begin() -> None:
        while engine.has_unfinished and engine.stats.decode_steps < _DECODE_STEPS:
            engine.step()

    prompts, decodes = split_steps(trace(begin))
    while engine.has_unfinished:
        engine.step()
    step = usual_step(decodes) if decodes else []
    return {
        "prefill_us": _microseconds(list(chain.from_iterable(prompts))),
        "decode_step_us": _microseconds(step),
        "decode_kernels": len(step),
    }


def trace(work: Callable[[], None]) -> list[KernelTime]:
    """The kernels that ``work`` launches on the GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return kernel_times(json.loads(path.read_bytes())["traceEvents"])


def kernel_times(events: Iterable[dict[str, Any]]) -> list[KernelTime]:
    """The kernels among a Chrome trace's events, in the order in which they began."""
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: float(e["ts"]))
    times, end = [], float(kernels[0]["ts"]) if kernels else 0.0
    for event in kernels:
        name, duration = _short(event["name"]), float(event["dur"])
        stop = float(event["ts"]) + duration
        times.append(KernelTime(name, _part(event["name"]), duration, max(stop - end, 0.0)))
        end = max(end, stop)
    return times


def split_steps(times: Iterable[KernelTime]) -> Steps:
    """Split kernels into steps. Each step ends with the kernel that feeds its tokens back.

    A chunk of a prompt that feeds no token back counts with the next step. Kernels after the last step are dropped.

    The time for which the GPU waited before a step is left out. In prompt steps so is the wait before every kernel: the
    host launches those one by one, slowly under a profiler. Only a decode step is one graph.
    """
    steps, step = Steps([], []), list[KernelTime]()
    for time in times:
        step.append(time if step else _without_waiting(time))
        if time.part == _FEEDBACK:
            if any(_DECODES.search(kernel.name) for kernel in step):
                steps.decodes.append(step)
            else:
                steps.prompts.append([_without_waiting(kernel) for kernel in step])
            step = []
    return steps


def _without_waiting(time: KernelTime) -> KernelTime:
    """The kernel without the time in which the GPU waited for it."""
    return replace(time, advances=min(time.advances, time.duration))


def usual_step(steps: Sequence[list[KernelTime]]) -> list[KernelTime]:
    """The step of median length, among those with the usual number of kernels.

    Before some steps the host changes something, which takes further kernels.
    """
    counts = Counter(map(len, steps))
    usual = max(counts, key=lambda length: (counts[length], -length))
    timed = sorted((step for step in steps if len(step) == usual), key=total)
    return timed[(len(timed) - 1) // 2]


def total(times: Iterable[KernelTime]) -> float:
    """Microseconds of all kernels together."""
    return sum(time.advances for time in times)


def by_key(times: Iterable[KernelTime], key: str) -> dict[str, tuple[int, float, float]]:
    """For each ``name`` or ``part``: count, summed advances and summed durations. The largest advance comes first."""
    sums: dict[str, tuple[int, float, float]] = {}
    for time in times:
        count, advances, duration = sums.get(getattr(time, key), (0, 0.0, 0.0))
        sums[getattr(time, key)] = count + 1, advances + time.advances, duration + time.duration
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def _microseconds(times: Iterable[KernelTime]) -> dict[str, float]:
    return {part: advances for part, (_, advances, _) in by_key(times, "part").items()}


def _part(name: str) -> str:
    return next((part for part, pattern in _PARTS.items() if re.search(pattern, name)), _OTHER)


def _short(name: str) -> str:
    """The name without return type, namespaces and arguments: ``void ns::kernel<int>(float*)`` gives ``kernel``."""
    return re.split(r"[<(]", name.removeprefix("void "))[0].rpartition("::")[2]
