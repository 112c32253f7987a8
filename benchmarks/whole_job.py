"""The whole job on a file of texts, beside the engine on token ids, or beside ``vllm run-batch``.

``python -m benchmarks.whole_job --model FOLDER [--load-format dummy] [--num-prompts 20000]`` makes short
prompts. It runs the job on a JSONL file of them, with part file and sorted output, and in turn the engine alone on the
same token ids: what reading, tokenizing and writing cost.

``python -m benchmarks.whole_job --against vllm [--model SHAPE] [--tokenizer FOLDER] [--works labels chats]`` makes an
OpenAI batch file for each kind of work. Both commands answer it, each in a process of its own, from its start to the
last row. The model has random weights and the tokenizer's vocabulary. ``--scale 0.01`` makes shorter files.

The last line is JSON.
"""

import json
import random
import shlex
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.batch_commands import Timed, run_ours, run_vllm, tally, vllm_version, write_batch
from benchmarks.batch_works import WORKS, Texts
from benchmarks.options import options
from benchmarks.random_folder import write_random_folder
from rosebatch.bench.against import choose_peers, require_installed
from rosebatch.bench.case import spread
from rosebatch.bench.scenario import configs_dir
from rosebatch.config.model import ModelConfig
from rosebatch.config.run import RunConfig
from rosebatch.config.toml_file import load_toml
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.version import __version__
from rosebatch.job.report.build import build_report
from rosebatch.job.report.provenance import gpu_name
from rosebatch.job.report.tally import Tally
from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file
from rosebatch.model.source import find_model

_WORDS = ("roses", "are", "red", "and", "every", "garden", "has", "its", "own", "winter", "who", "knows", "why", "tell")
_NUM_WORDS = (8, 48)
_COLUMNS = {
    "work": 10,
    "engine": 18,
    "rows": 7,
    "tokens in": 12,
    "out": 10,
    "valid": 9,
    "ready s": 10,
    "whole s": 10,
    "rows/s": 10,
    "ratio": 8,
    "after start": 13,
}


def make_texts(count: int, seed: int) -> list[str]:
    """Short prompts. No two share a beginning that would fill a block."""
    numbers = random.Random(seed)
    return [" ".join(numbers.choices(_WORDS, k=numbers.randint(*_NUM_WORDS))) for _ in range(count)]


def run_text(llm: LLM, texts: Sequence[str], output_len: int) -> Mapping[str, Any]:
    """The report of the whole job, from a file to a file."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "prompts.jsonl", Path(folder) / "answers.jsonl"
        source.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(texts)))
        sampling = {"max_tokens": output_len, "ignore_eos": True}
        return run_file(source, target, model=llm, sampling=sampling).report


def run_ids(llm: LLM, prompts: Sequence[Sequence[int]], output_len: int) -> Mapping[str, Any]:
    """The report of the engine alone."""
    sampling = SamplingParams(max_tokens=output_len, ignore_eos=True)
    requests = [Request(i, tuple(prompt), sampling) for i, prompt in enumerate(prompts)]
    with llm.exclusive() as launched:
        stats, tally = launched.engine.restart_stats(), Tally()
        started = time.perf_counter()
        for completion in launched.engine.run(requests):
            tally.add(completion)
        return build_report(tally, stats, launched.description, {}, time.perf_counter() - started)


def beside_vllm(given: Namespace, folder: Path) -> dict[str, Any]:
    """Answer each work's file by both commands, print two lines for it, and return all figures.

    Raises:
        UserError: there is no such model, or a shape that transformers cannot build.
    """
    (peer,) = choose_peers(["vllm"], [], [given.peer_python], [given.peer_path])
    require_installed(peer)
    model, tokenizer = _model_and_tokenizer(given.model or "qwen3-0.6b", given.tokenizer, folder)
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    engines = f"rosebatch {__version__}", f"vllm {vllm_version(peer)}"
    sys.stdout.write("".join(name.rjust(width) for name, width in _COLUMNS.items()) + "\n")
    figures: dict[str, Any] = {}
    for name in given.works:
        work, files = WORKS[name], folder / name
        # Answers that an earlier call has left would look like this one's.
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir(parents=True)
        bodies = work.make(Texts(list(vocabulary)), given.scale)
        batch = files / "batch.jsonl"
        write_batch(batch, bodies)
        ours = tally(engines[0], run_ours(model, batch, files, shlex.split(given.flags)), work, bodies)
        _print(name, len(bodies), ours)
        theirs = tally(engines[1], run_vllm(peer, model, batch, files, shlex.split(given.vllm_flags)), work, bodies)
        ratios = {
            "whole": theirs.whole_s / ours.whole_s,
            "after_start": (theirs.whole_s - theirs.ready_s) / (ours.whole_s - ours.ready_s),
        }
        _print(name, len(bodies), theirs, *ratios.values())
        figures[name] = {"rows": len(bodies), "ours": asdict(ours), "vllm": asdict(theirs), "ratio": ratios}
    return {"model": model.name, "gpu": gpu_name(), "works": figures}


def _model_and_tokenizer(name: str, tokenizer: str | None, folder: Path) -> tuple[Path, Path]:
    """The folder of ``--model``, for a shape's name one that is written now, and the folder of its tokenizer."""
    if Path(name).is_dir():
        return Path(name).absolute(), Path(tokenizer or name)
    source = Path(tokenizer) if tokenizer else find_model(RunConfig(dtype="bfloat16"), torch.device("cpu")).folder
    assert source is not None, "the demo model has a folder"
    model = folder / name
    if not model.exists():
        write_random_folder(load_toml(configs_dir() / "models" / f"{name}.toml", ModelConfig), source, model)
    return model, source


