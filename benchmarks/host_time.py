"""Processor time of a row, by an engine that schedules as on a GPU and computes nothing.

``python -m benchmarks.host_time [--model MODEL] [--kinds list numpy torch arrow]``: ``LLM.generate`` with prompts of
token ids, then ``run_file`` with a JSONL file of texts. The model gives its tokenizer alone. The fastest of several
runs counts: other work on the machine makes the others slower. The last line is JSON, in microseconds.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.batch_works import Texts
from benchmarks.options import options
from rosebatch.config.run import RunConfig
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import DecodeWindow, StepPlan, StepResult
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.engine.step_runner import Masks
from rosebatch.launch.launch import Launched, launch
from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file

# That of a run on a GPU.
_BLOCK_SIZE = 64
# As many tokens as a GPU of 80 GB has room for with a small model.
_CACHED_TOKENS = 1_000_000
_TOKEN_IDS = 49_000
_KINDS: dict[str, Callable[[np.ndarray], Any]] = {
    "list": lambda ids: ids.tolist(),
    "numpy": lambda ids: ids,
    "torch": torch.from_numpy,
    "arrow": pa.array,
}


@dataclass(frozen=True, slots=True)
class Case:
    """Prompts of so many token ids, of which the first ``shared`` are the same, and so many generated tokens."""

    rows: int
    shared: int
    own: int
    generated: int = 3


CASES = {
    "100": Case(2000, 0, 100),
    "1,310": Case(1000, 0, 1310),
    "1,200 shared, 110": Case(1000, 1200, 110),
    "20,000": Case(60, 0, 20_000),
    "100, 128 out": Case(512, 0, 100, 128),
}


class NoModel:
    """A runner that samples token 7."""

    def launch(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        """See ``rosebatch.engine.step_runner.StepRunner``."""
        if isinstance(plan, DecodeWindow):
            counts = [row.length for row in plan.rows]
        else:
            counts = [chunk.sampled for chunk in plan.chunks if chunk.sampled]
        result = StepResult([[7] * count for count in counts])
        return lambda: result


def without_model(launched: Launched, cached_tokens: int = _CACHED_TOKENS) -> LLM:
    """A model's tokenizer before an engine that computes nothing."""
    scheduler = Scheduler(
        BlockPool(cached_tokens // _BLOCK_SIZE, _BLOCK_SIZE),
        max_num_seqs=256,
        max_num_batched_tokens=16384,
        policy=SeparateDecodes(8),
    )
    engine = Engine(
        scheduler, NoModel(), vocab_size=_TOKEN_IDS + 1000, max_model_len=32768, eos_token_ids=(0,), async_depth=1
    )
    return LLM.of(replace(launched, engine=engine))


def prompts_of(case: Case, kind: str, seed: int) -> list[Any]:
    """Random token ids."""
    rng = np.random.default_rng(seed)
    front = rng.integers(2, _TOKEN_IDS, case.shared)
    made = _KINDS[kind]
    return [made(np.concatenate([front, rng.integers(2, _TOKEN_IDS, case.own)])) for _ in range(case.rows)]


def fastest(repeats: int, rows: int, prepare: Callable[[int], Callable[[], object]]) -> float:
    """Microseconds of processor time a row, of all threads. What ``prepare`` does is not counted."""
    found = []
    for repeat in range(repeats):
        run = prepare(repeat)
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return round(min(found) / rows * 1e6, 1)


def of_ids(llm: LLM, case: Case, kind: str, repeats: int) -> float:
    """``LLM.generate`` with token ids."""
    sampling = SamplingParams(max_tokens=case.generated, ignore_eos=True)

    def prepare(repeat: int) -> Callable[[], object]:
        prompts = prompts_of(case, kind, repeat)
        return lambda: llm.generate(prompts, sampling)

    return fastest(repeats, case.rows, prepare)


def of_texts(llm: LLM, vocabulary: Sequence[str], rows: int, repeats: int) -> float:
    """``run_file`` with texts: an instruction of 1,200 tokens, and 110 of each row."""
    with tempfile.TemporaryDirectory() as folder:

        def prepare(repeat: int) -> Callable[[], object]:
            texts = Texts(list(vocabulary), repeat)
            front, source = texts.of(1200), Path(folder) / f"{repeat}.jsonl"
            lines = [json.dumps({"prompt": f"{front} {texts.of(110)}"}) + "\n" for _ in range(rows)]
            source.write_text("".join(lines), encoding="utf-8")
            sampling = {"max_tokens": 3, "ignore_eos": True}
            return lambda: run_file(source, source.with_suffix(".out.jsonl"), model=llm, sampling=sampling, quiet=True)

        return fastest(repeats, rows, prepare)


def main() -> None:
    """Measure all, and print as they come."""
    given = options(
        __doc__,
        model=None,
        kinds={"choices": list(_KINDS), "default": list(_KINDS), "nargs": "+"},
        scale=1.0,
        repeats=5,
    )
    launched = launch(RunConfig.of(given.model, device="cpu"))
    llm = without_model(launched)
    found: dict[str, float] = {}

    def tell(name: str, microseconds: float) -> None:
        found[name] = microseconds
        sys.stdout.write(f"{name:>30}{microseconds:10.1f}\n")
        sys.stdout.flush()

    for name, case in CASES.items():
        scaled = replace(case, rows=max(1, round(case.rows * given.scale)))
        for kind in given.kinds:
            tell(f"{name}, {kind}", of_ids(llm, scaled, kind, given.repeats))
    if launched.tokenizer is not None:
        vocabulary = launched.tokenizer.backend.get_vocab()
        tell("texts of a file", of_texts(llm, list(vocabulary), max(1, round(1000 * given.scale)), given.repeats))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
