"""What ``rosebatch bench --profile`` and suites with an attribution add after the timed runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rosebatch.bench.attribution import attribute, trace_beginning
from rosebatch.bench.case import Case, launch_case, release_memory
from rosebatch.bench.parts import ranges
from rosebatch.bench.throughput import run_once
from rosebatch.core.errors import FlagError, UserError
from rosebatch.launch.launch import Launched


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile of each case.

    Attributes:
        kind: ``torch`` writes a trace, ``nvtx`` puts ranges around one run for another profiler.
        output: the trace's file. With several cases each has its own, with the case's names in it.
    """

    kind: Literal["torch", "nvtx"]
    output: Path


def choose_profile(kind: Literal["parts", "torch", "nvtx"] | None, output: Path, device: str) -> Profile | None:
    """From the command line. ``parts`` is no profile but an attribution of each case.

    Raises:
        FlagError: the device has no NVTX ranges, or the trace's folder does not exist.
    """
    if kind == "nvtx" and device != "cuda":
        raise FlagError(f"--profile nvtx: there are no NVTX ranges on {device}; use --profile torch")
    if kind == "torch" and not output.parent.is_dir():
        raise FlagError(f"--profile-output {output}: {output.parent} is not a folder")
    return None if kind is None or kind == "parts" else Profile(kind, output)


def attribute_case(case: Case) -> dict[str, Any]:
    """Where the time of a case goes (see ``attribute``), on a warm engine launched for it."""
    launched = _warm(case)
    cuda = case.device == "cuda"
    found = attribute(launched.engine, lambda run: case.workload(run).requests(case.scenario.sampling), cuda=cuda)
    switches = launched.description["toggles"]
    del launched
    release_memory()
    return {"kind": "attribution", "scenario": case.name, "model": case.source.name, "toggles": switches, **found}


def profile_case(case: Case, profile: Profile, *, alone: bool) -> dict[str, Any]:
    """Profile one run of a case on a warm engine launched for it.

    Args:
        case: what to run.
        profile: how.
        alone: whether there is no other case.

    Returns:
        ``profile``, its kind; for a trace ``output``, its file, and ``events``, their number.

    Raises:
        UserError: the trace cannot be written.
    """
    launched = _warm(case)
    entry: dict[str, Any] = {"kind": "profile", "scenario": case.name, "model": case.source.name}
    if profile.kind == "nvtx":
        # nsys --capture-range=cudaProfilerApi and ncu --profile-from-start off see this run alone.
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        with ranges(launched.engine, torch.cuda.nvtx.range):
            run_once(launched.engine, case.workload(1), case.scenario.sampling)
            torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        entry |= {"profile": "nvtx"}
    else:
        path = profile.output
        if not alone:
            path = path.with_stem(f"{path.stem}-{case.name}-{case.source.name}".replace("/", "-"))
        requests = case.workload(1).requests(case.scenario.sampling)
        try:
            events = trace_beginning(launched.engine, requests, cuda=case.device == "cuda", path=path)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        entry |= {"profile": "torch", "output": str(path), "events": len(events)}
    del launched
    release_memory()
    return entry


def _warm(case: Case) -> Launched:
    """An engine that has compiled and captured what the case needs."""
    launched = launch_case(case.config)
    run_once(launched.engine, case.workload(0), case.scenario.sampling)
    return launched
