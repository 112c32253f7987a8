"""vLLM on the rows of ``benchmarks.same_bytes``: how many differ in other company, in its mode for that and without.

``python -m benchmarks.same_bytes_vllm --folder FOLDER [--dtype DTYPE] [--peer-python PYTHON] [--peer-path FOLDERS]``.
The folder has a config.json; weights are random. Both engines are loaded before the first is timed. The last line is
JSON.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.batch_commands import vllm_environment
from benchmarks.engines_in_turn import Turn, measure_in_turn
from benchmarks.options import options
from benchmarks.same_bytes import make_rows
from rosebatch.bench.against import choose_peers, require_installed

# What the engine makes of rows: the tokens and log-probabilities of each.
Serve = Callable[[Sequence[Mapping[str, Any]]], list[Any]]
_EVERY = 8


def main() -> None:
    """Start an engine in its mode and one without, and let one after the other measure."""
    given = options(
        __doc__,
        folder=str,
        dtype=("bfloat16", "float16"),
        rows=400,
        longest=1000,
        max_tokens=64,
        vocab=1000,
        share=0.4,
        peer_python="",
        peer_path="",
    )
    (peer,) = choose_peers(["vllm"], [], [given.peer_python], [given.peer_path])
    require_installed(peer)
    spec = json.dumps(vars(given))
    command = [peer.python, "-m", "benchmarks.same_bytes_vllm", spec]
    modes = [f"VLLM_BATCH_INVARIANT={mode}" for mode in "10"]
    engines = {mode: (command, {**vllm_environment(peer), "VLLM_BATCH_INVARIANT": mode[-1]}) for mode in modes}
    found = dict(measure_in_turn(engines))
    sys.stdout.write(json.dumps(found) + "\n")


def _measure(given: Mapping[str, Any]) -> None:
    turn = Turn()
    serve = _engine(given)
    rows = make_rows(given["rows"], given["longest"], given["vocab"], given["max_tokens"])
    serve(rows[:_EVERY])
    turn.wait()
    turn.answer(compare(serve, rows))


def compare(serve: Serve, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Serve all rows twice, reversed, and every eighth alone; rows that differ from the first time, and seconds."""
    expected, seconds = _timed(serve, rows)
    again, more = _timed(serve, rows)
    backwards, _ = _timed(serve, rows[::-1])
    alone = [serve([row])[0] for row in rows[::_EVERY]]
    pairs = {
        "again": (again, expected),
        "reversed": (backwards[::-1], expected),
        "alone": (alone, expected[::_EVERY]),
    }
    differ = {name: sum(a != b for a, b in zip(*both, strict=True)) / len(both[0]) for name, both in pairs.items()}
    return {"differ": differ, "seconds": min(seconds, more), "rows": len(rows)}


def _timed(serve: Serve, rows: Sequence[Mapping[str, Any]]) -> tuple[list[Any], float]:
    started = time.perf_counter()
    found = serve(rows)
    return found, time.perf_counter() - started


def _engine(given: Mapping[str, Any]) -> Serve:
    import vllm

    numbers = random.Random(0)
    llm = vllm.LLM(
        given["folder"],
        dtype=given["dtype"],
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2 * given["longest"],
        gpu_memory_utilization=given["share"],
        seed=0,
    )
    seeds = {f"row {index}": numbers.randrange(2**32) for index in range(given["rows"])}

    def serve(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        prompts = [{"prompt_token_ids": row["prompt_token_ids"]} for row in rows]
        params = [
            vllm.SamplingParams(
                **{name: value for name, value in row.items() if name not in ("id", "prompt_token_ids")},
                **({} if "temperature" in row else {"temperature": 0.0}),
                seed=seeds[row["id"]],
                detokenize=False,
            )
            for row in rows
        ]
        return [
            [
                (list(out.token_ids), [{key: value.logprob for key, value in each.items()} for each in out.logprobs])
                for out in found.outputs
            ]
            for found in llm.generate(prompts, params, use_tqdm=False)
        ]

    return serve


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):
        _measure(json.loads(sys.argv[1]))
    else:
        main()
