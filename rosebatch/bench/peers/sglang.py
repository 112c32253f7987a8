"""SGLang's offline engine. ``python -m rosebatch.bench.peers.sglang SPEC.json``, see ``protocol``."""

import os
from collections.abc import AsyncIterator, Callable
from typing import Any

from rosebatch.bench.peers.protocol import Loaded, Prompts, Streaming, serve

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def load(spec: dict[str, Any]) -> Loaded:
    """Build the engine with its defaults, but with graphs for all batch sizes: by default the largest have none."""
    import sglang

    engine = _engine(spec)

    def prepare(prompts: Prompts, output_lens: list[int], sampling: dict[str, Any]) -> Callable[[], list[int]]:
        # SGLang needs a tokenizer for a minimum. Without end tokens every output has the maximum length.
        params = [{"max_new_tokens": n, "ignore_eos": True, **sampling} for n in output_lens]
        return lambda: [len(out["output_ids"]) for out in engine.generate(input_ids=prompts, sampling_params=params)]

    return Loaded(sglang.__version__, prepare, engine.shutdown)


async def load_streaming(spec: dict[str, Any]) -> Streaming:
    """The same engine, which tells tokens as they come."""
    import sglang

    engine = _engine(spec)

    async def stream(prompt: list[int], length: int, sampling: dict[str, Any]) -> AsyncIterator[int]:
        params = {"max_new_tokens": length, "ignore_eos": True, **sampling}
        async for out in await engine.async_generate(input_ids=prompt, sampling_params=params, stream=True):
            yield out["meta_info"]["completion_tokens"]

    return Streaming(sglang.__version__, stream, engine.shutdown)


def _engine(spec: dict[str, Any]) -> Any:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    largest_graph = "cuda_graph_max_bs_decode"
    if largest_graph not in ServerArgs.__dataclass_fields__:
        largest_graph = "cuda_graph_max_bs"  # its name until 2026
    arguments = {
        "model_path": spec["model"],
        "load_format": spec["load_format"],
        "dtype": spec["dtype"],
        "max_running_requests": spec["max_num_seqs"],
        "disable_radix_cache": not spec["prefix_cache"],
        largest_graph: spec["max_num_seqs"],
        "skip_tokenizer_init": True,
        "mem_fraction_static": 0.85,
        "random_seed": 0,
        "log_level": "error",
    }
    if spec["quantization"] == "fp8":
        arguments["quantization"] = "fp8"
    if spec["kv_cache_dtype"] == "fp8":
        arguments["kv_cache_dtype"] = "fp8_e4m3"
    return Engine(**arguments | spec["args"])


if __name__ == "__main__":
    serve(load, load_streaming)
