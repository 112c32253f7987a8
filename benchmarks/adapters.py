"""What LoRA adapters cost: the model alone, one merged, and rows that choose among those that are loaded.

``python -m benchmarks.adapters [--model configs/models/llama-3.1-8b.toml] [--rows 256] [--seqs 256] [--adapters 64]
[--max-loras 8]``.
The weights are random, and so are adapters of all linears. One engine is loaded at a time; the last has all adapters,
and its rows have none, one, and several in turn. Each line is JSON, the last one has the ratios to the model alone.
"""

import gc
import json
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import options
from rosebatch.bench.job_order import in_job_order
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.token_ids import TokenIds
from rosebatch.engine.engine import Engine
from rosebatch.engine.load import load_engine, pick_device
from rosebatch.model.adapters.adapter import Adapter
from rosebatch.model.adapters.by_row import Added
from rosebatch.model.adapters.changes import LowRank
from rosebatch.model.adapters.fields import AdapterFields
from rosebatch.model.adapters.folder import ADAPTER_CONFIG, ADAPTER_FILE
from rosebatch.model.random_weights import RandomWeights
from rosebatch.model.source import ModelSource, find_model

_DEVIATION = 0.02


def main() -> None:
    """Run all engines."""
    given = options(
        __doc__,
        model="configs/models/llama-3.1-8b.toml",
        device=("auto", "cuda", "cpu"),
        rows=256,
        seqs=0,
        prompt=512,
        length=128,
        adapters=64,
        several=[8],
        rank=16,
        max_loras=0,
        repeats=2,
        kv_cache_memory="32GiB",
        quantization="auto",
        batch_invariant=False,
    )
    switches = {"prefix_cache": False, "batch_invariant": given.batch_invariant}
    limits = RunConfig(
        model=given.model,
        load_format="dummy",
        device=given.device,
        quantization=given.quantization,
        max_num_seqs=given.seqs or given.rows,
        max_loras=given.max_loras or None,
        max_model_len=given.prompt + given.length,
        kv_cache_memory=given.kv_cache_memory,
        switches=switches,
    )
    device = pick_device(limits.device)
    source, seconds = find_model(limits, device), dict[str, float]()
    by_row = {"none used": 0, "1": 1, **{str(count): count for count in (*given.several, given.adapters)}}
    with tempfile.TemporaryDirectory() as folder:
        for name, count, cases in [
            ("base", 0, {"base": 0}),
            ("merged", 1, {"merged": 0}),
            ("", given.adapters, by_row),
        ]:
            began = time.perf_counter()
            own = replace(source, adapters=_adapters(Path(folder), count))
            engine = _load(own, limits, device, given.rank)
            _tell({"loaded": name or f"{count} adapters", "seconds": round(time.perf_counter() - began, 1)})
            for case, used in cases.items():
                runs = [_run(engine, given, used) for _ in range(given.repeats + 1)][1:]
                seconds[case] = statistics.median(run["seconds"] for run in runs)
                _tell({"adapters": case, "ratio": round(seconds["base"] / seconds[case], 3), "runs": runs})
            _end(engine)
    _tell({name: round(seconds["base"] / each, 3) for name, each in seconds.items()})


def _adapters(folder: Path, count: int) -> tuple[Adapter, ...]:
    """Adapters whose numbers ``RandomWeights`` makes. Their keys are found by files."""
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        (folder / name).touch()
    fields = AdapterFields.of({"peft_type": "LORA"})
    return tuple(Adapter(str(number), folder, fields, {}, {}, {}) for number in range(1, count + 1))


def _load(source: ModelSource, limits: RunConfig, device: torch.device, rank: int) -> Engine:
    """An engine whose random weights have adapters of their linears: one is merged."""
    count = len(source.adapters)

    def pair(weights: RandomWeights, name: str, shape: tuple[int, ...], number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(weights.device).manual_seed(zlib.crc32(f"{number} {name}".encode()))

        def make(*size: int) -> Tensor:
            return torch.empty(size, device=weights.device).normal_(0.0, _DEVIATION, generator=generator)

        return make(rank, shape[1]), make(shape[0], rank)

    def change(weights: RandomWeights, name: str, shape: tuple[int, ...]) -> LowRank | None:
        return LowRank((name,), *pair(weights, name, shape, 1), 1.0) if count == 1 and _is_linear(name, shape) else None

    def added(weights: RandomWeights, name: str, shape: tuple[int, ...]) -> tuple[Added | None, ...]:
        numbers = range(1, count + 1) if count > 1 else ()
        if not _is_linear(name, shape):
            return (None,) * len(numbers)
        return tuple(Added(name, *pair(weights, name, shape, number), (rank,)) for number in numbers)

    return load(source, limits, device, added, change)


def load(
    source: ModelSource, limits: RunConfig, device: torch.device, added: Callable[..., Any], change: Any = None
) -> Engine:
    """An engine whose random weights have these methods, see ``WeightSource``; None for a ``change`` of nothing."""
    before = RandomWeights.change, RandomWeights.added
    RandomWeights.change, RandomWeights.added = change or RandomWeights.change, added  # type: ignore[method-assign]
    try:
        return load_engine(source, limits, Switches.resolve(dict(limits.switches), device.type), device).engine
    finally:
        RandomWeights.change, RandomWeights.added = before  # type: ignore[method-assign]


def _is_linear(name: str, shape: Sequence[int]) -> bool:
    return len(shape) == 2 and "layers" in name and "proj" in name and "expert" not in name


def prompt_of(row: int, length: int, vocab: int) -> list[int]:
    """Token ids of a row, always the same."""
    return [(7919 * row + 31 * place * place) % min(vocab, 30_000) for place in range(length)]


def _run(engine: Engine, given: Any, used: int) -> dict[str, float]:
    """Seconds of a run, and of its prompts and decode steps on the device; rows have the first adapters in turn."""
    requests = [
        Request(
            row,
            TokenIds.of(prompt_of(row, given.prompt, engine.vocab_size)),
            SamplingParams(max_tokens=given.length, ignore_eos=True, temperature=1.0, seed=row),
            adapter=str(1 + row % used) if used else "",
        )
        for row in range(given.rows)
    ]
    stats = engine.restart_stats()
    began = time.perf_counter()
    tokens = sum(len(done.token_ids) for done in engine.run(in_job_order(requests, engine)))
    seconds = time.perf_counter() - began
    assert tokens == given.rows * given.length, "all rows are computed"
    parts = {"seconds": seconds, "prompts": stats.prefill_seconds, "decodes": stats.decode_seconds}
    return {**{name: round(each, 3) for name, each in parts.items()}, "loads": stats.adapter_loads}


def _end(engine: Engine) -> None:
    """Give its memory back."""
    engine.runner = None  # type: ignore[assignment]
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _tell(found: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
