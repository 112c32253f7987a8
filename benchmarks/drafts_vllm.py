"""Copies and JSON by a schema on this engine and on vLLM, without drafts and with: vLLM in its n-gram mode.

``python -m benchmarks.drafts_vllm --tokenizer FOLDER [--model configs/models/qwen3-0.6b.toml] [--rows 256 8] [--works
copies json] [--engines off auto vllm vllm-ngram] [--peer-python PYTHON] [--peer-path FOLDERS]``. The prompts of copies
are those of ``benchmarks.copies``: each sub-layer adds zero, so that all engines find the same document. Those of JSON
have the schema of ``benchmarks.json_by_schema``. Each engine keeps its share of the GPU's memory from its start on.
They are loaded and then timed one after the other. A line for each engine, work and number of rows has the seconds of
each repeat, on stderr once they are known; the last line is JSON.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.batch_commands import vllm_environment
from benchmarks.copies import changed
from benchmarks.engines_in_turn import Turn, measure_in_turn
from benchmarks.json_by_schema import schema
from benchmarks.options import options
from benchmarks.random_folder import write_random_folder
from rosebatch.bench.against import choose_peers, require_installed
from rosebatch.config.model import ModelConfig
from rosebatch.config.toml_file import load_toml
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.structured_outputs import StructuredOutputsParams
from rosebatch.llm.llm import LLM

# Serves prompts, with a schema or for so many tokens; returns how many tokens that gave.
Serve = Callable[[Sequence[Sequence[int]], dict[str, Any] | int], int]
_NGRAM = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 8, "prompt_lookup_min": 3}


def main() -> None:
    """Write the model and the prompts, and let one engine after the other measure."""
    given = options(
        __doc__,
        tokenizer=str,
        model="configs/models/qwen3-0.6b.toml",
        rows=[256, 8],
        length=800,
        repeats=2,
        share=0.2,
        works=["copies", "json"],
        engines=["off", "auto", "vllm", "vllm-ngram"],
        peer_python="",
        peer_path="",
    )
    environments: dict[str, Mapping[str, str]] = dict.fromkeys(given.engines, os.environ)
    commands = {name: [sys.executable] for name in given.engines}
    if any("vllm" in name for name in given.engines):
        (peer,) = choose_peers(["vllm"], [], [given.peer_python], [given.peer_path])
        require_installed(peer)
        for name in filter(lambda name: "vllm" in name, given.engines):
            environments[name], commands[name] = vllm_environment(peer), [peer.python]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_model(Path(given.model), Path(given.tokenizer), folder / "model")
        prompts = _copies(folder / "model", max(given.rows) * (given.repeats + 1), given.length)
        (folder / "work.json").write_text(json.dumps({**vars(given), "folder": name, "prompts": prompts}))
        engines = {
            engine: (
                [*commands[engine], "-m", "benchmarks.drafts_vllm", "--run", engine, str(folder / "work.json")],
                environments[engine],
            )
            for engine in given.engines
        }
        found = {}
        for engine, answer in measure_in_turn(engines):
            found[engine] = answer
            sys.stdout.write(f"{engine:<12}{json.dumps(answer)}\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps(found) + "\n")


def _write_model(shape: Path, tokenizer: Path, folder: Path) -> None:
    """A random model whose sub-layers add zero, with a head of its own."""
    config = load_toml(shape, ModelConfig)
    write_random_folder(msgspec.structs.replace(config, tie_word_embeddings=False), tokenizer, folder)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _copies(folder: Path, rows: int, length: int) -> list[list[int]]:
    """Documents with a tenth of their tokens changed, each behind it its first token."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = load_file(folder / "model.safetensors", device=device)
    embedding, head = (weights[name].float() for name in ("model.embed_tokens.weight", "lm_head.weight"))
    rng = np.random.default_rng(0)
    tokens = torch.from_numpy(rng.choice(len(embedding), rows, replace=False)).to(device)
    orbits = [tokens]
    for _ in range(length):
        hidden = embedding[tokens]
        hidden = hidden * hidden.square().mean(1, keepdim=True).add(1e-6).rsqrt()
        tokens = (hidden @ head.T).argmax(1)
        orbits.append(tokens)
    return [changed(document, rng, len(embedding)) for document in torch.stack(orbits[:-1], 1).tolist()]


def _measure(engine: str, path: Path) -> None:
    turn = Turn()
    given = json.loads(path.read_text())
    serve = (_vllm if "vllm" in engine else _ours)(engine, given)
    numbers = [[(7 * row + 3 * i) % 40_000 + 100 for i in range(200)] for row in range(len(given["prompts"]))]
    works: dict[str, tuple[Any, Any]] = {"copies": (given["prompts"], given["length"]), "json": (numbers, schema())}
    turn.wait()
    found = []
    for work in given["works"]:
        for rows in given["rows"]:
            prompts, wanted = works[work]
            seconds, count = [], 0
            for repeat in range(given["repeats"] + 1):
                # Answers of other rows: of the same ones, drafts would be found in the last.
                own = prompts[repeat * rows : (repeat + 1) * rows]
                started = time.perf_counter()
                count = serve(own, wanted)
                seconds.append(round(time.perf_counter() - started, 3))
            found.append({"work": work, "rows": rows, "tokens": count, "first": seconds[0], "seconds": seconds[1:]})
            sys.stderr.write(f"{engine} {json.dumps(found[-1])}\n")
    turn.answer(found)


def _ours(engine: str, given: Mapping[str, Any]) -> Serve:
    model = str(Path(given["folder"]) / "model")
    llm = LLM(model, speculative=engine, max_num_seqs=1024, gpu_memory_utilization=given["share"], prefix_cache=False)

    def serve(prompts: Sequence[Sequence[int]], wanted: dict[str, Any] | int) -> int:
        sampling = SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=None)
        if isinstance(wanted, int):
            sampling = replace(sampling, max_tokens=wanted, ignore_eos=True)
        else:
            sampling = replace(sampling, structured_outputs=StructuredOutputsParams(json=wanted))
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], sampling)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return serve


def _vllm(engine: str, given: Mapping[str, Any]) -> Serve:
    os.environ.update(VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    # FlashInfer compiles its sampler for minutes, and all is greedy here.
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    import vllm
    from vllm.sampling_params import StructuredOutputsParams as Structured

    llm = vllm.LLM(
        str(Path(given["folder"]) / "model"),
        max_model_len=4096,
        gpu_memory_utilization=given["share"],
        enable_prefix_caching=False,
        seed=0,
        **({"speculative_config": _NGRAM} if "ngram" in engine else {}),
    )

    def serve(prompts: Sequence[Sequence[int]], wanted: dict[str, Any] | int) -> int:
        if isinstance(wanted, int):
            sampling = vllm.SamplingParams(temperature=0.0, max_tokens=wanted, ignore_eos=True, detokenize=False)
        else:
            structured = Structured(json=wanted, disable_additional_properties=True)
            sampling = vllm.SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=structured)
        outputs = llm.generate([{"prompt_token_ids": list(each)} for each in prompts], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return serve


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        _measure(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
