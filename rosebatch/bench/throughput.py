"""Random prompts of one length, greedy, every completion at full length: the engine's own throughput."""

import random
import time

import msgspec

from rosebatch.engine.engine import Engine
from rosebatch.engine.stats import EngineStats
from rosebatch.errors import UserError
from rosebatch.report import Tally
from rosebatch.request import Request, SamplingParams


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``num_prompts`` prompts of ``input_len`` tokens, ``output_len`` tokens generated for each."""

    input_len: int
    output_len: int
    num_prompts: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "num_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


def run_throughput(engine: Engine, workload: Workload) -> tuple[Tally, float]:
    """Run the workload once after a short warm-up: what was counted, and the wall seconds.

    Raises:
        UserError: a request would not fit the model.
    """
    total = workload.input_len + workload.output_len
    if total > engine.max_model_len:
        raise UserError(f"input and output are {total} tokens, the engine holds at most {engine.max_model_len}")
    numbers = random.Random(workload.seed)
    warm_up = _requests(engine, numbers, workload, count=min(2, workload.num_prompts), output_len=2)
    list(engine.run(warm_up))
    engine.stats = EngineStats()
    requests = _requests(engine, numbers, workload, workload.num_prompts, workload.output_len)
    tally = Tally()
    started = time.perf_counter()
    for completion in engine.run(requests):
        tally.add(completion)
    seconds = time.perf_counter() - started
    assert tally.output_tokens == workload.num_prompts * workload.output_len, "every completion has full length"
    return tally, seconds


def _requests(engine: Engine, numbers: random.Random, workload: Workload, count: int, output_len: int) -> list[Request]:
    sampling = SamplingParams(max_tokens=output_len, ignore_eos=True)
    prompts = [tuple(numbers.choices(range(engine.vocab_size), k=workload.input_len)) for _ in range(count)]
    return [Request(index=i, prompt_token_ids=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]
