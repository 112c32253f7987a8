"""K and V in 8 bits: a row's bits are the same alone, in a batch, in chunks, behind a prefix and after a preemption."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rosebatch.config.run import RunConfig
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.model.source import find_model
from tests.helpers.running import greedy, run

NEW_TOKENS = 8
needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="in fp32 a last bit may depend on the batch"
)


def results(engine, prompts):
    """Tokens and log-probabilities of each prompt."""
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=3)
    done = run(engine, [Request(i, tuple(prompt), sampling) for i, prompt in enumerate(prompts)])
    return {i: (each.token_ids, each.logprobs) for i, each in done.items()}


@pytest.fixture
def alone(goldens, make_engine):
    """The first prompts, each by itself, whole, nothing shared."""

    def compute(name, count=64, **options):
        engine = make_engine(
            goldens(name).folder, "bfloat16", seqs=1, chunked_prefill=False, prefix_cache=False, **options
        )
        return results(engine, goldens(name).prompts[:count])

    return compute


@pytest.mark.thorough
@needs_bf16
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_prompt_attends_to_what_is_stored(name, goldens, make_engine, alone):
    """Whole prompts attended to K and V before they were rounded: chunks, prefixes and breaks then changed tokens."""
    prompts, fp8 = goldens(name).prompts, {"kv_cache_dtype": "fp8"}
    expected = alone(name, **fp8)
    assert alone(name, 8) != {i: expected[i] for i in range(8)}, "8 bits change nothing?"
    ways = [{}, {"chunk": 7, "block_size": 5}, {"chunk": 50, "block_size": 4, "blocks": 28}, {"block_size": 1}]
    engines = [make_engine(goldens(name).folder, "bfloat16", **fp8, **way) for way in ways]
    assert [results(engine, prompts) == expected for engine in engines] == [True] * 4
    assert engines[2].stats.preemptions > 5
    copied = engines[3].stats.copied_blocks
    assert results(engines[3], prompts) == expected
    assert engines[3].stats.copied_blocks - copied == len(prompts)


@pytest.mark.parametrize("model_impl", ["rosebatch", "transformers"])
def test_which_layers_store_it(goldens, make_engine, model_impl):
    """Short windows keep their dtype, beside layers without; the shape knows it before anything is loaded."""
    folder = goldens("gemma3").folder
    config = find_model(
        RunConfig(model=str(folder), kv_cache_dtype="fp8", model_impl=model_impl), torch.device("cpu")
    ).config
    assert {0 < window <= 512 for window in config.kv_windows} == {True, False}
    engine = make_engine(folder, kv_cache_dtype="fp8", model_impl=model_impl)
    planes = [spec.planes for spec in engine.runner.model.mixers]
    assert tuple(planes) == config.kv_planes
    assert [len(each) == 1 for each in planes] == [0 < window <= 512 for window in config.kv_windows]
    assert {tensor.dtype for tensor in engine.runner.cache.tensors} == {torch.uint8, torch.float32}
    assert greedy(engine, [(5, 6, 7)], 3)


def test_scales_of_a_checkpoint_are_not_needed(goldens, make_engine, tmp_path):
    """By any of their names, with their scheme: they are no reason to refuse or to warn, and change no token."""
    folder, prompts = goldens("llama").folder, goldens("llama").prompts[:6]
    expected = greedy(make_engine(folder, kv_cache_dtype="fp8"), prompts, NEW_TOKENS)
    shutil.copytree(folder, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    # Queries are not stored, but may have a scale: an engine that rounded them by K's answered garbage.
    names = [f"{each}_scale" for each in ("q", "k", "v", "kv")]
    names += [f"{each}_proj.{each}_scale" for each in "qkv"] + [f"{each}_proj.output_scale" for each in "qkv"]
    # Of activations, which are rounded by their own largest numbers.
    names += [f"q_proj.{each}" for each in ("activation_scale", "input_scale", "input_zero_point")]
    scales = {f"model.layers.0.self_attn.{name}": torch.tensor([0.25]) for name in names}
    save_file({**tensors, **scales}, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    values["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
    }
    (tmp_path / "m" / "config.json").write_text(json.dumps(values))
    assert greedy(make_engine(tmp_path / "m", kv_cache_dtype="fp8"), prompts, NEW_TOKENS) == expected
    assert find_model(RunConfig(model=str(tmp_path / "m")), torch.device("cpu")).require_loadable() == []
