"""Processor time of a row, by an engine that schedules as on a GPU and computes nothing.

``python -m benchmarks.host_time [--model MODEL] [--kinds list numpy torch arrow] [--runner none] [--files]``:
``LLM.generate`` with prompts of token ids, then ``run_file`` with a JSONL file of texts; with ``--files``, with JSONL
and Parquet files of ids too, and with lists of choices. The runner is the one of a GPU without its kernels, so what it
packs and looks up counts; ``none`` does not even that. The model gives its tokenizer and its layers' kinds alone. The
fastest of several runs counts: other work on the machine makes the others slower. The last line is JSON, in
microseconds.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch

from benchmarks.batch_works import Texts
from benchmarks.options import options
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches, is_on
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import DecodeWindow, StepPlan, StepResult
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.engine.step_runner import Masks, StepRunner
from rosebatch.launch.launch import Launched, launch
from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file

# Those of a run on a GPU.
_BLOCK_SIZE, _SLOTS, _BUDGET, _WINDOW, _MOST_LEN = 64, 256, 16384, 8, 32768
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
    "1,200 shared, 110": Case(4000, 1200, 110),
    "20,000": Case(60, 0, 20_000),
    "100, 128 out": Case(512, 0, 100, 128),
}


class NoModel:
    """A runner that samples token 7, or the first that a grammar allows."""

    def __init__(self) -> None:
        self._guided: set[int] = set()

    def launch(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        """See ``rosebatch.engine.step_runner.StepRunner``."""
        self._guided.update(spec.id for spec in plan.started if spec.guided)
        if isinstance(plan, DecodeWindow):
            counts = [row.length for row in plan.rows if row.length]
        else:
            counts = [chunk.sampled for chunk in plan.chunks if chunk.sampled]
        guided = [number for number, i in enumerate(plan.sampled_ids) if i in self._guided]

        def wait() -> StepResult:
            ids = [[7] * count for count in counts]
            for number, words in zip(guided, masks() if guided else (), strict=True):
                ids[number] = [int(np.unpackbits(words.view(np.uint8), bitorder="little").argmax())]
            return StepResult(ids)

        return wait


def without_kernels(launched: Launched, slots: int = _SLOTS) -> StepRunner:
    """The runner of a GPU, whose steps launch nothing and sample token 7."""
    # Without a GPU, kernels can be imported for Triton's interpreter alone.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from rosebatch.engine.cache.kv_cache import KVCache
    from rosebatch.engine.torch_runner.runner import TorchRunner
    from rosebatch.engine.triton_runner.graphs import Ran
    from rosebatch.engine.triton_runner.runner import TritonRunner
    from rosebatch.ops.device import device_ops
    from rosebatch.ops.select import select

    assert isinstance(launched.engine.runner, TorchRunner), "the model is on a CPU"
    model, device = launched.engine.runner.model, torch.device("cpu")
    off = {"cuda_graph", "hopper_prefill"}
    switches = Switches(**{each.name: is_on(each, "cuda") and each.name not in off for each in fields(Switches)})
    ops = select(switches, "cuda")
    cache = KVCache([spec.planes for spec in model.mixers], [1], _BLOCK_SIZE, torch.float32, device, ops)
    limits: dict[str, Any] = {
        "max_num_seqs": slots,
        "max_len": _MOST_LEN,
        "window": _WINDOW,
        "vocab_size": _TOKEN_IDS + 1000,
    }
    runner: Any = TritonRunner(model, cache, ops, device_ops(switches), switches, eos_token_ids=(0,), **limits)
    nothing = torch.zeros(slots, 1)
    runner.decodes = runner.packed = SimpleNamespace(enabled=True, run=lambda kind, steps=1: Ran(nothing))
    runner.model, runner.sampler.sample = SimpleNamespace(logits=lambda hidden: hidden), lambda *_, **__: None
    runner.cache.change = lambda *_: None
    runner.state.history.fill_(7)
    runner.sampler.first_tokens.fill_(7)
    found: StepRunner = runner
    return found


def without_model(launched: Launched, runner: StepRunner, cached_tokens: int = _CACHED_TOKENS) -> LLM:
    """A model's tokenizer before an engine that computes nothing."""
    scheduler = Scheduler(
        BlockPool(cached_tokens // _BLOCK_SIZE, _BLOCK_SIZE),
        max_num_seqs=_SLOTS,
        max_num_batched_tokens=_BUDGET,
        policy=SeparateDecodes(_WINDOW),
    )
    engine = Engine(
        scheduler,
        runner,
        vocab_size=_TOKEN_IDS + 1000,
        max_model_len=_MOST_LEN,
        eos_token_ids=(0,),
        async_depth=1,
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


def of_file(llm: LLM, rows: int, repeats: int, write: Callable[[Path, int], Path], **sampling: Any) -> float:
    """``run_file``; ``write`` makes a file of so many rows, given a path without an ending and the number of a run."""
    with tempfile.TemporaryDirectory() as folder:

        def prepare(repeat: int) -> Callable[[], object]:
            source = write(Path(folder) / str(repeat), repeat)
            target = Path(folder) / f"{repeat}.out.jsonl"
            return lambda: run_file(source, target, model=llm, sampling=sampling, quiet=True)

        return fastest(repeats, rows, prepare)


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """A JSONL file of these rows."""
    path = path.with_suffix(".jsonl")
    path.write_text("".join([json.dumps(row) + "\n" for row in rows]), encoding="utf-8")
    return path


def write_ids(path: Path, case: Case, seed: int, *, table: bool) -> Path:
    """A file with a case's prompts: Parquet if it is a table, else JSONL."""
    prompts = prompts_of(case, "list", seed)
    if not table:
        return write_lines(path, ({"prompt_token_ids": each} for each in prompts))
    path = path.with_suffix(".parquet")
    pyarrow.parquet.write_table(pa.table({"prompt_token_ids": prompts}), path)
    return path


def texts_with(vocabulary: Sequence[str], rows: int, seed: int, choices: str) -> Iterator[dict[str, Any]]:
    """Rows with an instruction of 1,200 tokens, and 110 of each; ``choices`` says which have lists of these."""
    texts = Texts(list(vocabulary), seed)
    front, same = texts.of(1200), texts.of(4).split()
    for number in range(rows):
        row: dict[str, Any] = {"prompt": f"{front} {texts.of(110)}"}
        if choices != "none":
            row["max_tokens"] = 1 + number % 5
            row["structured_outputs"] = {"choice": same if choices == "the same" else texts.of(4).split()}
        yield row


def main() -> None:
    """Measure all, and print as they come."""
    given = options(
        __doc__,
        model=None,
        kinds={"choices": list(_KINDS), "default": list(_KINDS), "nargs": "+"},
        runner=("triton", "none"),
        files=False,
        scale=1.0,
        repeats=5,
    )
    launched = launch(RunConfig.of(given.model, device="cpu"))
    llm = without_model(launched, NoModel() if given.runner == "none" else without_kernels(launched))
    found: dict[str, float] = {}

    def tell(name: str, microseconds: float) -> None:
        found[name] = microseconds
        sys.stdout.write(f"{name:>30}{microseconds:10.1f}\n")
        sys.stdout.flush()

    cases = {name: replace(case, rows=max(1, round(case.rows * given.scale))) for name, case in CASES.items()}
    for name, case in cases.items():
        for kind in given.kinds:
            tell(f"{name}, {kind}", of_ids(llm, case, kind, given.repeats))
    for (name, case), table in product(cases.items(), (False, True)) if given.files else ():

        def write(path: Path, seed: int, case: Case = case, table: bool = table) -> Path:
            return write_ids(path, case, seed, table=table)

        sampling = {"max_tokens": case.generated, "ignore_eos": True}
        tell(f"{name}, {'Parquet' if table else 'JSONL'}", of_file(llm, case.rows, given.repeats, write, **sampling))
    if launched.tokenizer is not None:
        rows = max(1, round(1000 * given.scale))
        vocabulary = list(launched.tokenizer.backend.get_vocab())
        guided = without_model(launched, NoModel())
        for choices in ("none", "the same", "of each row") if given.files else ("none",):

            def write_texts(path: Path, seed: int, choices: str = choices) -> Path:
                return write_lines(path, texts_with(vocabulary, rows, seed, choices))

            sampling = {"max_tokens": 3, "ignore_eos": choices == "none"}
            used = llm if choices == "none" else guided
            what = "texts of a file" if choices == "none" else f"texts, choices {choices}"
            tell(what, of_file(used, rows, given.repeats, write_texts, **sampling))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
