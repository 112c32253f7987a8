"""Throughput beside transformers' padded ``generate``: same chats, same model, in turn in one process.

``python -m benchmarks.against_transformers [--repeats N]`` runs the demo model in bf16 on 32 chat prompts
with 16 to 128 output tokens each. transformers pads the prompts to one length and runs the batch until its longest
completion is done. Only its calls of ``generate`` are timed, and only the requested tokens count. The last line is
JSON.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.options import options
from rosebatch.bench.peers.transformers import load
from rosebatch.bench.scenario import Sampling
from rosebatch.bench.throughput import run_once
from rosebatch.bench.workload import Workload
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.engine.load import load_engine, pick_device
from rosebatch.model.source import find_model
from rosebatch.text.tokenizer import Tokenizer

_CHATS = 32
_OUTPUT_TOKENS = (16, 128)
_TOPICS = ("France", "bread", "rivers", "Python", "cats", "Rome", "music", "trains", "winter", "law", "chess", "tea")


def make_workload(tokenizer: Tokenizer, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Token ids of the chat prompts, and the output length of each."""
    numbers = random.Random(seed)
    chats = []
    for _ in range(_CHATS):
        topics = ", ".join(numbers.choices(_TOPICS, k=numbers.randint(2, 40)))
        chats.append([{"role": "user", "content": f"Write a short text in which these occur: {topics}."}])
    prompts = [ids for ids in tokenizer.encode_chats(chats) if isinstance(ids, list)]
    assert len(prompts) == _CHATS, "every chat is valid"
    return prompts, [numbers.randint(*_OUTPUT_TOKENS) for _ in prompts]


def rosebatch_runner(prompts: list[list[int]], lengths: list[int]) -> Callable[[], float]:
    """A function that runs the workload on a fresh engine and returns the seconds, without loading."""
    device = pick_device("cpu")
    source = find_model(RunConfig(dtype="bfloat16"), device)

    def run() -> float:
        engine = load_engine(source, RunConfig(), Switches.resolve({}, "cpu"), device).engine
        return run_once(engine, Workload(prompts, lengths), Sampling()).seconds

    return run


def transformers_runner(folder: Path, prompts: list[list[int]], lengths: list[int]) -> Callable[[], float]:
    """A function that runs the workload as one left-padded batch and returns the seconds."""
    of_model = {"model": str(folder), "load_format": "auto", "device": "cpu", "dtype": "bfloat16", "args": {}}
    call = load({**of_model, "max_num_seqs": len(prompts)}).prepare(prompts, lengths, {})

    def run() -> float:
        started = time.perf_counter()
        generated = call()
        seconds = time.perf_counter() - started
        assert generated == lengths, "no row ended early"
        return seconds

    return run


def main() -> None:
    """Run both in turn, and print medians, spread and the ratio of the turns."""
    repeats = options(__doc__, repeats=5).repeats
    source = find_model(RunConfig(dtype="bfloat16"), pick_device("cpu"))
    assert source.folder is not None, "the demo model has a folder"
    tokenizer = Tokenizer.load(source.folder)
    assert tokenizer is not None, "the demo model has a tokenizer"
    prompts, lengths = make_workload(tokenizer)
    run_ours = rosebatch_runner(prompts, lengths)
    run_theirs = transformers_runner(source.folder, prompts, lengths)
    # The first runs warm both up.
    run_ours(), run_theirs()
    turns = [(run_ours(), run_theirs()) for _ in range(repeats)]
    our_seconds, their_seconds = zip(*turns, strict=True)
    ratios = [theirs / ours for ours, theirs in turns]
    tokens = sum(lengths)
    result = {
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": tokens,
        "rosebatch_s": [round(seconds, 2) for seconds in our_seconds],
        "transformers_s": [round(seconds, 2) for seconds in their_seconds],
        "rosebatch_output_tokens_per_s": round(tokens / statistics.median(our_seconds), 1),
        "transformers_output_tokens_per_s": round(tokens / statistics.median(their_seconds), 1),
        "ratio_median": round(statistics.median(ratios), 2),
        "ratio_min": round(min(ratios), 2),
        "ratio_max": round(max(ratios), 2),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
