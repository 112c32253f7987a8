"""Timing one engine: a warm-up of the full shape, then timed runs. The report is that of the median run."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch

from rosebatch.bench.case import Case, launch_case, release_memory, spread
from rosebatch.bench.job_order import in_job_order
from rosebatch.bench.scenario import Sampling
from rosebatch.bench.workload import Workload, require_fits
from rosebatch.core.request import Completion
from rosebatch.engine.engine import Engine
from rosebatch.engine.metrics.roofline import Rates
from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.job.report.build import build_report
from rosebatch.job.report.tally import Tally


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload: wall seconds, and the counts of that run."""

    seconds: float
    tally: Tally
    stats: EngineStats


def run_once(engine: Engine, workload: Workload, sampling: Sampling) -> Run:
    """Run a workload to its end.

    Raises:
        UserError: a request is too long for the engine.
    """
    require_fits(workload, engine.max_model_len)
    requests = workload.requests(sampling)
    stats = engine.restart_stats()
    if torch.cuda.is_initialized():
        # The run before may have launched steps past its end. They must not count here.
        torch.cuda.synchronize()
    started = time.perf_counter()
    completions: list[Completion] = list(engine.run(in_job_order(requests, engine)))
    seconds = time.perf_counter() - started
    tally = Tally()
    for completion in completions:
        tally.add(completion)
        wanted = workload.output_lens[completion.request.id]
        assert len(completion.token_ids) == wanted, f"{len(completion.token_ids)} tokens instead of {wanted}"
    assert tally.completed == len(requests), "every request is completed, once"
    return Run(seconds, tally, stats)


def time_case(case: Case, repeats: int, import_seconds: float) -> dict[str, Any]:
    """Launch an engine, time a case on it, and release it.

    Returns:
        the report of the run with the median time (see ``rosebatch.job.report.build``), with the seconds of all runs.
        ``startup_s`` holds import, load and warm-up.
    """
    launched = launch_case(case.config)
    warm_up = run_once(launched.engine, case.workload(0), case.scenario.sampling)
    runs = [run_once(launched.engine, case.workload(i), case.scenario.sampling) for i in range(1, repeats + 1)]
    seconds = [run.seconds for run in runs]
    median = runs[seconds.index(spread(seconds)["median"])]
    startup = {"import": import_seconds, "load": launched.load_seconds, "warm-up": warm_up.seconds}
    report = build_report(median.tally, median.stats, launched.description, startup, median.seconds)
    del launched
    release_memory()
    return report | of_runs(case, median.stats, seconds) | {"versions": report["versions"] | machine_versions()}


def of_runs(case: Case, stats: EngineStats, seconds: Sequence[float]) -> dict[str, Any]:
    """What a bench adds to the report of the median run; ``stats`` are that run's, ``seconds`` those of all."""
    graphs = {"graph_replays": stats.graph_replays, "graph_captures": stats.graph_captures}
    named = {"kind": "run", "scenario": case.name, "model": case.source.name}
    return {**graphs, **named, "workload": msgspec.to_builtins(case.scenario), "seconds": seconds}


def against_floor(case: Case, seconds: float, rates: Rates | None) -> dict[str, Any]:
    """The floor of a case and the share of it that was reached; empty without rates."""
    if rates is None:
        return {}
    floor = case.floor(rates)
    values = {"copy_bytes_per_s": rates.copy, "matmul_flops_per_s": rates.matmul, "seconds": floor.seconds}
    if case.kept.fp8:
        values |= {"fp8_flops_per_s": rates.fp8, "fp8_is_measured": False}
    return {"floor": asdict(floor) | values, "share_of_floor": floor.seconds / seconds}


def machine_versions() -> dict[str, str]:
    """Versions that affect the speed on a GPU, beyond those in every report."""
    if not torch.cuda.is_available():
        return {}
    import triton

    return {"cuda": str(torch.version.cuda), "triton": triton.__version__}
