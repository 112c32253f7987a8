"""``rosebatch bench``, once its flags are parsed."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rosebatch.bench.against import choose_peers
from rosebatch.bench.case import Case
from rosebatch.bench.choose_cases import choose_cases
from rosebatch.bench.compare import chosen_switches
from rosebatch.bench.page import bench_page
from rosebatch.bench.profile import choose_profile
from rosebatch.bench.scenario import Scenario
from rosebatch.bench.session import Entry, run_replays, run_session, summarize
from rosebatch.bench.tables import print_replays, print_results
from rosebatch.bench.trace import equal_steps, load_trace
from rosebatch.cli.bench_options import BenchFlags
from rosebatch.cli.interrupts import raise_for_signals
from rosebatch.config.switches import flag
from rosebatch.core.errors import FailedRunError, FlagError
from rosebatch.job.paths import require_report
from rosebatch.job.report.build import write_text
from rosebatch.launch.plan import idle_switches

# Engine and sampling of a trace, which says the rest.
_TRACE = Scenario(num_prompts=1, input_len=1, output_len=1, prefix_cache=True)
# Prints results as they come.
_Show = Callable[[Iterable[Entry]], None]
# Of a bench without --scenario.
_AD_HOC = Scenario(num_prompts=32, input_len=512, output_len=128)


def bench(work: BenchFlags, run: dict[str, Any], started: float) -> None:
    """Run what was asked for and print the results.

    Args:
        work: what to run.
        run: the flags of the engine that were given.
        started: when the process began.

    Raises:
        FailedRunError: after everything was printed, if a peer failed.
    """
    imported = time.perf_counter()
    # A signal ends a peer's process and deletes its files, too.
    raise_for_signals()
    for path in work.report:
        require_report(path)
    if run.get("data_parallel_size", 1) != 1:
        _require_none(work, "data_parallel_size", ("compare", "against", "profile", "trace", "submit_interval_ms"))
    if run.get("tensor_parallel_size", 1) != 1:
        # A profile is of one process, and a comparison loads a second model.
        _require_none(work, "tensor_parallel_size", ("compare", "profile"))
    if not work.against and (work.peer_args or work.peer_python or work.peer_path):
        raise FlagError("--peer-args, --peer-python and --peer-path need --against")
    run_all = _replays if _has_arrivals(work) else _throughput
    results, show = run_all(work, run, imported - started)
    entries: list[Entry] = []
    try:
        (_exhaust if work.as_json else show)(_kept(results, entries))
    finally:
        # What was timed before an error stays.
        if entries and work.as_json:
            sys.stdout.write(_json(entries) + "\n")
        if entries:
            _write_reports(work.report, entries)
    errors = dict.fromkeys(entry["error"] for entry in entries if "error" in entry)
    if errors:
        raise FailedRunError("; ".join(errors))


def _require_none(work: BenchFlags, of: str, flags: Sequence[str]) -> None:
    """What one engine alone is measured by has no meaning for several processes."""
    for name in flags:
        if getattr(work, name) not in (None, ()):
            raise FlagError(f"{flag(of)}: leave out {flag(name)}, which takes one process")


def _kept(results: Iterable[Entry], entries: list[Entry]) -> Iterator[Entry]:
    for entry in results:
        entries.append(entry)
        yield entry


def _exhaust(results: Iterable[Entry]) -> None:
    for _ in results:
        pass


def _throughput(work: BenchFlags, run: dict[str, Any], import_seconds: float) -> tuple[Iterable[Entry], _Show]:
    cases = choose_cases(work.scenario, asdict(work), run, _AD_HOC, parts=work.profile == "parts")
    results = run_session(
        cases,
        repeats=work.repeats,
        switches=chosen_switches(work.compare, cases[0].device, cases[0].switches, _without_effect(cases)),
        peers=choose_peers(work.against, work.peer_args, work.peer_python, work.peer_path),
        import_seconds=import_seconds,
        profile=choose_profile(work.profile, work.profile_output, cases[0].device),
    )
    return results, partial(print_results, cases=cases, stream=sys.stdout)


def _without_effect(cases: Sequence[Case]) -> dict[str, str]:
    """Switches that change nothing in any of the cases, and why."""
    first, *others = (idle_switches(case.source, case.switches, case.device) for case in cases)
    return {name: reason for name, reason in first.items() if all(name in each for each in others)}


def _replays(work: BenchFlags, run: dict[str, Any], import_seconds: float) -> tuple[Iterable[Entry], _Show]:
    """Arrivals of a trace, or of a scenario at equal steps."""
    if not all(0 < scale < math.inf for scale in work.scale):
        raise FlagError("--scale must be above 0")
    if not 0 <= (work.submit_interval_ms or 0) < math.inf:
        raise FlagError("--submit-interval-ms must be at least 0")
    lengths = (work.input_len, work.output_len, *work.scenario, work.submit_interval_ms)
    of_trace = work.trace is not None and any(each is not None for each in lengths)
    if work.compare or work.profile or of_trace:
        raise FlagError("--trace says what is run: leave out scenarios, lengths, intervals, comparisons and profiles")
    ad_hoc = _AD_HOC if work.trace is None else _TRACE
    case, *others = choose_cases(work.scenario, asdict(work), run, ad_hoc, parts=False)
    if others:
        raise FlagError("--submit-interval-ms takes one scenario")
    if work.trace is not None:
        arrivals = load_trace(
            work.trace, case.source.config.vocab_size, limit=work.num_prompts, seed=case.scenario.seed
        )
    else:
        assert work.submit_interval_ms is not None, "one of both was given"
        arrivals = equal_steps(case.name, work.submit_interval_ms / 1000, case.workload)
    peers = choose_peers(work.against, work.peer_args, work.peer_python, work.peer_path)
    if any(peer.name == "transformers" for peer in peers):
        raise FlagError("--against transformers: its generate takes no request while others run")
    results = run_replays(case, arrivals, work.scale or (1.0,), peers, import_seconds)
    return results, partial(print_replays, stream=sys.stdout)


def _has_arrivals(work: BenchFlags) -> bool:
    if work.scale and work.trace is None and work.submit_interval_ms is None:
        raise FlagError("--scale needs --trace")
    return work.trace is not None or work.submit_interval_ms is not None


def _json(entries: Sequence[Entry]) -> str:
    return json.dumps({"results": entries, "geometric_means": summarize(entries)})


def _write_reports(paths: Sequence[Path], entries: Sequence[Entry]) -> None:
    for path in paths:
        write_text(path, bench_page(entries) if path.suffix.lower() in (".html", ".htm") else _json(entries) + "\n")
