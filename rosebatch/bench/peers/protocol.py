"""The task and the answer of a peer process: a JSON file in, one line of JSON on stdout.

The specification has these fields:

- ``model``: a transformers folder; ``load_format``: ``auto`` or ``dummy``; ``device``; ``dtype``
- ``max_num_seqs``, ``prefix_cache``, ``repeats``
- ``args``: for the engine's constructor
- ``workloads``: a list. Each has ``prompts`` (for every run a list of prompts as token ids; the first run is the
  warm-up), ``output_lens``, and ``sampling`` (the temperature, and all fields that differ from their default).

The answer has ``version``, ``load_s`` (imports included) and ``workloads``. Each of these has ``warm_up_s``, and the
``seconds`` of every timed run.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Prompts = list[list[int]]
# Prompts, output lengths and sampling -> a call that generates and returns how many tokens each prompt got.
Prepare = Callable[[Prompts, list[int], dict[str, Any]], Callable[[], list[int]]]


class Loaded(NamedTuple):
    """An engine that is ready."""

    version: str
    prepare: Prepare
    close: Callable[[], object] = lambda: None


def serve(load: Callable[[dict[str, Any]], Loaded]) -> None:
    """Answer the specification whose path is this process's only argument.

    Args:
        load: imports the engine and builds it.
    """
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # Engines write to stdout from Python, from C and from processes that they start. So the answer gets a descriptor
    # of its own, and everything that is written to stdout goes to stderr.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    started = time.perf_counter()
    engine = load(spec)
    load_seconds = time.perf_counter() - started
    timed = [_time(engine.prepare, workload, spec["repeats"]) for workload in spec["workloads"]]
    json.dump({"version": engine.version, "load_s": load_seconds, "workloads": timed}, answer)
    answer.write("\n")
    answer.close()
    engine.close()


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
