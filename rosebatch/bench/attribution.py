"""Where an engine's time goes: the parts of its steps, in all and per layer, and what the host calls meanwhile.

Nothing in a replayed graph says which projection a product is. So a run is traced twice on a GPU: first with the
steps launched kernel by kernel inside named ranges, which gives the names, then as they always run, which gives the
times. A graph has the kernels of the step that was captured, in the same order. So each kernel of the second trace
takes the part of the kernel at its place in the first. Where the two differ, the longest runs of equal kernel names
decide; a kernel without a partner is called by its own name only. On a CPU the ranges have names and times.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import chain, zip_longest
from typing import Any

import torch
from torch.profiler import record_function

from rosebatch.bench.kernel_trace import (
    Events,
    KernelTime,
    api_calls,
    has_feedback,
    kernel_times,
    read_steps,
    record,
    without_waiting,
)
from rosebatch.bench.parts import ranges, swap
from rosebatch.core.request import Request
from rosebatch.engine.engine import Engine
from rosebatch.engine.triton_runner.graphs import StepGraphs
from rosebatch.engine.triton_runner.runner import TritonRunner

# Decode steps whose results a traced run waits for. The trace of a whole run would have hundreds of megabytes.
_DECODE_STEPS = 32


def attribute(engine: Engine, requests: Callable[[int], Iterable[Request]], *, cuda: bool) -> dict[str, Any]:
    """Run a workload to its end several times, and look at the beginning of some of these runs.

    Args:
        engine: warm, idle.
        requests: those of the run with this number, 1 to 3. Runs have the same lengths, but not the same ids.
        cuda: whether the engine runs on a GPU.

    Returns:
        ``num_layers``. ``prefill_us``: microseconds of each part, over all prompt steps before the first decode step.
        ``decode_step_us``: the same for one early decode step. ``decode_waiting_us``: for how long the GPU waited in
        it for kernels that the host launched one by one; no part has this time. ``decode_kernels``: the number of
        its kernels. ``decode_kernel_us``: for each kernel's name and part, their ``number``, ``us`` and
        ``duration_us``, which counts overlaps twice. ``replays``: of a whole run's graphs, see ``time_replays``.
        ``api_us``: for each function of CUDA's API, ``calls`` and the host's ``us`` from the first step until
        ``api_decode_steps`` decode steps were done, under the profiler.
    """
    replays = time_replays(engine, requests(1))
    with ranges(engine, record_function), launch_by_launch(engine):
        events = _trace_beginning(engine, requests(2), cuda=cuda, host=True)
    steps = named = read_steps(events)
    if has_feedback(kernel_times(events)):
        events = _trace_beginning(engine, requests(3), cuda=cuda, host=False)
        steps = read_steps(events)
    none = list[KernelTime]()
    prompts = [take_parts(*each) for each in zip_longest(steps.prompts, named.prompts, fillvalue=none)]
    step = take_parts(usual_step(steps.decodes), usual_step(named.decodes))
    return {
        "num_layers": len(engine.runner.model.layers),  # type: ignore[attr-defined]
        "prefill_us": _microseconds(list(chain.from_iterable(prompts))),
        "decode_step_us": _microseconds([_counted(time) for time in step]),
        "decode_waiting_us": sum(time.advances - _counted(time).advances for time in step),
        "decode_kernels": len(step) if cuda else 0,
        "decode_kernel_us": _kernels([_counted(time) for time in step]) if cuda else [],
        "replays": replays,
        "api_us": {name: {"calls": n, "us": us} for name, (n, us) in api_calls(events).items()},
        "api_decode_steps": len(steps.decodes),
    }


def trace_beginning(engine: Engine, requests: Iterable[Request], *, cuda: bool, path: Any = None) -> Events:
    """Run requests to their end with named ranges, and trace the beginning of the run: kernels, ranges, operators.

    Raises:
        OSError: the file ``path`` cannot be written.
    """
    with ranges(engine, record_function):
        return _trace_beginning(engine, requests, cuda=cuda, host=True, path=path)


def _trace_beginning(engine: Engine, requests: Iterable[Request], **options: Any) -> Events:
    engine.restart_stats()
    for request in requests:
        engine.add(request)

    def begin() -> None:
        while engine.has_unfinished and engine.stats.decode_steps < _DECODE_STEPS:
            engine.step()

    try:
        return record(begin, **options)
    finally:
        while engine.has_unfinished:
            engine.step()


@contextmanager
def launch_by_launch(engine: Engine) -> Iterator[None]:
    """Let steps run without their graphs for a while, so that a profiler sees every launch."""
    with ExitStack() as stack:
        for each in _graphs(engine).values():
            swap(stack, each, "replaying", False)
        yield


def time_replays(engine: Engine, requests: Iterable[Request]) -> dict[str, dict[str, float]]:
    """Run requests to their end, with the times of all replays by events on the GPU, and no profiler.

    Returns:
        for ``decode`` and ``prompt`` steps that ran as graphs: ``number``, ``total_us`` and ``mean_us``.
    """
    graphs = _graphs(engine)
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {kind: [] for kind in graphs}

    def timed(kind: str, replay: Callable[[torch.cuda.CUDAGraph], None]) -> Callable[[torch.cuda.CUDAGraph], None]:
        def run(graph: torch.cuda.CUDAGraph) -> None:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            replay(graph)
            end.record()
            spans[kind].append((begin, end))

        return run

    if not graphs:
        return {}
    with ExitStack() as stack:
        for kind, each in graphs.items():
            swap(stack, each, "replay", timed(kind, each.replay))
        for request in requests:
            engine.add(request)
        while engine.has_unfinished:
            engine.step()
        torch.cuda.synchronize()
    times = {kind: [a.elapsed_time(b) * 1e3 for a, b in pairs] for kind, pairs in spans.items() if pairs}
    return {kind: {"number": len(us), "total_us": sum(us), "mean_us": sum(us) / len(us)} for kind, us in times.items()}


def _graphs(engine: Engine) -> dict[str, StepGraphs[Any]]:
    """The graphs of an engine that has some."""
    runner = engine.runner
    if not isinstance(runner, TritonRunner) or not runner.decodes.enabled:
        return {}
    return {"decode": runner.decodes, "prompt": runner.packed}


def take_parts(timed: Sequence[KernelTime], named: Sequence[KernelTime]) -> list[KernelTime]:
    """The timed kernels with the parts of the same kernels in a named step, matched by name and order."""
    taken = list(timed)
    matcher = SequenceMatcher(None, [time.name for time in timed], [time.name for time in named], autojunk=False)
    for start, first, size in matcher.get_matching_blocks():
        for offset in range(size):
            taken[start + offset] = replace(timed[start + offset], part=named[first + offset].part)
    return taken


def usual_step(steps: Sequence[list[KernelTime]]) -> list[KernelTime]:
    """The step of median length, among those with the usual number of kernels; empty if there is none.

    Before some steps the host changes something, which takes further kernels.
    """
    if not steps:
        return []
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


def _counted(time: KernelTime) -> KernelTime:
    """What counts of a decode step's kernel: the GPU's wait for the host is no work of it."""
    return time if time.replayed else without_waiting(time)


def _microseconds(times: Iterable[KernelTime]) -> dict[str, float]:
    return {part: advances for part, (_, advances, _) in by_key(times, "part").items()}


def _kernels(times: Sequence[KernelTime]) -> list[dict[str, Any]]:
    rows = []
    for part in by_key(times, "part"):
        for name, (number, us, duration) in by_key((t for t in times if t.part == part), "name").items():
            rows.append({"name": name, "part": part, "number": number, "us": us, "duration_us": duration})
    return rows
