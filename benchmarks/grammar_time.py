"""Processor time of a token of JSON by a schema, by an engine that schedules as on a GPU and computes nothing.

``python -m benchmarks.grammar_time --tokenizer FOLDER [--rows 256 64 8]``. The runner is the one of a GPU without its
kernels (see ``host_time``). A row draws allowed tokens by random numbers of its own; drawing is not counted. The schema
is that of ``json_by_schema``. For Python's thread, and for all threads, without and with forced tokens: the median of
several runs, in microseconds. The last line is JSON; ``answers`` is the same where all answers are.
"""

import json
import statistics
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.host_time import without_kernels
from benchmarks.json_by_schema import schema
from benchmarks.options import options
from rosebatch.config.run import RunConfig
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.core.token_ids import TokenIds
from rosebatch.engine.engine import Engine
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.launch.launch import launch
from rosebatch.text.grammar.compiled import Grammar
from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.tokenizer import Tokenizer


class Draws:
    """Takes the place of a sampler: allowed tokens, by the numbers of the row and its next token.

    Attributes:
        seconds: that drawing took of Python's thread.
    """

    def __init__(self, runner: Any) -> None:
        self.seconds = 0.0
        self._runner = runner

    def sample(self, logits: Any, sampled: Any, columns: Any, staging: Any, *, decodes: bool) -> None:
        """See ``TokenSampler.sample``."""
        masks = sampled.masks()
        began = time.thread_time()
        tokens = []
        for spec, position, mask in zip(sampled.specs, sampled.positions, masks, strict=True):
            ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            tokens.append(ids[zlib.crc32(f"{spec.id} {position}".encode()) % len(ids)])
        drawn, state = torch.tensor(np.array(tokens, np.int32)), self._runner.state
        if decodes:
            state.history[:, torch.from_numpy(sampled.slots).long()] = drawn
        else:
            self._runner.sampler.first_tokens[0, : len(drawn)] = drawn
        self.seconds += time.thread_time() - began


def measure(runner: Any, grammar: Grammar, rows: int, vocab_size: int, *, forces: bool) -> tuple[float, float, int]:
    """Microseconds a token of Python's thread and of all threads; and a checksum of the answers."""
    slots = runner.slots.num_slots
    scheduler = Scheduler(
        BlockPool(16_000, 64),
        max_num_seqs=slots,
        max_num_batched_tokens=16384,
        policy=SeparateDecodes(8),
        forces=vocab_size if forces else 0,
    )
    # The runner forgets the last engine's sequences.
    scheduler.abort()
    engine = Engine(scheduler, runner, vocab_size=vocab_size, max_model_len=4096, eos_token_ids=(0,), async_depth=1)
    draws = Draws(runner)
    runner.sampler.sample = draws.sample
    sampling = SamplingParams(max_tokens=200, temperature=0.0)
    for row in range(rows):
        prompt = TokenIds.of([(7 * row + 3 * i) % 40_000 + 100 for i in range(200)])
        engine.add(Request(row, prompt, sampling), constraint=grammar.start)
    answers: dict[int, tuple[int, ...]] = {}
    own, every = time.thread_time(), time.process_time()
    while engine.has_unfinished:
        answers |= {completion.request.id: completion.token_ids for completion in engine.step()}
    own, every = time.thread_time() - own - draws.seconds, time.process_time() - every - draws.seconds
    tokens = sum(map(len, answers.values()))
    return own / tokens * 1e6, every / tokens * 1e6, zlib.crc32(str(sorted(answers.items())).encode())


def main() -> None:
    """Measure all, and print as they come."""
    given = options(__doc__, tokenizer=str, model="configs/models/smollm2-135m.toml", rows=[256, 64, 8], repeats=5)
    runner = without_kernels(launch(RunConfig.of(given.model, device="cpu", load_format="dummy")), 1024)
    tokenizer = Tokenizer.load(Path(given.tokenizer))
    assert tokenizer is not None, "the folder has a tokenizer"
    vocab_size = tokenizer.backend.get_vocab_size()
    grammar = Grammars(tokenizer, vocab_size, [0]).compile(GrammarSpec("json_schema", json.dumps(schema())))
    found = []
    for rows in given.rows:
        for forces in (False, True):
            runs = [measure(runner, grammar, rows, vocab_size, forces=forces) for _ in range(given.repeats)]
            own, every = (round(statistics.median(run[part] for run in runs), 1) for part in (0, 1))
            found.append({"rows": rows, "forces": forces, "python": own, "all": every, "answers": runs[0][2]})
            sys.stdout.write(f"{found[-1]}\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
