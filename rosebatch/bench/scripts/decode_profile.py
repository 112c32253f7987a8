"""Where the time of a decode step on a GPU goes: the kernels of its graph, and the kind of work of each.

``python -m rosebatch.bench.scripts.decode_profile qwen3-0.6b:bfloat16:32:192 gpt2:float16:256:550:sampled`` takes
models of ``configs/models`` with random weights, the number of sequences, and the tokens of each.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rosebatch.bench.attribution import KernelTime, by_key, split_steps, total, trace, usual_step
from rosebatch.bench.case import release_memory
from rosebatch.bench.scenario import Sampling, configs_dir
from rosebatch.bench.workload import Workload
from rosebatch.config import RunConfig
from rosebatch.engine.load import load_engine, pick_device
from rosebatch.engine.roofline import find_floor, measure_rates
from rosebatch.model.source import find_model
from rosebatch.toggles import Toggles

_OUTPUT_TOKENS = 96
_WARM_UP_STEPS = 16
_PROFILED_PLANS = 4
_FORM = "MODEL:DTYPE:SEQUENCES:TOKENS[:sampled]"


@dataclass(frozen=True, slots=True)
class Subject:
    """What to profile: ``model:dtype:sequences:tokens``. A further ``:sampled`` means top-k 50 and top-p 0.9."""

    model: str
    dtype: str
    sequences: int
    tokens: int
    sampled: bool

    @classmethod
    def parse(cls, text: str) -> "Subject":
        """Read it from the command line.

        Raises:
            ArgumentTypeError: the text has another form.
        """
        match = re.fullmatch(r"([^:]+):([^:]+):(\d+):(\d+)(:sampled)?", text)
        if match is None:
            raise argparse.ArgumentTypeError(f"{text!r} does not have the form {_FORM}")
        return cls(match[1], match[2], int(match[3]), int(match[4]), match[5] is not None)


def profile_step(subject: Subject) -> tuple[float, list[KernelTime], float]:
    """Microseconds of a step without the profiler, the step's kernels, and the microseconds of its floor."""
    device = pick_device("cuda")
    path = str(configs_dir() / "models" / f"{subject.model}.toml")
    source = find_model(path, "dummy", subject.dtype, device)
    toggles = Toggles.resolve({"prefix_cache": False}, device.type)
    engine = load_engine(source, RunConfig(max_num_seqs=subject.sequences), toggles, device).engine
    prompts = torch.randint(source.config.vocab_size, (subject.sequences, subject.tokens)).tolist()
    sampling = Sampling(temperature=1.0, top_k=50, top_p=0.9) if subject.sampled else Sampling()
    for request in Workload(prompts, [_OUTPUT_TOKENS] * subject.sequences).requests(sampling):
        engine.add(request)
    while not engine.stats.graph_replays or engine.stats.decode_steps < _WARM_UP_STEPS:
        engine.step()

    def plans() -> None:
        for _ in range(_PROFILED_PLANS):
            engine.step()

    times = usual_step(split_steps(trace(plans)).decodes)
    engine.restart_stats()
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


def _write(subject: Subject, microseconds: float, times: Sequence[KernelTime], floor: float) -> None:
    whole = total(times)
    sampled = ", sampled" if subject.sampled else ""
    lines = [
        f"{subject.model} {subject.dtype}, {subject.sequences} sequences of {subject.tokens} tokens{sampled}: a step "
        f"takes {microseconds:.0f} µs, {whole:.0f} in the profile; floor {floor:.0f} µs; {len(times)} kernels"
    ]
    for key in ("part", "name"):
        lines.append(f"  {key:<44}{'kernels':>8}{'µs':>9}{'share':>7}{'each':>8}{'duration':>10}")
        for name, (count, advances, duration) in by_key(times, key).items():
            share, each = f"{advances / whole:.1%}", f"{advances / count:.2f}"
            lines.append(f"  {name[:43]:<44}{count:>8}{advances:>9.0f}{share:>7}{each:>8}{duration / count:>10.2f}")
    sys.stdout.write("\n".join(lines) + "\n\n")


def main() -> None:
    """Print two tables for each subject: by kind of work, and by kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("subjects", nargs="+", type=Subject.parse, metavar=_FORM)
    for subject in parser.parse_args().subjects:
        _write(subject, *profile_step(subject))
        release_memory()


if __name__ == "__main__":
    main()
