"""What a batch size costs that a process meets for the first time, and what a step costs in a larger one's graph.

``python -m benchmarks.new_sizes --model CONFIG``, on a GPU, with made-up weights, writes a line for each
size of decode steps. Its milliseconds are those of the first step, which loads kernels, of the capture of its graph,
of a replay, and of a replay of the largest size's graph with so many rows. The host waits around each of them.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.options import options
from rosebatch.config.run import RunConfig
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.engine import Engine
from rosebatch.engine.triton_runner.graphs import StepGraphs
from rosebatch.engine.triton_runner.runner import TritonRunner
from rosebatch.launch.launch import launch

# A first step, a capture, and replays.
_STEPS = 33


class Watch:
    """Times what graphs do; the names of ``times`` are ``first``, ``capture`` and ``replay``.

    Args:
        graphs: of decode steps, none captured yet.
        wait: for the device.
    """

    def __init__(self, graphs: StepGraphs[Any], wait: Callable[[], object]) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)
        self._wait = wait
        body, capture, replay = graphs.body, graphs._capture, graphs.replay
        graphs.body = lambda kind: self._time("first", lambda: body(kind))
        graphs.replay = lambda graph: self._time("replay", lambda: replay(graph))

        def captured(kind: Any) -> Any:
            timed, graphs.body = graphs.body, body
            found = self._time("capture", lambda: capture(kind))
            graphs.body = timed
            return found

        graphs._capture = captured  # type: ignore[method-assign]

    def _time(self, name: str, function: Callable[[], Any]) -> Any:
        self._wait()
        started = time.perf_counter()
        result = function()
        self._wait()
        self.times[name].append(1000 * (time.perf_counter() - started))
        return result

    def take(self) -> dict[str, float]:
        """The median milliseconds of each name since the last call."""
        found = {name: statistics.median(times) for name, times in self.times.items()}
        self.times.clear()
        return found


def decode_rows(engine: Engine, rows: int, prompt_len: int) -> None:
    """Decode steps of so many rows, and no others."""
    sampling = SamplingParams(max_tokens=_STEPS + 1, ignore_eos=True)
    prompts = ((row + 2,) * prompt_len for row in range(rows))
    requests = [Request(number, prompt, sampling) for number, prompt in enumerate(prompts)]
    assert len(list(engine.run(requests))) == rows


def main() -> None:
    """Write a line for each size, from the smallest."""
    given = options(__doc__, model=str, dtype="bfloat16", prompt_len=128, max_num_seqs=256)
    settings = {"load_format": "dummy", "device": "cuda", "dtype": given.dtype, "max_num_seqs": given.max_num_seqs}
    engine = launch(RunConfig.of(given.model, **settings, prefix_cache=False)).engine
    runner = engine.runner
    assert isinstance(runner, TritonRunner), "decode steps have graphs"
    watch, sizes = Watch(runner.decodes, torch.cuda.synchronize), runner.slots.buckets
    lines = {}
    for size in sizes:
        decode_rows(engine, size, given.prompt_len)
        lines[size] = watch.take()
    runner.slots.buckets = sizes[-1:]
    for size in sizes:
        decode_rows(engine, size, given.prompt_len)
        times = lines[size] | {f"in {sizes[-1]}": watch.take()["replay"]}
        sys.stdout.write(f"{size:>5}  " + "  ".join(f"{name} {ms:8.3f} ms" for name, ms in times.items()) + "\n")


if __name__ == "__main__":
    main()
