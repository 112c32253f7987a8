"""An engine with a model, in a process of its own: it loads, waits for a line on stdin, and is timed.

``python -m benchmarks.scores_and_vectors_engines SPEC.json``. Its first line on stdout has the version and the seconds
of loading, the last one those of each run.
"""

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# From the rows of a work to a number, or a vector, of each of their results.
Call = Callable[[list[Any], list[Any]], Any]
# Ways of vLLM to score continuations, by the parameter that asks for it.
SLOW = ("prompt_logprobs", "prompt_logprob_token_ids")


def main() -> None:
    """Load, wait, measure.

    The specification has ``engine`` and ``work``, ``folder`` of the model, ``device``, ``args`` for the engine's
    constructor, ``rows``, ``shares`` (of the rows that a call gets, where that is not all), ``repeats`` and
    ``results``: a folder for those of the last run.
    """
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # Engines write to stdout, too.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    started = time.perf_counter()
    version, calls = ENGINES[spec["engine"]](spec)
    _tell(answer, {"version": version, "load_s": time.perf_counter() - started})
    sys.stdin.readline()
    _tell(answer, {name: _measured(call, name, spec) for name, call in calls.items()})


def _tell(answer: Any, values: dict[str, Any]) -> None:
    answer.write(json.dumps(values) + "\n")
    answer.flush()


def _measured(call: Call, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """One way that fails costs only itself."""
    try:
        return _measure(call, name, spec)
    except Exception:
        return {"error": traceback.format_exc()[-3000:]}


def _measure(call: Call, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    from benchmarks.scores_and_vectors_works import WORKS

    rows = max(1, round(spec["rows"] * spec["shares"].get(name, 1)))
    seconds, results = [], np.empty(0)
    for run in range(spec["repeats"] + 1):
        # Other texts each time: nothing comes from a prefix cache.
        first, second = WORKS[spec["work"]].make(rows, random.Random(run))
        started = time.perf_counter()
        found = call(first, second)
        seconds.append(time.perf_counter() - started)
        results = np.array(found, np.float32)
    np.save(Path(spec["results"]) / f"{spec['engine']}-{name}.npy", results)
    return {"rows": rows, "warm_up_s": seconds[0], "seconds": seconds[1:]}


def _rosebatch(spec: dict[str, Any]) -> tuple[str, dict[str, Call]]:
    import rosebatch

    llm: Any = rosebatch.LLM(spec["folder"], device=spec["device"], **spec["args"])
    calls: dict[str, Call] = {
        "pairs": lambda first, second: [out.outputs.score for out in llm.score(first, second)],
        "texts": lambda first, _: [out.outputs.embedding for out in llm.embed(first)],
        "continuations": lambda first, second: [
            score.logprob for out in llm.score(first, second) for score in out.scores
        ],
    }
    return rosebatch.__version__, {"": calls[spec["work"]]}


def _sentence_transformers(spec: dict[str, Any]) -> tuple[str, dict[str, Call]]:
    """Its default number of rows at once, and what fills a GPU."""
    import sentence_transformers

    given = {"device": spec["device"], "local_files_only": True, "model_kwargs": {"dtype": "auto"}, **spec["args"]}
    if spec["work"] == "texts":
        encoder = sentence_transformers.SentenceTransformer(spec["folder"], **given)

        def of(size: int) -> Call:
            return lambda first, _: encoder.encode(first, batch_size=size)
    else:
        scorer = sentence_transformers.CrossEncoder(spec["folder"], **given)

        def of(size: int) -> Call:
            return lambda first, second: scorer.predict([*zip(first, second, strict=True)], batch_size=size)

    return sentence_transformers.__version__, {f"batch of {size}": of(size) for size in (32, 256)}


def _transformers(spec: dict[str, Any]) -> tuple[str, dict[str, Call]]:
    """One context at a time, with its continuations padded: the plainest way, to check results by."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(spec["folder"], dtype="auto", **spec["args"])
    model = model.to(spec["device"]).eval()

    def of_row(context: list[int], continuations: list[list[int]]) -> list[float]:
        longest = max(map(len, continuations))
        ids = [context + each + [0] * (longest - len(each)) for each in continuations]
        given = torch.tensor(ids, device=spec["device"])
        logits = model(given, logits_to_keep=longest + 1).logits[:, :-1].float()
        found = logits.log_softmax(-1).gather(-1, given[:, -longest:, None])[..., 0].tolist()
        return [sum(own[: len(each)]) for own, each in zip(found, continuations, strict=True)]

    def score(first: list[Any], second: list[Any]) -> list[float]:
        with torch.inference_mode():
            return [each for row in map(of_row, first, second) for each in row]

    return transformers.__version__, {"": score}


def _vllm(spec: dict[str, Any]) -> tuple[str, dict[str, Call]]:
    """Its engine for the work. Given token ids at positions are its second way to score continuations."""
    os.environ.update(VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    # For a maximum length over that of a folder of sentence-transformers; the model itself has more positions.
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    import vllm

    scores = spec["work"] == "continuations"
    kind = {"skip_tokenizer_init": True, "enable_prefix_caching": True} if scores else {"runner": "pooling"}
    llm = vllm.LLM(spec["folder"], seed=0, **{**kind, **spec["args"]})
    plain = {"max_tokens": 1, "temperature": 0, "ignore_eos": True, "detokenize": False}

    def whole(first: list[Any], second: list[Any]) -> list[float]:
        pairs = [(context, own) for context, continuations in zip(first, second, strict=True) for own in continuations]
        prompts = [{"prompt_token_ids": context + own} for context, own in pairs]
        # These read nothing from the prefix cache.
        params = vllm.SamplingParams(prompt_logprobs=0, flat_logprobs=True, **plain)
        outs = llm.generate(prompts, params, use_tqdm=False)
        return [
            sum(out.prompt_logprobs[len(context) + n][token_id].logprob for n, token_id in enumerate(own))
            for out, (context, own) in zip(outs, pairs, strict=True)
        ]

    def positions(first: list[Any], second: list[Any]) -> list[float]:
        pairs = [(context, own) for context, continuations in zip(first, second, strict=True) for own in continuations]
        prompts = [{"prompt_token_ids": context + own} for context, own in pairs]
        params = [
            vllm.SamplingParams(
                prompt_logprob_token_ids=np.array(own)[:, None],
                prompt_logprob_start=len(context) - 1,
                skip_reading_prefix_cache=False,
                **plain,
            )
            for context, own in pairs
        ]
        return [float(out.prompt_token_id_logprobs.sum()) for out in llm.generate(prompts, params, use_tqdm=False)]

    calls: dict[str, dict[str, Call]] = {
        "pairs": {"": lambda first, second: [out.outputs.score for out in llm.score(first, second, use_tqdm=False)]},
        "texts": {"": lambda first, _: [out.outputs.embedding for out in llm.embed(first, use_tqdm=False)]},
        "continuations": dict(zip(SLOW, (whole, positions), strict=True)),
    }
    return vllm.__version__, calls[spec["work"]]


ENGINES: dict[str, Callable[[dict[str, Any]], tuple[str, dict[str, Call]]]] = {
    "rosebatch": _rosebatch,
    "vllm": _vllm,
    "sentence-transformers": _sentence_transformers,
    "transformers": _transformers,
}


if __name__ == "__main__":
    main()
