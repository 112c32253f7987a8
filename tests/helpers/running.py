"""Engines that run requests to their end."""

from collections.abc import Iterable, Sequence
from typing import Any

from rosebatch.core.request import Completion, Request
from rosebatch.core.sampling_params import SamplingParams


def run_choices(engine: Any, requests: Iterable[Request]) -> dict[tuple[int, int], Completion]:
    """Request id and sample -> completion. Checks integrity after every step, and that no block stays in use."""
    for request in requests:
        engine.add(request)
    done = {}
    while engine.has_unfinished:
        done |= {(completion.request.id, completion.sample): completion for completion in engine.step()}
        engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_used == 0
    return done


def run(engine: Any, requests: Iterable[Request]) -> dict[int, Completion]:
    """The same for requests of one completion each. Request id -> completion."""
    return {request: done for (request, _), done in run_choices(engine, requests).items()}


def greedy(engine: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """The engine's greedy continuation of each prompt."""
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    done = run(engine, [Request(i, tuple(prompt), sampling) for i, prompt in enumerate(prompts)])
    return [list(done[i].token_ids) for i in range(len(prompts))]
