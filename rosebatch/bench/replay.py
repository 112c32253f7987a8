"""Requests that enter the engine when their time has come, and how long each waits.

A request that comes waits for the decode windows that are planned. So a replay plans short ones.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rosebatch.bench.case import Case, launch_case, release_memory
from rosebatch.bench.throughput import Run, machine_versions, run_once
from rosebatch.bench.trace import Arrivals
from rosebatch.core.request import Request
from rosebatch.engine.engine import Engine
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.job.report.build import build_report
from rosebatch.job.report.tally import Tally

# Decode steps that are planned together while requests may come.
_STEPS = 2


def replay_case(case: Case, arrivals: Arrivals, scales: Sequence[float], import_seconds: float) -> list[dict[str, Any]]:
    """Replay arrivals on our engine, once for each scale.

    Args:
        case: model and engine.
        arrivals: the requests.
        scales: how many times faster than in the trace they come.
        import_seconds: for the report.

    Returns:
        for each scale the report (see ``rosebatch.job.report.build``) with ``scale``, and ``kind`` ``replay``.

    Raises:
        UserError: a request is too long for the engine.
    """
    launched = launch_case(case.config)
    engine = launched.engine
    warm_up = run_once(engine, arrivals.workload(0), case.scenario.sampling)
    startup = {"import": import_seconds, "load": launched.load_seconds, "warm-up": warm_up.seconds}
    reports = []
    with short_windows(engine.scheduler):
        for number, scale in enumerate(scales, start=1):
            requests = arrivals.workload(number).requests(case.scenario.sampling)
            run = replay(engine, [at / scale for at in arrivals.times], requests)
            report = build_report(run.tally, run.stats, launched.description, startup, run.seconds)
            report |= {"kind": "replay", "scenario": arrivals.name, "model": case.source.name, "scale": scale}
            report |= {"versions": report["versions"] | machine_versions()}
            reports.append(report)
    del launched, engine
    release_memory()
    return reports


@contextmanager
def short_windows(scheduler: Scheduler) -> Iterator[None]:
    """Plan few decode steps at a time."""
    before = scheduler.planner.policy
    if isinstance(before, SeparateDecodes):
        scheduler.planner.policy = SeparateDecodes(min(_STEPS, before.max_steps))
    try:
        yield
    finally:
        scheduler.planner.policy = before


def replay(engine: Engine, times: Sequence[float], requests: Sequence[Request]) -> Run:
    """Run requests that come at their times.

    TTFT and E2E count from the time of arrival, also where the engine was busy then.

    Args:
        engine: with nothing else to do.
        times: seconds from now, in order.
        requests: one for each time.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    stats, tally = engine.restart_stats(), Tally()
    started = time.perf_counter()
    waiting = deque(zip(times, requests, strict=True))
    while waiting or engine.has_unfinished:
        since = time.perf_counter() - started
        while waiting and waiting[0][0] <= since:
            at, request = waiting.popleft()
            engine.add(request, arrival_time=started + at)
        if engine.has_unfinished:
            for completion in engine.step():
                tally.add(completion)
        else:
            time.sleep(waiting[0][0] - since)
    return Run(time.perf_counter() - started, tally, stats)
