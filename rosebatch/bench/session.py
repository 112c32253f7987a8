"""A whole bench run: comparisons, our engine and its peers, one scenario after the other."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import geometric_mean
from typing import Any

import torch

from rosebatch.bench.against import Peer, other_form, replay_peer, require_installed, run_peer
from rosebatch.bench.case import Case, release_memory, spread
from rosebatch.bench.compare import compare_switch
from rosebatch.bench.profile import Profile, attribute_case, profile_case
from rosebatch.bench.replay import replay_case
from rosebatch.bench.throughput import against_floor, time_case
from rosebatch.bench.trace import Arrivals
from rosebatch.bench.worker_throughput import open_pool, time_case_over
from rosebatch.bench.workload import require_fits
from rosebatch.core.errors import UserError
from rosebatch.engine.metrics.roofline import Rates, measure_rates
from rosebatch.launch.plan import warn_once
from rosebatch.model.hf.folder import has_config

Entry = dict[str, Any]


def run_session(
    cases: Sequence[Case],
    *,
    repeats: int,
    switches: Sequence[str],
    peers: Sequence[Peer],
    import_seconds: float,
    profile: Profile | None = None,
) -> Iterator[Entry]:
    """Run all cases, with the comparisons and peers that were requested.

    Peers come first, while this process holds no GPU memory. With ``switches`` and no peers, our engine is timed in
    comparisons only.

    Yields:
        each result as soon as it is known. Every result has a ``scenario``, a ``model`` and a ``kind``:

        - ``run``: our engine, see ``time_case`` and ``against_floor``. For a scenario's further models
          ``time_over_first`` is the time over that of the first model.
        - ``peer``: another engine on the scenario of the last run. ``beside`` is the model of that run, ``ratio`` how
          many times faster ours is. If the peer failed, the result has an ``error`` instead.

        Of both, ``first_over_warm`` is the time of the first run over that of the others. The first of a process has
        ``cold_s``, the seconds from its start to the end of its first run, and a peer ``cold_ratio``.

        - ``comparison``: see ``compare_switch``.
        - ``attribution``: see ``attribute_case``.
        - ``profile``: see ``profile_case``.

    Raises:
        UserError: a run of ours is impossible or out of memory.
    """
    for case in cases:
        with _naming(case, cases):
            require_fits(case.workload(), case.source.config.max_model_len)
    for peer in peers:
        require_installed(peer)
        _warn_of_other_forms(peer, cases)
    theirs = _cases_of_peers(cases)
    others = [(peer, run_peer(peer, list(theirs.values()), repeats)) for peer in peers]
    rates: Rates | None = None
    is_cold = is_first = True
    firsts: dict[str, float] = {}
    for case in cases:
        for switch in switches:
            is_cold = False
            with _naming(case, cases):
                compared = compare_switch(case, switch, repeats)
            yield compared
        if switches and not peers:
            continue
        with _naming(case, cases):
            ours = _time(case, repeats, import_seconds)
        ours |= _first_run(ours, is_cold=is_cold)
        # The floor is that of one device. Behind the first run, which includes the start of the GPU.
        if is_first and not any(map(_is_divided, cases)):
            rates = measure_rates(case.device)
            release_memory()
        is_cold = is_first = False
        ours |= against_floor(case, ours["elapsed_s"], rates)
        if case.name in firsts:
            ours["time_over_first"] = ours["elapsed_s"] / firsts[case.name]
        firsts.setdefault(case.name, ours["elapsed_s"])
        yield ours
        for peer, timed in others:
            yield _beside(ours, theirs[case.name], peer, timed[case.name], rates)
    # Last, after everything that is timed: a profiler may go on working in the same process.
    for case in cases:
        with _naming(case, cases):
            profiled = [attribute_case(case)] if case.attribution else []
            if profile is not None:
                profiled.append(profile_case(case, profile, alone=len(cases) == 1))
        yield from profiled


def _first_run(entry: Entry, *, is_cold: bool) -> Entry:
    """What users wait for who run a job once."""
    startup = entry["startup_s"]
    found = {"first_over_warm": startup["warm-up"] / entry["elapsed_s"]}
    return found | {"cold_s": sum(startup.values())} if is_cold else found


def _time(case: Case, repeats: int, import_seconds: float) -> Entry:
    if _is_divided(case):
        with open_pool(case) as pool:
            return time_case_over(pool, case, repeats, import_seconds)
    return time_case(case, repeats, import_seconds)


@contextmanager
def _naming(case: Case, cases: Sequence[Case], smaller: str = "scenario, fewer prompts") -> Iterator[None]:
    """An error names its case where there are several, and says what mends a lack of GPU memory."""
    name = "" if len(cases) == 1 else f"{case.name}, {case.source.name}: "
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = str(error).partition(". ")[0]
        raise UserError(f"{name}{what}: choose a smaller {smaller} or less --kv-cache-memory") from None
    except UserError as error:
        raise type(error)(f"{name}{error}") from None


def _is_divided(case: Case) -> bool:
    return case.config.data_parallel_size != 1


def run_replays(
    case: Case, arrivals: Arrivals, scales: Sequence[float], peers: Sequence[Peer], import_seconds: float
) -> Iterator[Entry]:
    """Replay arrivals on our engine and its peers.

    Peers run first, while this process holds no GPU memory.

    Yields:
        for each scale our result, see ``replay_case``, and that of each peer. Those have ``peer``, or an ``error``.

    Raises:
        UserError: a request is too long for the engine, or ours is out of memory.
    """
    for peer in peers:
        require_installed(peer)
        _warn_of_other_forms(peer, [case])
    require_fits(arrivals.workload(0), case.source.config.max_model_len)
    others = [(peer, _try_replay(peer, case, arrivals, scales)) for peer in peers]
    with _naming(case, [case], "model"):
        ours = replay_case(case, arrivals, scales, import_seconds)
    for number, (scale, own) in enumerate(zip(scales, ours, strict=True)):
        yield own
        for peer, theirs in others:
            named = {"kind": "replay", "scenario": arrivals.name, "model": case.source.name, "scale": scale}
            yield {**named, "peer": peer.name, "args": peer.args, **theirs[number]}


def _warn_of_other_forms(peer: Peer, cases: Sequence[Case]) -> None:
    for case in cases:
        if (sentence := other_form(peer, case.source)) is not None:
            warn_once(sentence)


def _try_replay(peer: Peer, case: Case, arrivals: Arrivals, scales: Sequence[float]) -> list[Entry]:
    try:
        return replay_peer(peer, case, arrivals, scales)
    except UserError as error:
        return [{"error": str(error)} for _ in scales]


def summarize(entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Geometric means over the scenarios, for each model: what our engine reached, and its ratio to each peer."""
    runs = [entry for entry in entries if entry["kind"] == "run"]
    peers = [entry for entry in entries if entry["kind"] == "peer" and "error" not in entry]
    return {
        model: _means(
            [run for run in runs if run["model"] == model], [entry for entry in peers if entry["beside"] == model]
        )
        for model in dict.fromkeys(run["model"] for run in runs)
    }


