"""Rows with adapters on this engine and on vLLM: a shape with random weights, and adapters in PEFT's folders.

``python -m benchmarks.adapters_vllm [--model configs/models/llama-3.1-8b.toml] [--rows 256] [--adapters 8] [--used 8 0]
[--peer-python PYTHON] [--peer-path FOLDERS]``. Rows have the first adapters in turn, as many as ``--used`` says; with 0
they have none, on an engine that could serve them. Each engine is loaded, timed and ended in a process of its own, ours
first: vLLM fails if memory comes or goes while it looks how much there is. Stderr tells each step and its seconds. The
last line is JSON: the median of the repeats, which follow a warm-up by all rows, and vLLM's seconds by ours.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.adapters import load, prompt_of
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
from rosebatch.engine.load import pick_device
from rosebatch.model.adapters.adapter import read_adapter
from rosebatch.model.adapters.by_row import Added
from rosebatch.model.adapters.changes import LowRank
from rosebatch.model.adapters.folder import ADAPTER_CONFIG, ADAPTER_FILE
from rosebatch.model.hf.folder import write_config
from rosebatch.model.random_weights import DEVIATION, RandomWeights
from rosebatch.model.source import find_model

# The number of an adapter for each row, counted from 1, or 0 for none -> the tokens of each row.
Serve = Callable[[Sequence[int]], list[Sequence[int]]]
_OURS, _VLLM = "rosebatch", "vllm"


def main() -> None:
    """Write model and adapters, and let one engine after the other measure."""
    given = options(
        __doc__,
        model="configs/models/llama-3.1-8b.toml",
        device=("auto", "cuda", "cpu"),
        rows=256,
        prompt=512,
        length=128,
        adapters=8,
        used=[8, 0],
        rank=16,
        repeats=3,
        share=0.9,
        engines=[_OURS, _VLLM],
        peer_python="",
        peer_path="",
    )
    assert 1 < given.adapters >= max(given.used), "there are several, and enough"
    commands: dict[str, tuple[str, Mapping[str, str]]] = {_OURS: (sys.executable, os.environ)}
    if _VLLM in given.engines:
        (peer,) = choose_peers(["vllm"], [], [given.peer_python], [given.peer_path])
        require_installed(peer)
        commands[_VLLM] = peer.python, vllm_environment(peer)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = load_toml(Path(given.model), ModelConfig)
        with _told(f"write {given.adapters} adapters to {folder}"):
            _write(config, folder, given.adapters, given.rank)
        work = folder / "work.json"
        work.write_text(json.dumps({**vars(given), "folder": name, "vocab": config.vocab_size}))
        for engine in filter(given.engines.__contains__, commands):
            python, environment = commands[engine]
            command = [python, "-m", "benchmarks.adapters_vllm", "--run", engine, str(work)]
            with _told(f"process of {engine}"):
                process = subprocess.run(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
                )
            lines = process.stdout.splitlines()
            is_answer = process.returncode == 0 and lines
            found[engine] = json.loads(lines[-1]) if is_answer else {"failed": process.returncode}
            sys.stdout.write(f"{engine:<12}{json.dumps(found[engine])}\n")
            sys.stdout.flush()
    ours, theirs = (found.get(engine, {}).get("median", {}) for engine in (_OURS, _VLLM))
    found["ratio"] = {used: round(theirs[used] / seconds, 3) for used, seconds in ours.items() if used in theirs}
    sys.stdout.write(json.dumps(found) + "\n")


def _write(config: ModelConfig, folder: Path, count: int, rank: int) -> None:
    """The model's config, and adapters of all linears of its layers, as PEFT saves them: folders 1, 2, and so on."""
    (folder / "model").mkdir()
    write_config(config, folder / "model")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    shapes = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    }
    # Alpha is so large that answers change, which is checked.
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "model", "bias": "none"}
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    config_text = json.dumps({**fields, "r": rank, "lora_alpha": 16 * rank, "target_modules": targets})
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, config.dtype)
    for number in range(1, count + 1):
        own = folder / str(number)
        own.mkdir()
        (own / ADAPTER_CONFIG).write_text(config_text)
        tensors = {
            f"base_model.model.{name}.lora_{part}.weight": torch.empty(size, dtype=dtype).normal_(
                0.0, DEVIATION, generator=generator
            )
            for name, (out, width) in shapes.items()
            for part, size in (("A", (rank, width)), ("B", (out, rank)))
        }
        save_file(tensors, own / ADAPTER_FILE, {"format": "pt"})


