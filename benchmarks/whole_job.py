"""What reading, tokenizing and writing cost: the whole job on a file of texts, beside the engine on token ids.

``python -m benchmarks.whole_job --model FOLDER [--load-format dummy] [--num-prompts 20000]`` makes short
prompts. It runs the job on a JSONL file of them, with part file and sorted output, and in turn the engine alone on the
same token ids. The last line is JSON.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import options
from rosebatch.bench.case import spread
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.job.report.build import build_report
from rosebatch.job.report.provenance import gpu_name
from rosebatch.job.report.tally import Tally
from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file

_WORDS = ("roses", "are", "red", "and", "every", "garden", "has", "its", "own", "winter", "who", "knows", "why", "tell")
_NUM_WORDS = (8, 48)


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


def main() -> None:
    """Run both in turn, and print the ratios of their output tokens per second."""
    sizes = {"num_prompts": 20_000, "output_len": 64, "repeats": 3}
    given = options(__doc__, model=None, load_format=("auto", "dummy"), dtype="auto", **sizes)
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
    result = {
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
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