def _means(runs: Sequence[Entry], peers: Sequence[Entry]) -> dict[str, Any]:
    means = {
        name: geometric_mean([run[name] for run in runs])
        for name in ("elapsed_s", "output_tokens_per_s", "share_of_floor", "time_over_first")
        if all(name in run for run in runs)
    }
    names = dict.fromkeys(entry["peer"] for entry in peers)
    ratios = {name: geometric_mean([entry["ratio"] for entry in peers if entry["peer"] == name]) for name in names}
    return means | {"ratios": ratios}


def _cases_of_peers(cases: Sequence[Case]) -> dict[str, Case]:
    """For each scenario the first case whose model other engines can run.

    If there is none, any case: the peer then reports the error.
    """
    chosen: dict[str, Case] = {}
    for case in sorted(cases, key=lambda case: case.source.folder is None and not has_config(case.source.config)):
        chosen.setdefault(case.name, case)
    return chosen


def _beside(ours: Entry, case: Case, peer: Peer, theirs: Entry, rates: Rates | None) -> Entry:
    entry = {"kind": "peer", "scenario": case.name, "model": case.source.name, "beside": ours["model"]}
    entry |= {"peer": peer.name, "args": peer.args, **theirs}
    if "error" in theirs:
        return entry
    seconds = spread(theirs["seconds"])["median"]
    entry |= _first_run({"elapsed_s": seconds, **entry}, is_cold=theirs["is_cold"])
    del entry["is_cold"]
    if "cold_s" in entry and "cold_s" in ours:
        entry["cold_ratio"] = entry["cold_s"] / ours["cold_s"]
    rate_names = [name for name in ours if name.endswith("_per_s")]
    entry |= {name: ours[name] * ours["elapsed_s"] / seconds for name in rate_names}
    return entry | {"elapsed_s": seconds, "ratio": seconds / ours["elapsed_s"]} | against_floor(case, seconds, rates)