def _measure(engine: str, path: Path) -> None:
    """Load an engine, and time it with each number of adapters."""
    turn = Turn()
    given = json.loads(path.read_text())
    prompts = [prompt_of(row, given["prompt"], given["vocab"]) for row in range(given["rows"])]
    with _told(f"{engine}: import and load"):
        serve, version = (_ours if engine == _OURS else _vllm)(given, prompts)
    seconds, tokens = dict[int, list[float]](), dict[int, list[Sequence[int]]]()
    for used in given["used"]:
        numbers = [1 + row % used if used else 0 for row in range(given["rows"])]
        seconds[used] = []
        for repeat in range(given["repeats"] + 1):
            with _told(f"{engine}: {given['rows']} rows, {used} adapters, {f'run {repeat}' if repeat else 'warm-up'}"):
                began = time.perf_counter()
                tokens[used] = serve(numbers)
                seconds[used].append(round(time.perf_counter() - began, 3))
            assert [*map(len, tokens[used])] == [given["length"]] * given["rows"], "all rows have all tokens"
    found = {
        "version": version,
        "median": {used: statistics.median(each[1:]) for used, each in seconds.items()},
        "warm_up": {used: each[0] for used, each in seconds.items()},
        "seconds": {used: each[1:] for used, each in seconds.items()},
    }
    if 0 in tokens:
        # Rows whose answer is not the model's own: adapters that change nothing were not there.
        changed = {used: sum(map(_differ, own, tokens[0])) for used, own in tokens.items() if used}
        found["changed_rows"] = changed
    turn.answer(found)


def _differ(one: Sequence[int], other: Sequence[int]) -> bool:
    return [*one] != [*other]


def _ours(given: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> tuple[Serve, str]:
    folder = Path(given["folder"])
    limits = RunConfig(
        model=given["model"],
        load_format="dummy",
        device=given["device"],
        max_num_seqs=given["rows"],
        max_model_len=given["prompt"] + given["length"],
        gpu_memory_utilization=given["share"],
        switches={"prefix_cache": False},
    )
    device = pick_device(limits.device)
    adapters = tuple(read_adapter(str(number), folder / str(number)) for number in range(1, given["adapters"] + 1))
    asked = set[str]()

    def added(weights: RandomWeights, name: str, shape: tuple[int, ...]) -> tuple[Added | None, ...]:
        asked.add(name)
        changes = [each.change(name, shape) for each in adapters]
        place = weights.device
        return tuple(
            Added.of(change, lambda tensor, dtype: tensor.to(place, dtype)) if isinstance(change, LowRank) else None
            for change in changes
        )

    engine = load(replace(find_model(limits, device), adapters=adapters), limits, device, added)
    assert all(asked.issuperset(each.changes) for each in adapters), "each tensor of an adapter has its place"
    sampling = SamplingParams(max_tokens=given["length"], ignore_eos=True, temperature=0.0)

    def serve(numbers: Sequence[int]) -> list[Sequence[int]]:
        requests = [
            Request(row, TokenIds.of([*prompt]), sampling, adapter=str(number) if number else "")
            for row, (prompt, number) in enumerate(zip(prompts, numbers, strict=True))
        ]
        done = sorted(engine.run(requests), key=lambda completion: completion.request.id)
        return [completion.token_ids for completion in done]

    return serve, torch.__version__


def _vllm(given: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> tuple[Serve, str]:
    os.environ.update(VLLM_LOGGING_LEVEL="WARNING", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    # FlashInfer compiles its sampler for minutes, and all is greedy here.
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    import vllm
    from vllm.lora.request import LoRARequest

    folder = Path(given["folder"])
    llm = vllm.LLM(
        str(folder / "model"),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=given["rows"],
        max_model_len=given["prompt"] + given["length"],
        gpu_memory_utilization=given["share"],
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=given["adapters"],
        max_lora_rank=given["rank"],
        seed=0,
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=given["length"], ignore_eos=True, detokenize=False)
    named = [
        None,
        *(LoRARequest(str(number), number, str(folder / str(number))) for number in range(1, given["adapters"] + 1)),
    ]

    def serve(numbers: Sequence[int]) -> list[Sequence[int]]:
        outputs = llm.generate(
            [{"prompt_token_ids": [*prompt]} for prompt in prompts],
            sampling,
            lora_request=[named[number] for number in numbers],
            use_tqdm=False,
        )
        return [[*output.outputs[0].token_ids] for output in outputs]

    return serve, vllm.__version__


@contextmanager
def _told(step: str) -> Iterator[None]:
    """Tell on stderr that a step begins, and its seconds."""
    began = time.perf_counter()
    sys.stderr.write(f"adapters_vllm: {step} …\n")
    sys.stderr.flush()
    yield
    sys.stderr.write(f"adapters_vllm: {step}: {time.perf_counter() - began:.1f} s\n")
    sys.stderr.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        _measure(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
