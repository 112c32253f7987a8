"""A/B runs: two engines that differ in one switch take turns on the same work."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from rosebatch.bench.case import Case, launch_case, needed_kv_memory, release_memory, spread
from rosebatch.bench.throughput import Run, machine_versions, run_once
from rosebatch.config.switches import Switches, flag, hiding, is_on, missing
from rosebatch.core.errors import FlagError
from rosebatch.job.report.provenance import gpu_name
from rosebatch.launch.plan import resolve_switches

ALL = "all"


@dataclass(frozen=True, slots=True)
class Turns:
    """The run of each turn, with the switch on and off."""

    on: list[Run]
    off: list[Run]

    @property
    def ratios(self) -> list[float]:
        """For each turn, how many times faster it is with the switch on."""
        return [off.seconds / on.seconds for on, off in zip(self.on, self.off, strict=True)]


def chosen_switches(names: Sequence[str], device: str, switches: Switches, without: Mapping[str, str]) -> list[str]:
    """Fields of ``Switches`` from names; ``all`` means those that are on by default and can have an effect.

    Args:
        names: as given.
        device: of the run.
        switches: of the run.
        without: switches that change nothing for any model of the run, and why.

    Raises:
        FlagError: there is no such switch, or it does nothing on the device, for the model or beside a switch that is
            off.
    """
    served = [switch.name for switch in fields(Switches) if device in switch.metadata["devices"]]
    idle = {name: f" with {flag(off, on=False)}" for name in served if (off := missing(name, switches))}
    idle |= {name: f": {reason}" for name, reason in without.items()}
    usual = [switch.name for switch in fields(Switches) if is_on(switch, device)]
    known = [switch.name for switch in fields(Switches)]
    chosen: list[str] = []
    for name in names:
        field = name.replace("-", "_")
        if name != ALL and field not in known:
            flags = ", ".join(switch.replace("_", "-") for switch in [*known, ALL])
            raise FlagError(f"--compare {name}: no such switch; choose from {flags}")
        if name != ALL and field not in served:
            raise FlagError(f"--compare {name}: this switch does nothing on {device}; leave it out or change --device")
        if field in idle:
            raise FlagError(f"--compare {name}: this switch has no effect{idle[field]}")
        chosen += [each for each in usual if each not in idle] if name == ALL else [field]
    return list(dict.fromkeys(chosen))


def take_turns(on: Callable[[int], Run], off: Callable[[int], Run], repeats: int) -> Turns:
    """Warm both sides up, then time them in turn: whatever slows the machine down slows both.

    Args:
        on, off: execute the run with this number; 0 is the warm-up.
    """
    for side in (on, off):
        side(0)
    turns = [(on(number), off(number)) for number in range(1, repeats + 1)]
    assert all(a.tally.output_tokens == b.tally.output_tokens for a, b in turns), "both sides do the same work"
    return Turns([a for a, _ in turns], [b for _, b in turns])


def compare_switch(case: Case, switch: str, repeats: int) -> dict[str, Any]:
    """Time a case with a switch on and off. Both engines are loaded at once, with no more KV cache than they need.

    Switches that would hide this one's effect are off on both sides; the result names them, each with the reason.

    Raises:
        FlagError: the device does not support the switch.
    """
    config = replace(case.config, kv_cache_memory=case.config.kv_cache_memory or needed_kv_memory(case))
    hidden = hiding(switch, resolve_switches(config, case.device))

    def side(on: bool) -> tuple[Callable[[int], Run], dict[str, Any]]:
        switches = {**config.switches, **dict.fromkeys(hidden, False), switch: on}
        launched = launch_case(replace(config, switches=switches))
        return lambda run: run_once(launched.engine, case.workload(run), case.scenario.sampling), launched.description

    (on, description), (off, _) = side(True), side(False)
    turns = take_turns(on, off, repeats)
    del on, off
    release_memory()
    tokens = sum(case.workload().output_lens)
    return {
        "kind": "comparison",
        "scenario": case.name,
        "model": case.source.name,
        "switch": switch,
        "switched_off": {
            other: f"{flag(switch)} has no effect{where} while it is on" for other, where in hidden.items()
        },
        "output_tokens": tokens,
        "on": _side(turns.on, tokens),
        "off": _side(turns.off, tokens),
        "ratios": turns.ratios,
        "ratio": spread(turns.ratios),
        "workload": msgspec.to_builtins(case.scenario),
        "engine": description,
        "versions": machine_versions(),
        "gpu": gpu_name(),
    }


def _side(runs: list[Run], tokens: int) -> dict[str, Any]:
    return {
        "seconds": [run.seconds for run in runs],
        "output_tokens_per_s": spread([tokens / run.seconds for run in runs]),
        "syncs": runs[-1].stats.syncs,
    }
