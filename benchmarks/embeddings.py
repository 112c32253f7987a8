"""Throughput of embeddings on random token ids, and beside vLLM's in the same run.

``python -m benchmarks.embeddings --model FOLDER [--load-format dummy] [--vllm-python PATH]``. Each run has
its own token ids; the first is the warm-up. Nothing comes from a prefix cache. The last line is JSON.
"""

import json
import random
import sys
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.options import options
from rosebatch.bench.against import PEERS, ask, model_folder, require_installed
from rosebatch.bench.case import spread
from rosebatch.bench.workload import token_range
from rosebatch.config.run import RunConfig
from rosebatch.core.plain import dtype_name
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.request import Request
from rosebatch.job.report.provenance import gpu_name
from rosebatch.launch.launch import load
from rosebatch.launch.plan import LaunchPlan, plan_launch


def make_prompts(count: int, shortest: int, longest: int, vocab_size: int, run: int) -> list[list[int]]:
    """Random token ids. Lengths are the same in every run, the ids are not."""
    lengths, ids = random.Random(0), token_range(vocab_size)
    numbers = random.Random(run + 1)
    return [numbers.choices(ids, k=lengths.randint(shortest, longest)) for _ in range(count)]


def run_ours(plan: LaunchPlan, prompts: list[list[list[int]]], params: PoolingParams) -> dict[str, Any]:
    """Seconds of each run but the first, which is the warm-up, and the engine's description."""
    launched = load(plan)
    seconds = []
    for run in prompts:
        requests = [Request(i, tuple(prompt), pooling=params) for i, prompt in enumerate(run)]
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        started = time.perf_counter()
        done = sum(completion.pooled is not None for completion in launched.engine.run(requests))
        seconds.append(time.perf_counter() - started)
        assert done == len(run), "every prompt is embedded"
    return {"seconds": seconds[1:], "engine": launched.description}


def run_vllm(python: str, plan: LaunchPlan, prompts: list[list[list[int]]], args: dict[str, Any]) -> dict[str, Any]:
    """The answer of a process with vLLM, see ``rosebatch.bench.peers.protocol``."""
    peer = replace(PEERS["vllm"], module="rosebatch.bench.peers.vllm_embed", python=python)
    require_installed(peer)
    source = plan.source
    spec = {
        "load_format": source.load_format,
        "device": plan.device.type,
        "dtype": dtype_name(source.dtype),
        "max_num_seqs": plan.config.max_num_seqs,
        "prefix_cache": False,
        "args": args,
        "quantization": None,
        "kv_cache_dtype": "auto",
        "repeats": len(prompts) - 1,
        "workloads": [{"prompts": prompts, "output_lens": [0] * len(prompts[0]), "sampling": {}}],
    }
    return ask(peer, lambda folder: {"model": str(model_folder(source, folder)), **spec})


def main() -> None:
    """Run vLLM if its Python is given, while this process holds no GPU memory; then ours."""
    given = options(
        __doc__,
        model=str,
        load_format=("auto", "dummy"),
        dtype="auto",
        pooling={"choices": ["last", "mean"], "default": "last", "help": "ours; vLLM hears it by --vllm-args"},
        num_prompts=2048,
        shortest=32,
        longest=1024,
        max_num_seqs=256,
        repeats=3,
        vllm_python=None,
        vllm_args={"type": json.loads, "default": {}},
    )
    settings = {"load_format": given.load_format, "dtype": given.dtype, "max_num_seqs": given.max_num_seqs}
    plan = plan_launch(RunConfig.of(given.model, **settings, prefix_cache=False))
    lengths = given.num_prompts, given.shortest, given.longest
    prompts = [make_prompts(*lengths, plan.source.config.vocab_size, run) for run in range(given.repeats + 1)]
    answer = run_vllm(given.vllm_python, plan, prompts, given.vllm_args) if given.vllm_python else None
    ours = run_ours(plan, prompts, PoolingParams(pooling=given.pooling))
    tokens = sum(map(len, prompts[0]))
    result = {
        "gpu": gpu_name(),
        "prompts": given.num_prompts,
        "prompt_tokens": tokens,
        "prompt_tokens_per_s": spread([tokens / seconds for seconds in ours["seconds"]]),
        **ours,
    }
    if answer is not None:
        theirs = answer["workloads"][0]["seconds"]
        result["vllm"] = {
            "version": answer["version"],
            "seconds": theirs,
            "prompt_tokens_per_s": spread([tokens / seconds for seconds in theirs]),
        }
        result["ratio"] = spread([their / our for our, their in zip(ours["seconds"], theirs, strict=True)])
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
