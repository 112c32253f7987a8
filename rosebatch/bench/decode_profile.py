"""Where the time of a decode step goes, on a GPU: each kernel of its graph, and what kind of work it is.

``python -m rosebatch.bench.decode_profile qwen3-0.6b:bfloat16:32:192 gpt2:float16:256:550:sampled`` takes models of
``configs/models`` with random weights, the number of sequences, and the tokens of each. Kernels of a graph overlap: a
kernel's share is how far it moves the end of all that ran so far, so that the shares add up to the step.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rosebatch.bench.case import release_memory
from rosebatch.bench.floor import find_floor, measure_rates
from rosebatch.bench.scenario import Sampling, configs_dir
from rosebatch.bench.workload import Workload
from rosebatch.config import EngineConfig
from rosebatch.engine.load import load_engine, pick_device
from rosebatch.engine.stats import EngineStats
from rosebatch.model.source import find_model
from rosebatch.toggles import Toggles

_LAST = "feedback"
# The first that matches a kernel's name; what matches none is work of PyTorch's own.
_PARTS = {
    "attention, with what it appends": r"^_(decode|prefill)",
    "norms": r"^_norm",
    "sampling": r"^_(summarise|choose)",
    _LAST: r"^_advance",
    "activations": r"^_(activation|silu_mul|bias_residual)",
    "matrix products": r"^_product|gemm|nvjet|cutlass|cublas|splitK",
}
_OTHER = "embedding and the rest"
_OUTPUT_TOKENS = 96
_WARM_UP_STEPS = 16
_PROFILED_PLANS = 4


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel of a step, in microseconds.

    Attributes:
        name: without namespaces and arguments.
        part: the kind of work.
        duration: from its start to its end.
        advances: from the end of all before it to its own; 0 where it ended earlier.
    """

    name: str
    part: str
    duration: float
    advances: float


@dataclass(frozen=True, slots=True)
class Subject:
    """What to profile: ``model:dtype:sequences:tokens``, then ``:sampled`` for top-k 50 and top-p 0.9."""

    model: str
    dtype: str
    sequences: int
    tokens: int
    sampled: bool

    @classmethod
    def parse(cls, text: str) -> "Subject":
        """From the command line.

        Raises:
            ValueError: it is not of that form.
        """
        model, dtype, sequences, tokens, *rest = text.split(":")
        if rest not in ([], ["sampled"]):
            raise ValueError(f"{text}: what follows the tokens can only be 'sampled'")
        return cls(model, dtype, int(sequences), int(tokens), bool(rest))


