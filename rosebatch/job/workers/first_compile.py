"""Kernels that are not compiled yet: one worker compiles them, and the others find them in Triton's cache."""

from typing import TYPE_CHECKING

from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.host.run_once import run_once

if TYPE_CHECKING:
    from rosebatch.engine.engine import Engine

_PROMPT_TOKENS = 8
# More than two decode windows.
_OUTPUT_TOKENS = 20


def compile_kernels(engine: "Engine") -> None:
    """Run two short prompts, so that the kernels of every step are compiled.

    Of several processes that call this at once, one goes first.
    """
    from rosebatch.engine.triton_runner.warm_up import triton_cache

    with run_once(triton_cache() / "rosebatch.lock"):
        run_briefly(engine)


def run_briefly(engine: "Engine") -> None:
    """Run two short prompts to their end, one greedy and one sampled; without an output projection, pool one.

    The engine keeps nothing of them but its counts.
    """
    length = min(_PROMPT_TOKENS, engine.max_model_len // 2)
    if not engine.generates:
        for _ in engine.run([Request(0, (0,) * length, pooling=PoolingParams(pooling="last"))]):
            pass
        return
    limit = min(_OUTPUT_TOKENS, engine.max_model_len - length)
    params = [SamplingParams(max_tokens=limit, ignore_eos=True)]
    params.append(SamplingParams(max_tokens=limit, ignore_eos=True, temperature=1.0, seed=0))
    for _ in engine.run([Request(number, (0,) * length, each) for number, each in enumerate(params)]):
        pass
