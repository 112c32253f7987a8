"""Throughput beside transformers' padded ``generate``: same chats, same model, in turn in one process.

``python -m benchmarks.against_transformers [--repeats N]`` runs the demo model in bf16 on 32 chat prompts
with 16 to 128 output tokens each. transformers pads the prompts to one length and runs the batch until its longest
completion is done. Only its calls of ``generate`` are timed, and only the requested tokens count. The last line is
JSON.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

from rosebatch.bench.peers.transformers import pad_left
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
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
    source = find_model(None, "auto", "bfloat16", device)

    def run() -> float:
        engine = load_engine(source, RunConfig(), Switches.resolve({}, "cpu"), device).engine
        requests = [
            Request(i, tuple(prompt), SamplingParams(max_tokens=length, ignore_eos=True))
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        started = time.perf_counter()
        generated = sum(len(completion.token_ids) for completion in engine.run(requests))
        seconds = time.perf_counter() - started
        assert generated == sum(lengths), "every completion has the requested length"
        return seconds

    return run


def transformers_runner(folder: Path, prompts: list[list[int]], lengths: list[int]) -> Callable[[], float]:
    """A function that runs the workload as one left-padded batch and returns the seconds."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, trust_remote_code=False).eval()
    ids, mask = map(torch.tensor, pad_left(prompts))
    longest = max(lengths)

    def run() -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started
        assert out.shape == (len(prompts), ids.shape[1] + longest), "no row ended early"
        return seconds

    return run


def main() -> None:
    """Run both in turn, and print medians, spread and the ratio of the turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    source = find_model(None, "auto", "bfloat16", pick_device("cpu"))
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