def kernel_times(events: Iterable[dict[str, Any]]) -> list[KernelTime]:
    """The kernels of the step of median length, from a Chrome trace's events, in the order in which they began.

    A step ends with the kernel that feeds its tokens back. Steps in front of which the host changed something have
    kernels more than the others, and are left out.
    """
    steps: list[list[dict[str, Any]]] = [[]]
    for event in sorted((e for e in events if e.get("cat") == "kernel"), key=lambda e: float(e["ts"])):
        steps[-1].append(event)
        if _part(event["name"]) == _LAST:
            steps.append([])
    # The first may have begun before the trace, and what follows the last is none.
    whole = steps[1:-1]
    assert whole, "the trace has two steps at least"
    usual = Counter(map(len, whole)).most_common(1)[0][0]
    timed = sorted((_advances(step) for step in whole if len(step) == usual), key=_total)
    return timed[len(timed) // 2]


def _advances(step: list[dict[str, Any]]) -> list[KernelTime]:
    times, end = [], float(step[0]["ts"])
    for event in step:
        stop = float(event["ts"]) + float(event["dur"])
        times.append(KernelTime(_short(event["name"]), _part(event["name"]), float(event["dur"]), max(stop - end, 0.0)))
        end = max(end, stop)
    return times


def _total(times: Sequence[KernelTime]) -> float:
    return sum(time.advances for time in times)


def by_key(times: Sequence[KernelTime], key: str) -> dict[str, tuple[int, float, float]]:
    """Count, advance and duration in all for each ``name`` or each ``part``, the longest first."""
    sums: dict[str, tuple[int, float, float]] = {}
    for time in times:
        count, advances, duration = sums.get(getattr(time, key), (0, 0.0, 0.0))
        sums[getattr(time, key)] = count + 1, advances + time.advances, duration + time.duration
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


def profile_step(subject: Subject) -> tuple[float, list[KernelTime], float]:
    """Microseconds of a step without the profiler, its kernels, and the microseconds of its floor."""
    device = pick_device("cuda")
    path = str(configs_dir() / "models" / f"{subject.model}.toml")
    source = find_model(path, "dummy", subject.dtype, device)
    toggles = Toggles.resolve({"prefix_cache": False}, device.type)
    engine = load_engine(source, EngineConfig(max_num_seqs=subject.sequences), toggles, device).engine
    prompts = torch.randint(source.config.vocab_size, (subject.sequences, subject.tokens)).tolist()
    sampling = Sampling(temperature=1.0, top_k=50, top_p=0.9) if subject.sampled else Sampling()
    for request in Workload(prompts, [_OUTPUT_TOKENS] * subject.sequences).requests(sampling):
        engine.add(request)
    while not engine.stats.graph_replays or engine.stats.decode_steps < _WARM_UP_STEPS:
        engine.step()
    engine.stats = EngineStats()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_PROFILED_PLANS):
            engine.step()
        torch.cuda.synchronize()
    times = kernel_times(_events(profiled))
    engine.stats = EngineStats()
    while engine.has_unfinished:
        engine.step()
    microseconds = engine.stats.decode_seconds / engine.stats.decode_steps * 1e6
    rates = measure_rates(device.type)
    assert rates is not None, "a GPU has a floor"
    floor = find_floor(
        source.config,
        source.dtype.itemsize,
        [subject.tokens + _OUTPUT_TOKENS // 2] * subject.sequences,
        [2] * subject.sequences,
        max_num_seqs=subject.sequences,
        rates=rates,
    )
    return microseconds, times, floor.decode_s * 1e6


def _events(profiled: profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_bytes())["traceEvents"]
    return events


def _part(name: str) -> str:
    return next((part for part, pattern in _PARTS.items() if re.search(pattern, name)), _OTHER)


def _short(name: str) -> str:
    """Without return type, namespaces and arguments: what is left of ``void ns::kernel<int>(float*)`` is ``kernel``."""
    return re.split(r"[<(]", name.removeprefix("void "))[0].rpartition("::")[2]


def _write(subject: Subject, microseconds: float, times: Sequence[KernelTime], floor: float) -> None:
    total = _total(times)
    sampled = ", sampled" if subject.sampled else ""
    lines = [
        f"{subject.model} {subject.dtype}, {subject.sequences} sequences of {subject.tokens} tokens{sampled}: a step "
        f"takes {microseconds:.0f} µs, {total:.0f} in the profile; floor {floor:.0f} µs; {len(times)} kernels"
    ]
    for key in ("part", "name"):
        lines.append(f"  {key:<44}{'kernels':>8}{'µs':>9}{'share':>7}{'each':>8}{'duration':>10}")
        for name, (count, advances, duration) in by_key(times, key).items():
            share, each = f"{advances / total:.1%}", f"{advances / count:.2f}"
            lines.append(f"  {name[:43]:<44}{count:>8}{advances:>9.0f}{share:>7}{each:>8}{duration / count:>10.2f}")
    sys.stdout.write("\n".join(lines) + "\n\n")


def main() -> None:
    """Write two tables for each subject: by the kind of work, and by kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("subjects", nargs="+", type=Subject.parse, metavar="MODEL:DTYPE:SEQUENCES:TOKENS[:sampled]")
    for subject in parser.parse_args().subjects:
        _write(subject, *profile_step(subject))
        release_memory()


if __name__ == "__main__":
    main()
