"""The task and the answer of a peer process: a JSON file in, one line of JSON on stdout.

The specification has these fields:

- ``model``: a transformers folder; ``load_format``: ``auto`` or ``dummy``; ``device``; ``dtype``
- ``quantization``: ``fp8`` to round the rows of weights at load, or None; ``kv_cache_dtype``: ``fp8`` or ``auto``
- ``max_num_seqs``, ``prefix_cache``, ``repeats``
- ``args``: for the engine's constructor
- ``workloads``: a list. Each has ``prompts`` (for every run a list of prompts as token ids; the first run is the
  warm-up), ``output_lens``, and ``sampling`` (the temperature, and all fields that differ from their default).

The answer has ``version``, ``load_s`` (imports included) and ``workloads``. Each of these has ``warm_up_s``, and the
``seconds`` of every timed run.

In place of ``workloads`` the specification may have ``replays``, for engines that stream: ``prompts`` (first those of
the warm-up, which come all at once), ``output_lens``, ``sampling``, and ``times``: for each run after the warm-up the
seconds at which its requests come. The answer then has ``warm_up_s`` and ``runs``, a list. Each has ``seconds``, and in
seconds ``ttft``, ``tpot`` and ``e2e`` of each request and ``itl``: the time between two arrivals of tokens.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

Prompts = list[list[int]]
# Prompts, output lengths and sampling -> a call that generates and returns how many tokens each prompt got.
Prepare = Callable[[Prompts, list[int], dict[str, Any]], Callable[[], list[int]]]


# A prompt, its output length and sampling -> how many tokens have come so far, whenever some come.
Stream = Callable[[list[int], int, dict[str, Any]], AsyncIterator[int]]


class Loaded(NamedTuple):
    """An engine that is ready."""

    version: str
    prepare: Prepare
    close: Callable[[], object] = lambda: None


class Streaming(NamedTuple):
    """An engine that is ready and streams."""

    version: str
    stream: Stream
    close: Callable[[], object] = lambda: None


def serve(
    load: Callable[[dict[str, Any]], Loaded],
    load_streaming: Callable[[dict[str, Any]], Awaitable[Streaming]] | None = None,
) -> None:
    """Answer the specification whose path is this process's only argument.

    Args:
        load: imports the engine and builds it.
        load_streaming: the same for an engine that streams; None if it takes no request while others run.
    """
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # Engines write to stdout from Python, from C and from processes that they start. So the answer gets a descriptor
    # of its own, and everything that is written to stdout goes to stderr.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    started = time.perf_counter()
    if "replays" in spec:
        assert load_streaming is not None, "only engines that stream are given replays"
        found, close = asyncio.run(_replays(spec, load_streaming, started))
    else:
        engine = load(spec)
        load_seconds, close = time.perf_counter() - started, engine.close
        timed = [_time(engine.prepare, workload, spec["repeats"]) for workload in spec["workloads"]]
        found = {"version": engine.version, "load_s": load_seconds, "workloads": timed}
    json.dump(found, answer)
    answer.write("\n")
    answer.close()
    close()


def _time(prepare: Prepare, workload: dict[str, Any], repeats: int) -> dict[str, Any]:
    wanted = workload["output_lens"]
    seconds = []
    for run in range(repeats + 1):
        call = prepare(workload["prompts"][run], wanted, workload["sampling"])
        started = time.perf_counter()
        generated = call()
        seconds.append(time.perf_counter() - started)
        if generated != wanted:
            raise AssertionError("a completion does not have the requested length")
    return {"warm_up_s": seconds[0], "seconds": seconds[1:]}


async def _replays(
    spec: dict[str, Any], load: Callable[[dict[str, Any]], Awaitable[Streaming]], started: float
) -> tuple[dict[str, Any], Callable[[], object]]:
    engine = await load(spec)
    load_seconds, task = time.perf_counter() - started, spec["replays"]
    times = [[0.0] * len(task["output_lens"]), *task["times"]]
    runs = [await replay(engine.stream, *each, task) for each in zip(task["prompts"], times, strict=True)]
    warm_up, *timed = runs
    answer = {"version": engine.version, "load_s": load_seconds, "warm_up_s": warm_up["seconds"], "runs": timed}
    return answer, engine.close


async def replay(stream: Stream, prompts: Prompts, times: list[float], task: dict[str, Any]) -> dict[str, Any]:
    """Send each prompt at its time; measure when its tokens come.

    Args:
        stream: of the engine.
        prompts: token ids.
        times: seconds from now, in order.
        task: has ``output_lens`` and ``sampling``.
    """
    found: dict[str, Any] = {"ttft": [], "tpot": [], "itl": [], "e2e": []}
    started = time.perf_counter()

    async def one(prompt: list[int], length: int, due: float) -> None:
        first = last = 0.0
        count = 0
        async for total in stream(prompt, length, task["sampling"]):
            if total <= count:
                continue
            now = time.perf_counter()
            if count:
                found["itl"].append(now - last)
            else:
                first = now
            count, last = total, now
        if count != length:
            raise AssertionError("a completion does not have the requested length")
        found["ttft"].append(first - due)
        found["e2e"].append(last - due)
        if count > 1:
            found["tpot"].append((last - first) / (count - 1))

    tasks = []
    for prompt, length, at in zip(prompts, task["output_lens"], times, strict=True):
        due = started + at
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(one(prompt, length, due)))
    await asyncio.gather(*tasks)
    return {"seconds": time.perf_counter() - started, **found}