def _print(work: str, rows: int, timed: Timed, *ratios: float) -> None:
    texts = [work, timed.engine, f"{rows}", f"{timed.prompt_tokens}", f"{timed.output_tokens}", f"{timed.valid:.1%}"]
    seconds = timed.ready_s, timed.whole_s, rows / timed.whole_s
    texts += [*(f"{number:.2f}" for number in (*seconds, *ratios))]
    sys.stdout.write("".join(text.rjust(width) for text, width in zip(texts, _COLUMNS.values(), strict=False)) + "\n")
    sys.stdout.flush()


def beside_engine(given: Namespace) -> dict[str, Any]:
    """Run the job and the engine in turn, and return the ratios of their output tokens per second."""
    llm = LLM(given.model, load_format=given.load_format, dtype=given.dtype)
    with llm.exclusive() as launched:
        tokenizer, model = launched.tokenizer, launched.description["model"]
    assert tokenizer is not None, "the model has a tokenizer"
    turns = []
    # The first turn is the warm-up: it captures graphs of every size.
    for turn in range(given.repeats + 1):
        texts = make_texts(given.num_prompts, turn)
        prompts = [ids for ids in tokenizer.encode(texts) if isinstance(ids, list)]
        reports = run_text(llm, texts, given.output_len), run_ids(llm, prompts, given.output_len)
        assert reports[0]["output_tokens"] == reports[1]["output_tokens"] == len(texts) * given.output_len
        turns += [reports] if turn else []
    last = turns[-1][0]
    return {
        "model": model,
        "gpu": gpu_name(),
        "prompts": given.num_prompts,
        "prompt_tokens": last["prompt_tokens"],
        "job_output_tokens_per_s": spread([job["output_tokens_per_s"] for job, _ in turns]),
        "engine_output_tokens_per_s": spread([engine["output_tokens_per_s"] for _, engine in turns]),
        "ratio": spread([job["output_tokens_per_s"] / engine["output_tokens_per_s"] for job, engine in turns]),
        "host_us_per_row": last["host_us_per_row"],
        "device_s": [[report["prefill_s"], report["decode_s"]] for report in turns[-1]],
    }


def main() -> None:
    """Run one of both comparisons."""
    given = options(
        __doc__,
        model=None,
        against={"choices": ["vllm"], "help": "else the engine on token ids"},
        # Beside the engine.
        load_format=("auto", "dummy"),
        dtype="auto",
        num_prompts=20_000,
        output_len=64,
        repeats=3,
        # Beside vLLM.
        works={"choices": list(WORKS), "default": list(WORKS), "nargs": "+"},
        scale=1.0,
        tokenizer=None,
        folder={"help": "files of the run, and the model's, stay here"},
        flags={"default": "", "help": "more flags of ours"},
        vllm_flags={"default": "", "help": "more flags of vLLM's"},
        peer_python="",
        peer_path="",
    )
    if given.against is None:
        result = beside_engine(given)
    elif given.folder:
        result = beside_vllm(given, Path(given.folder).absolute())
    else:
        with tempfile.TemporaryDirectory() as folder:
            result = beside_vllm(given, Path(folder))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
