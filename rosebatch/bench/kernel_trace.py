"""A trace of PyTorch's profiler as a list of kernels: what each did, for how long, and for which step.

Kernels of one graph may overlap. So a kernel's share is the time by which it extends the end of all kernels so far.
These shares add up to the whole.

A kernel's name says what our own kernels do, but not which projection a matrix product is. That is the name of the
range (``rosebatch.bench.parts``) in which the host launched it; a number in the trace leads from kernel to launch.
"""

import json
import re
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from rosebatch.bench.parts import (
    ACTIVATIONS,
    ATTENTION,
    DECODE_STEP,
    DRAFTS,
    EXPERTS,
    FEEDBACK,
    KV,
    LOGITS,
    NORMS,
    PARTS,
    REST,
    SAMPLING,
    STEPS,
    UP,
)

Events = Sequence[Mapping[str, Any]]

PRODUCTS = "matrix products"
# The first pattern that matches a kernel's name decides. Kernels that match none are PyTorch's own.
_PARTS = {
    ATTENTION: r"^_(gated_)?(decode|prefill)",
    NORMS: r"^_(whole_norm|norm|uclip)",
    KV: r"^_(prepare|append|copy_blocks)",
    LOGITS: r"^_scale_and_cap",
    DRAFTS: r"^_propose",
    SAMPLING: r"^_(summarise|choose|sum_segments|report)",
    FEEDBACK: r"^_(advance|verify)",
    EXPERTS: r"^_(route|count_chunk|add_chunks|place_chunk|expert_product)$",
    ACTIVATIONS: r"^_(activation|bias_residual)",
    PRODUCTS: r"^_product|gemm|gemv|nvjet|cutlass|cublas|splitK",
}
_DECODES = re.compile(r"^_(gated_)?decode")
# Categories of its calls.
_API = ("cuda_runtime", "cuda_driver")
_GRAPH_LAUNCH = "cudaGraphLaunch"
# Called by the profiler and by ``record``, never by an engine.
_NOT_THE_ENGINES = "cudaDeviceSynchronize"


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel, in microseconds.

    Attributes:
        name: without namespaces and arguments.
        part: the kind of work.
        duration: from its start to its end.
        advances: from the end of all earlier kernels to its own end; 0 if it ended earlier.
        replayed: False if the host launched it by itself, not in a graph.
        step: number and name of the range of the step that launched it; None outside of such ranges.
    """

    name: str
    part: str
    duration: float
    advances: float
    replayed: bool = True
    step: tuple[int, str] | None = None


class Steps(NamedTuple):
    """The kernels of each step: steps with prompts, and decode steps."""

    prompts: list[list[KernelTime]]
    decodes: list[list[KernelTime]]


class Calls(NamedTuple):
    """Calls of one function, and the host's microseconds in all of them."""

    number: int
    microseconds: float


def record(work: Callable[[], None], *, cuda: bool, host: bool, path: Path | None = None) -> Events:
    """The events of a Chrome trace of ``work``.

    Args:
        work: what to run.
        cuda: record kernels and calls of CUDA's API.
        host: record ranges and operators too, which slows the host down.
        path: keep the trace in this file.

    Raises:
        OSError: the file cannot be written.
    """
    activities = [ProfilerActivity.CUDA] * cuda + [ProfilerActivity.CPU] * host
    if cuda:
        torch.cuda.synchronize()
    # One cycle has all events; without acc_events PyTorch warns that it would drop those of earlier ones.
    with profile(activities=activities, acc_events=True) as profiled:
        work()
        if cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(written))
        data = written.read_bytes()
    if path is not None:
        path.write_bytes(data)
    events: Events = json.loads(data)["traceEvents"]
    return events


def kernel_times(events: Events) -> list[KernelTime]:
    """The kernels among a Chrome trace's events, in the order in which they began."""
    kernels = sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: float(e["ts"]))
    launches = {_correlation(e): e for e in events if e.get("cat") in _API and _correlation(e) is not None}
    parts, steps = Ranges(events, PARTS), Ranges(events, STEPS)
    times, end = [], float(kernels[0]["ts"]) if kernels else 0.0
    for event in kernels:
        launch = launches.get(_correlation(event))
        # Without a launch it is of no range.
        at = -inf if launch is None else float(launch["ts"])
        _, inside = parts.at(at) or (0, None)
        stop = float(event["ts"]) + float(event["dur"])
        times.append(
            KernelTime(
                _short(event["name"]),
                _part(event["name"], inside),
                float(event["dur"]),
                max(stop - end, 0.0),
                replayed=launch is None or launch["name"] == _GRAPH_LAUNCH,
                step=steps.at(at),
            )
        )
        end = max(end, stop)
    return times


