"""LMDeploy's TurboMind engine. ``python -m rosebatch.bench.peers.lmdeploy SPEC.json``, see ``protocol``.

Requests go to the engine itself: its pipeline takes texts.
"""

import asyncio
import logging
import os
import traceback
from collections.abc import AsyncIterator, Callable
from importlib import import_module
from itertools import count
from typing import Any

from rosebatch.bench.peers.protocol import Loaded, Prompts, Streaming, serve
from rosebatch.bench.peers.random_checkpoint import RandomCheckpoint

os.environ.setdefault("TM_LOG_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def load(spec: dict[str, Any]) -> Loaded:
    """Build the engine with its defaults, without metrics."""
    import lmdeploy

    requests, loop = _Requests(spec), asyncio.new_event_loop()

    def prepare(prompts: Prompts, output_lens: list[int], sampling: dict[str, Any]) -> Callable[[], list[int]]:
        async def generated(prompt: list[int], length: int) -> int:
            return sum([tokens async for tokens in requests.run(prompt, length, sampling, stream=False)])

        async def run() -> list[int]:
            return await asyncio.gather(*map(generated, prompts, output_lens))

        return lambda: loop.run_until_complete(run())

    return Loaded(lmdeploy.__version__, prepare)


async def load_streaming(spec: dict[str, Any]) -> Streaming:
    """The same engine, which tells tokens as they come."""
    import lmdeploy

    requests = _Requests(spec)

    async def stream(prompt: list[int], length: int, sampling: dict[str, Any]) -> AsyncIterator[int]:
        total = 0
        async for tokens in requests.run(prompt, length, sampling, stream=True):
            total += tokens
            yield total

    return Streaming(lmdeploy.__version__, stream)


class _Requests:
    """The engine, and an instance of it for each request that may run at the same time."""

    def __init__(self, spec: dict[str, Any]) -> None:
        engine = _engine(spec)
        self._free: asyncio.Queue[Any] = asyncio.Queue()
        for _ in range(spec["max_num_seqs"]):
            self._free.put_nowait(engine.create_instance())
        self._numbers = count(1)

    async def run(
        self, prompt: list[int], length: int, sampling: dict[str, Any], *, stream: bool
    ) -> AsyncIterator[int]:
        """How many tokens came, each time that some come; without ``stream`` once, at the end."""
        from lmdeploy.messages import GenerationConfig

        # By default, the 50 likeliest tokens are kept.
        chosen = {"top_k": 0, **sampling} if sampling["temperature"] else {"top_k": 1}
        number = next(self._numbers)
        config = GenerationConfig(max_new_tokens=length, ignore_eos=True, random_seed=number, **chosen)
        instance = await self._free.get()
        async for out in instance.async_stream_infer(number, prompt, gen_config=config, stream_output=stream):
            yield len(out.token_ids)
        self._free.put_nowait(instance)


def _engine(spec: dict[str, Any]) -> Any:
    # LMDeploy itself catches what keeps this one from loading, and fails later without the cause.
    import_module("lmdeploy.turbomind._turbomind")
    from lmdeploy.messages import TurbomindEngineConfig
    from lmdeploy.turbomind import model_loader, turbomind

    # It logs each request.
    logging.getLogger("lmdeploy").setLevel(logging.WARNING)
    # Token ids go in and come out. No argument leaves the tokenizer or the checkpoint out.
    turbomind.Tokenizer = lambda *_, **__: None
    if spec["load_format"] == "dummy":
        model_loader.create_checkpoint = lambda folder, **_: RandomCheckpoint(folder, spec["dtype"])
    arguments = {
        "dtype": spec["dtype"],
        "max_batch_size": spec["max_num_seqs"],
        "enable_prefix_caching": spec["prefix_cache"],
        "enable_metrics": False,
    }
    return turbomind.TurboMind(spec["model"], engine_config=TurbomindEngineConfig(**arguments | spec["args"]))


def main() -> None:
    """Serve, and end without waiting for the engine's threads."""
    code = 1
    try:
        serve(load, load_streaming)
        code = 0
    except Exception:
        traceback.print_exc()
    os._exit(code)


if __name__ == "__main__":
    main()
