"""Drafts on a GPU: documents that are copied with some tokens changed, and open text, with and without drafts.

``python -m benchmarks.copies [--model configs/models/qwen3-0.6b.toml] [--rows 256 8] [--length 800]``. The weights are
random, and each sub-layer adds zero: so a token follows from the last one alone, at the full price of a step. A prompt
is what follows some token, with a tenth of it changed, and that token at its end; the answer is what follows, as it was
before the changes. Open text is sampled at temperature 1. The engines' answers are compared. The last line is JSON: of
each job, rows and repeat the seconds without and with drafts, in turns.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.options import options
from rosebatch.config.run import RunConfig
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.token_ids import TokenIds
from rosebatch.engine.engine import Engine
from rosebatch.engine.plan import POOL_TOKENS
from rosebatch.engine.scheduling.answer_pool import AnswerPool
from rosebatch.launch.launch import launch
from rosebatch.model.random_weights import RandomWeights

_CHANGED = 0.1


def main() -> None:
    """Run all jobs."""
    given = options(
        __doc__,
        model="configs/models/qwen3-0.6b.toml",
        rows=[256, 8],
        length=800,
        repeats=3,
        batch_invariant=False,
        jobs=["copies", "open"],
    )
    _let_tokens_follow_tokens()
    switches = {"prefix_cache": False, "batch_invariant": given.batch_invariant}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.toml"
        # A head of its own: with the embedding's, a token would be followed by the one that it follows.
        model.write_text(Path(given.model).read_text().replace("tie_word_embeddings = true", ""))
        limits = RunConfig(model=str(model), load_format="dummy", max_num_seqs=1024, switches=switches)
        engine = launch(limits).engine
    drafter = engine.drafter
    assert drafter is not None, "the engine drafts"
    engine.drafter = None
    rng = np.random.default_rng(0)
    firsts = rng.integers(1000, 100_000, max(given.rows))
    orbits = _run(engine, [[int(first)] for first in firsts], given.length + 1, 0.0)[0]
    found: list[dict[str, Any]] = []
    for job in given.jobs:
        for rows in given.rows:
            prompts = [changed([int(firsts[row]), *orbits[row]][:-1], rng, 100_000) for row in range(rows)]
            temperature = 0.0 if job == "copies" else 1.0
            seconds: dict[str, list[float]] = {"off": [], "on": []}
            answers: dict[str, Any] = {}
            figures = {}
            for repeat in range(given.repeats + 1):
                for name in ("off", "on"):
                    engine.drafter = None if name == "off" else drafter
                    engine.scheduler.planner.queries = 1
                    # The prompts are those of the last repeat, and so are its answers.
                    engine.scheduler.planner.answers = AnswerPool(POOL_TOKENS)
                    stats = engine.restart_stats()
                    answers[name], took = _run(engine, prompts, given.length, temperature)
                    if repeat:
                        seconds[name].append(round(took, 3))
                    figures[name] = round(stats.decode_seconds, 3)
            same = sum(one == other for one, other in zip(answers["off"], answers["on"], strict=True))
            ratio = statistics.median(seconds["off"]) / statistics.median(seconds["on"])
            found.append(
                {"job": job, "rows": rows, "ratio": round(ratio, 3), "same": same, **seconds}
                | {"decode_s": figures, "drafted": stats.drafted, "accepted": stats.accepted, "steps": stats.steps}
            )
            sys.stdout.write(f"{json.dumps(found[-1])}\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps(found) + "\n")


def _let_tokens_follow_tokens() -> None:
    """Random weights whose sub-layers add zero."""
    get = RandomWeights.get

    def changed(weights: RandomWeights, name: str, shape: tuple[int, ...], **keywords: Any) -> Tensor:
        found = get(weights, name, shape, **keywords)
        if "o_proj" in name or "down_proj" in name:
            found.zero_()
        return found

    RandomWeights.get = changed  # type: ignore[assignment, method-assign]


def changed(document: list[int], rng: np.random.Generator, vocab_size: int) -> list[int]:
    """A document with a tenth of its tokens changed, and its first token again."""
    tokens = np.array(document)
    places = rng.random(len(tokens)) < _CHANGED
    tokens[places] = rng.integers(1000, vocab_size, int(places.sum()))
    return [*tokens.tolist(), document[0]]


def _run(
    engine: Engine, prompts: Sequence[Sequence[int]], length: int, temperature: float
) -> tuple[list[tuple[int, ...]], float]:
    """The answers, and the seconds that they took."""
    sampling: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "temperature": temperature}
    requests = [
        Request(number, TokenIds.of(prompt), SamplingParams(seed=number, **sampling))
        for number, prompt in enumerate(prompts)
    ]
    began = time.perf_counter()
    done = {each.request.id: each.token_ids for each in engine.run(requests)}
    seconds = time.perf_counter() - began
    return [tuple(done[number]) for number in range(len(requests))], seconds


if __name__ == "__main__":
    main()
