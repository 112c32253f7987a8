"""Completions of a prompt, and rows under one instruction, on a model whose layers keep states: shared or not.

``python -m benchmarks.shared_states [--model configs/models/qwen3.5-9b.toml] [--works completions instruction]
[--engines rosebatch vllm vllm-cached] [--peer-python PYTHON] [--peer-path FOLDERS]``. Weights are random, prompts are
random token ids that no run has had before. ``completions``: 8 of each of 64 prompts of 1,000 tokens, 64 tokens each.
``instruction``: 1,000 rows of 1,500 tokens in common and 100 of their own, 32 tokens each. Each engine is loaded
alone. Ours runs each work with shared states, without, and with them again. vLLM runs it twice by its defaults, or
with ``enable_prefix_caching``. A line for each engine, work and way has the seconds; the last line is JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.batch_commands import vllm_environment
from benchmarks.engines_in_turn import Turn
from benchmarks.options import options
from rosebatch.bench.against import choose_peers, require_installed
from rosebatch.config.model import ModelConfig
from rosebatch.config.run import RunConfig
from rosebatch.config.toml_file import load_toml
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.token_ids import TokenIds
from rosebatch.launch.launch import launch
from rosebatch.model.hf.folder import write_config

# Computes prompts in a way; returns how many tokens were computed, or 0 where nobody counts.
Serve = Callable[[str, Sequence[Sequence[int]], "Work"], int]
_FIRST_ID, _LAST_ID = 1000, 30_000


class Work(NamedTuple):
    """What is computed.

    Attributes:
        rows: prompts.
        common, own: tokens of each that all have, and others.
        samples: completions of each.
        length: tokens of each completion.
    """

    rows: int
    common: int
    own: int
    samples: int
    length: int


WORKS = {"completions": Work(64, 0, 1000, 8, 64), "instruction": Work(1000, 1500, 100, 1, 32)}


def main() -> None:
    """Let one engine after the other load and measure."""
    given = options(
        __doc__,
        model="configs/models/qwen3.5-9b.toml",
        works=list(WORKS),
        engines=["rosebatch"],
        scale=1.0,
        device="auto",
        peer_python="",
        peer_path="",
    )
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "work.json").write_text(json.dumps({**vars(given), "folder": name}))
        for engine in given.engines:
            command, environment = [sys.executable], dict[str, str](os.environ)
            if engine != "rosebatch":
                (peer,) = choose_peers(["vllm"], [], [given.peer_python], [given.peer_path])
                require_installed(peer)
                write_config(load_toml(Path(given.model), ModelConfig), folder)
                command, environment = [peer.python], dict(vllm_environment(peer))
            command += ["-m", "benchmarks.shared_states", "--run", engine, str(folder / "work.json")]
            process = subprocess.run(command, env=environment, input="\n", stdout=subprocess.PIPE, text=True)
            lines = process.stdout.splitlines()
            found[engine] = json.loads(lines[-1]) if process.returncode == 0 else {"failed": process.returncode}
    sys.stdout.write(json.dumps(found) + "\n")


def prompts_of(work: Work, rng: np.random.Generator) -> list[list[int]]:
    """Random ones, with their common beginning."""
    common = rng.integers(_FIRST_ID, _LAST_ID, work.common)
    return [[*common.tolist(), *rng.integers(_FIRST_ID, _LAST_ID, work.own).tolist()] for _ in range(work.rows)]


def _measure(engine: str, path: Path) -> None:
    turn = Turn()
    given = json.loads(path.read_text())
    serve, ways = _ours(given) if engine == "rosebatch" else _vllm(engine, given)
    rng, found = np.random.default_rng(0), []
    for name in given["works"]:
        work = WORKS[name]
        work = work._replace(rows=max(int(work.rows * given["scale"]), 2))
        for way in dict.fromkeys(ways):
            # Kernels are compiled, and graphs captured.
            serve(way, prompts_of(work._replace(rows=min(work.rows, 32)), rng), work)
        for way in ways:
            prompts = prompts_of(work, rng)
            began = time.perf_counter()
            computed = serve(way, prompts, work)
            seconds = round(time.perf_counter() - began, 3)
            found.append({"engine": engine, "work": name, "way": way, "seconds": seconds, "computed": computed})
            sys.stderr.write(json.dumps(found[-1]) + "\n")
    turn.answer(found)


def _ours(given: Mapping[str, Any]) -> tuple[Serve, Sequence[str]]:
    engine = launch(RunConfig(model=given["model"], load_format="dummy", device=given["device"])).engine

    def serve(way: str, prompts: Sequence[Sequence[int]], work: Work) -> int:
        planner = engine.scheduler.planner
        planner.share_prompts = planner.prefixes.enabled = way == "shared"
        sampling = SamplingParams(temperature=1.0, max_tokens=work.length, ignore_eos=True, n=work.samples)
        stats = engine.restart_stats()
        requests = (Request(number, TokenIds.of(prompt), sampling) for number, prompt in enumerate(prompts))
        done = sum(1 for _ in engine.run(requests))
        assert done == len(prompts) * work.samples, "every completion came"
        return stats.computed_tokens

    return serve, ["shared", "not shared", "shared"]


def _vllm(engine: str, given: Mapping[str, Any]) -> tuple[Serve, Sequence[str]]:
    os.environ.update(VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    # FlashInfer compiles its sampler for minutes.
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    import vllm

    llm = vllm.LLM(
        given["folder"],
        load_format="dummy",
        max_model_len=4096,
        skip_tokenizer_init=True,
        seed=0,
        **({"enable_prefix_caching": True} if engine == "vllm-cached" else {}),
    )

    def serve(way: str, prompts: Sequence[Sequence[int]], work: Work) -> int:
        sampling = vllm.SamplingParams(
            temperature=1.0, max_tokens=work.length, ignore_eos=True, detokenize=False, n=work.samples
        )
        outputs = llm.generate([{"prompt_token_ids": list(each)} for each in prompts], sampling, use_tqdm=False)
        assert sum(len(output.outputs) for output in outputs) == len(prompts) * work.samples
        return 0

    return serve, [vllm.__version__] * 2


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        _measure(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