def read_steps(events: Events) -> Steps:
    """The steps in a trace, by what the trace has: the feedback kernel, ranges of steps, or ranges and no kernels."""
    times = kernel_times(events) or _range_times(events)
    return split_steps(times) if has_feedback(times) else _split_by_ranges(times)


def has_feedback(times: Iterable[KernelTime]) -> bool:
    """Whether the steps feed their tokens back on the device."""
    return any(time.part == FEEDBACK for time in times)


def split_steps(times: Iterable[KernelTime]) -> Steps:
    """Split kernels into steps. Each step ends with the kernel that feeds its tokens back.

    A chunk of a prompt that feeds no token back counts with the next step. Kernels after the last step are dropped.

    The time for which the GPU waited before a step is left out. In prompt steps so is the wait before every kernel: the
    host launches those one by one, slowly under a profiler. Only a decode step is one graph.
    """
    steps, step = Steps([], []), list[KernelTime]()
    for time in times:
        step.append(time if step else without_waiting(time))
        if time.part == FEEDBACK:
            if any(_DECODES.search(kernel.name) for kernel in step):
                steps.decodes.append(step)
            else:
                steps.prompts.append([without_waiting(kernel) for kernel in step])
            step = []
    return steps


def _split_by_ranges(times: Iterable[KernelTime]) -> Steps:
    """Split kernels by the range that launched them. The host launches each by itself, so no wait counts."""
    found: dict[tuple[int, str], list[KernelTime]] = {}
    for time in times:
        if time.step is not None:
            found.setdefault(time.step, []).append(without_waiting(time))
    decodes = [times for (_, name), times in found.items() if name == DECODE_STEP]
    return Steps([times for (_, name), times in found.items() if name != DECODE_STEP], decodes)


def _range_times(events: Events) -> list[KernelTime]:
    """On a CPU ranges take the place of kernels: each has the time that passed in it and in no range inside it."""
    steps, ranges = Ranges(events, STEPS), Ranges(events, (*PARTS, *STEPS))
    own = ((REST if name in STEPS else name, start, time) for name, start, time in ranges.own_times())
    return [KernelTime(part, part, time, time, replayed=False, step=steps.at(start)) for part, start, time in own]


def api_calls(events: Events) -> dict[str, Calls]:
    """The host's calls of CUDA's API by name, the longest first: number and microseconds."""
    found: dict[str, Calls] = {}
    for event in events:
        if event.get("cat") in _API and event["name"] != _NOT_THE_ENGINES:
            number, microseconds = found.get(event["name"], Calls(0, 0.0))
            found[event["name"]] = Calls(number + 1, microseconds + float(event["dur"]))
    return dict(sorted(found.items(), key=lambda item: -item[1].microseconds))


def without_waiting(time: KernelTime) -> KernelTime:
    """The kernel without the time in which the GPU waited for it."""
    return replace(time, advances=min(time.advances, time.duration))


class Ranges:
    """The ranges of some names in a trace. They nest: one thread opens and closes all of them."""

    def __init__(self, events: Events, names: Sequence[str]) -> None:
        found = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in names]
        found.sort(key=lambda e: (float(e["ts"]), -float(e["dur"])))
        self.names = [str(event["name"]) for event in found]
        self.starts = [float(event["ts"]) for event in found]
        self.ends = [float(event["ts"]) + float(event["dur"]) for event in found]
        self.parents: list[int] = []
        for index, start in enumerate(self.starts):
            self.parents.append(self._innermost(index - 1, start))

    def at(self, moment: float) -> tuple[int, str] | None:
        """Number and name of the innermost range around a moment."""
        index = self._innermost(bisect_right(self.starts, moment) - 1, moment)
        return None if index < 0 else (index, self.names[index])

    def own_times(self) -> list[tuple[str, float, float]]:
        """Name, start, and time outside of inner ranges, of each."""
        own = [end - start for start, end in zip(self.starts, self.ends, strict=True)]
        for index, parent in enumerate(self.parents):
            if parent >= 0:
                own[parent] -= self.ends[index] - self.starts[index]
        return list(zip(self.names, self.starts, own, strict=True))

    def _innermost(self, index: int, moment: float) -> int:
        """The first of a range and those around it that has not ended; -1 if all have."""
        while index >= 0 and self.ends[index] < moment:
            index = self.parents[index]
        return index


def _part(name: str, inside: str | None) -> str:
    """The part of a kernel. Our own kernels say it themselves; for a product and PyTorch's kernels the range does."""
    part = next((part for part, pattern in _PARTS.items() if re.search(pattern, name)), REST)
    if inside is None or part not in (PRODUCTS, REST):
        return part
    return ACTIVATIONS if inside == UP and part == REST else inside


def _short(name: str) -> str:
    """The name without return type, namespaces and arguments: ``void ns::kernel<int>(float*)`` gives ``kernel``."""
    return re.split(r"[<(]", name.removeprefix("void "))[0].rpartition("::")[2]


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")
