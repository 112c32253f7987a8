"""vLLM's offline engine. ``python -m rosebatch.bench.peers.vllm SPEC.json``, see ``protocol``."""

import os
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any

from rosebatch.bench.peers.protocol import Loaded, Prompts, Streaming, serve
from rosebatch.bench.peers.random_weights import without_biases

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The engine runs in a process of its own. Only so does it take a function that changes weights there.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


def load(spec: dict[str, Any]) -> Loaded:
    """Build the engine with its defaults. Token ids go in and come out, so it needs no tokenizer."""
    import vllm

    engine = vllm.LLM(**engine_arguments(spec))
    if spec["load_format"] == "dummy":
        engine.apply_model(without_biases)

    def prepare(prompts: Prompts, output_lens: list[int], sampling: dict[str, Any]) -> Callable[[], list[int]]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        # A least length, which the others do not get, would change the logits of every step.
        params = [vllm.SamplingParams(max_tokens=n, ignore_eos=True, detokenize=False, **sampling) for n in output_lens]
        return lambda: [len(out.outputs[0].token_ids) for out in engine.generate(inputs, params, use_tqdm=False)]

    return Loaded(vllm.__version__, prepare)


async def load_streaming(spec: dict[str, Any]) -> Streaming:
    """Build the engine of its server, which tells tokens as they come."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(spec), enable_log_requests=False))
    if spec["load_format"] == "dummy":
        await engine.collective_rpc("apply_model", args=(without_biases,))
    numbers = count()

    async def stream(prompt: list[int], length: int, sampling: dict[str, Any]) -> AsyncIterator[int]:
        params = vllm.SamplingParams(
            max_tokens=length, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA, **sampling
        )
        total = 0
        async for out in engine.generate({"prompt_token_ids": prompt}, params, request_id=str(next(numbers))):
            total += len(out.outputs[0].token_ids)
            yield total

    return Streaming(vllm.__version__, stream, engine.shutdown)


def engine_arguments(spec: dict[str, Any]) -> dict[str, Any]:
    """vLLM's arguments for a specification; those that the user gives win."""
    arguments: dict[str, Any] = {
        "model": spec["model"],
        "load_format": spec["load_format"],
        "dtype": spec["dtype"],
        "max_num_seqs": spec["max_num_seqs"],
        "enable_prefix_caching": spec["prefix_cache"],
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": 0.9,
        "seed": 0,
    }
    if spec["quantization"] == "fp8":
        arguments["quantization"] = "fp8_per_channel"
    if spec["kv_cache_dtype"] == "fp8":
        arguments["kv_cache_dtype"] = "fp8"
    return {**arguments, **spec["args"]}


if __name__ == "__main__":
    serve(load, load_streaming)
