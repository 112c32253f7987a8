"""On a GPU with ``--batch-invariant``, a row's tokens and log-probabilities are the same bits in any company."""

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.quantize_folder import quantize
from rosebatch.bench.scenario import configs_dir
from rosebatch.config.model import ModelConfig
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.config.toml_file import load_toml
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.cache.kv_cache import bytes_per_block
from rosebatch.engine.sampling.features import Features
from rosebatch.engine.scheduling.step_planner import StepPlanner
from rosebatch.engine.triton_runner.state import DeviceState
from rosebatch.engine.triton_runner.token_sampler import TokenSampler, _copy
from rosebatch.launch.launch import launch
from rosebatch.ops.device import device_ops, keep_products_whole
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.experts import sizes as expert_sizes
from rosebatch_kernels.feedback import layout
from rosebatch_kernels.linear import kernel
from rosebatch_kernels.linear import sizes as linear_sizes
from rosebatch_kernels.linear.invariant import FixedLinear, differing_rows
from rosebatch_kernels.linear.streamed import StreamedHead, StreamedLinear
from rosebatch_kernels.linear.torch_linear import TorchLinear
from rosebatch_kernels.mlp import kernel as mlp_kernel
from rosebatch_kernels.paged_attention import sizes as attention_sizes
from rosebatch_kernels.sampling import kernel as sampling_kernel
from tests.engine.test_triton_invariance import answers_as_prompts, library_products, no_replay
from tests.helpers.tiny_engines import engine_of, random_model
from tests.kernels.test_sampling_kernel import parameters

pytestmark = pytest.mark.gpu

FAMILIES = ["GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "gemma2", "gpt_oss", "qwen3_moe"]
FAMILIES += ["qwen3_next", "qwen3_5", "lfm2", "bamba", "granite4_h", "nemotron_h", "falcon_h1"]
FAMILIES += ["deepseek_v3", "gemma4", "gemma4_moe", "gemma4_e", "lfm2_moe", "olmo_hybrid"]
FAMILIES += ["kimi_linear"]
# Chunks of these end at multiples of 64 tokens; the keys of HP1's are added up otherwise where none are divided.
OF_TILES = ["qwen3_next", "qwen3_5", "bamba", "granite4_h", "nemotron_h", "falcon_h1", "HP1", "HP1 options"]
OF_TILES += ["olmo_hybrid", "kimi_linear"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"frequency_penalty": 0.8, "temperature": 0.7},
    {"n": 2, "temperature": 1.1},
]
# (out, in): of Llama-8B and Qwen3-0.6B, GPT-2's, and sizes that are no multiples of 64.
SHAPES = [(6144, 4096), (4096, 14336), (4096, 2048), (1024, 3072), (2304, 768), (768, 3072), (1000, 200), (72, 136)]


@pytest.fixture(scope="module", autouse=True)
def whole_products():
    """In this process: ``load_engine`` does so before the first product of a run."""
    keep_products_whole()


@pytest.fixture(scope="module")
def requests():
    """100 of 1 to 200 tokens, over ends of tiles and blocks."""
    return rows_of([1, 2, 31, 63, 64, 65, 100, 127, 150, 199, 200], 199)


def rows_of(lengths, vocab, most=40):
    """100 rows with up to ``most`` tokens to come, some with a common beginning."""
    numbers, made = random.Random(0), []
    shared = [numbers.randrange(vocab) for _ in range(max(lengths))]
    for index in range(100):
        length = lengths[index % len(lengths)]
        prompt = shared[: min(numbers.choice([0, 64, length]), length - 1)]
        prompt = prompt + [numbers.randrange(vocab) for _ in range(length - len(prompt))]
        limits = {"max_tokens": most - index % 9, "seed": numbers.randrange(2**64), "ignore_eos": True}
        made.append(Request(index, tuple(prompt), SamplingParams(logprobs=3, **limits, **KINDS[index % len(KINDS)])))
    return made


def numbers(*shape, dtype, scale=1.0):
    """The same normal numbers for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to("cuda", dtype)


def run(engine, requests):
    """Request id and sample -> tokens and log-probabilities."""
    done = list(engine.run(requests))
    return {(c.request.id, c.sample): (c.token_ids, [list(each) for each in c.logprobs]) for c in done}


def differing(found, expected):
    return sorted(key for key in found if found[key] != expected[key])


def rows_in_any_company(make, requests, few=50, left_out=()):
    """Serve the rows in each way, and each row alone; returns what differs by the way, and the engines.

    Args:
        make: makes an engine with these switches and limits.
        requests: the rows.
        few: tokens of small steps.
        left_out: names of ways.
    """

    def engine(switches=None, **limits):
        options = {"max_num_seqs": 64, "max_num_batched_tokens": 8192, **limits}
        return make({"batch_invariant": True, **(switches or {})}, **options)

    alone, one = {}, engine({"prefix_cache": False}, max_num_seqs=2)
    for request in requests[::3]:
        alone |= run(one, [request])
    together = run(engine(), requests)
    wrong = {"alone": differing(alone, together)}
    ways = {
        "reversed": (engine(), requests[::-1]),
        "2 slots": (engine(max_num_seqs=2), requests[:30]),
        "small chunks": (engine(max_num_batched_tokens=few), requests),
        "chunks of 777": (engine(max_num_batched_tokens=777), requests),
        "no prefix cache": (engine({"prefix_cache": False}), requests),
        "no graphs": (engine({"cuda_graph": False}), requests[:30]),
        "undivided keys": (engine({"split_keys": False}), requests),
        "preempting": (engine(blocks=30), requests),
        "saving": (engine({"swap": True}, blocks=30), requests),
    }
    for name, (made, rows) in ways.items():
        if name not in left_out:
            wrong[name] = differing(run(made, rows), together)
    return {name: rows[:5] for name, rows in wrong.items() if rows}, {name: made for name, (made, _) in ways.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, "HP1", "HP1 options"])
def test_rows_in_any_company(family, dtype, requests, make_engine, model_config):
    """Each way of serving the rows against each row alone. What differs names the way, and the first rows."""

    def make(switches, max_num_seqs, **limits):
        return make_engine(family, dtype, switches, seqs=max_num_seqs, **limits)

    config, left_out = model_config(family), ("undivided keys",) if family.startswith("HP1") else ()
    wrong, engines = rows_in_any_company(make, requests, few=70 if family in OF_TILES else 50, left_out=left_out)
    assert wrong == {}
    # Where all layers have a window, sequences stop growing; the host takes none with a window, or with states.
    assert engines["preempting"].stats.preemptions > 0 or all(config.kv_windows)
    assert engines["saving"].stats.restored_blocks > 0 or any(config.kv_windows) or config.num_state_layers


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["GPT2", "Llama", "Qwen3"])
def test_a_cache_in_fp8(family, dtype, requests, make_engine):
    """K and V in 8 bits, with a scale for each token."""

    def make(switches, max_num_seqs, **limits):
        return make_engine(family, dtype, switches, seqs=max_num_seqs, kv_cache_dtype="fp8", **limits)

    assert rows_in_any_company(make, requests)[0] == {}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", ["fp8", "fp8-block", "int4", "mxfp4 experts", "fp8 experts"])
def test_quantized_weights(form, dtype, requests, transformers, tmp_path):
    """Few rows and many, by one kernel, and experts that stay in their format."""
    form, _, experts = form.partition(" ")
    sizes = {"vocab_size": 200, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64, "initializer_range": 0.1}
    of_experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
    kind = transformers.Qwen3MoeConfig if experts else transformers.LlamaConfig
    random_model(kind(**sizes, **(of_experts if experts else {})), plain=True).save_pretrained(tmp_path / "plain")
    quantize(tmp_path / "plain", form, tmp_path / form)

    def make(switches, **limits):
        return engine_of(tmp_path / form, dtype, "cuda", switches=switches, **limits)

    assert rows_in_any_company(make, requests)[0] == {}


LONG = [1, 64, 200, 255, 256, 257, 300, 511, 700, 900]


def served(model, dtype, rows, memory=4 << 30, tokens=16384, slots=64):
    """What a model of these shapes makes of rows, and how many it preempted."""
    config = RunConfig.of(
        str(configs_dir() / "models" / f"{model}.toml"),
        load_format="dummy",
        device="cuda",
        dtype=dtype,
        max_num_seqs=slots,
        max_num_batched_tokens=tokens,
        kv_cache_memory=memory,
        batch_invariant=True,
    )
    engine = launch(config).engine
    return run(engine, rows), engine.stats.preemptions


@pytest.mark.parametrize(
    ("model", "dtype"), [("gpt2", "float16"), ("qwen3-0.6b", "bfloat16"), ("llama-3.1-8b", "bfloat16")]
)
def test_models_of_real_sizes(model, dtype):
    """Where cuBLAS splits, pieces of keys are folded, and prompts run Hopper's kernel. Near ties are many."""
    rows, planes = rows_of(LONG, 50_000, most=100), load_toml(configs_dir() / "models" / f"{model}.toml", ModelConfig)
    row_bytes = bytes_per_block(planes.kv_planes, 1024, torch.bfloat16)
    together, _ = served(model, dtype, rows)
    ways = {
        "2 slots": served(model, dtype, rows[:20], slots=2),
        "reversed": served(model, dtype, rows[::-1]),
        "chunks of 500": served(model, dtype, rows, tokens=500),
        "preempting": served(model, dtype, rows, memory=6 * row_bytes),
    }
    wrong = {name: differing(found, together)[:5] for name, (found, _) in ways.items()}
    assert not any(wrong.values()), wrong
    assert ways["preempting"][1] > 0


def test_without_the_switch_some_row_differs(requests, make_engine):
    """Or the test above would see nothing."""
    outs = [run(make_engine("Llama", torch.bfloat16, seqs=seqs), requests) for seqs in (2, 64)]
    assert differing(*outs)


def splits_of_the_batch(patch):
    patch.setattr(
        attention_sizes.Sizes, "invariant", lambda own: replace(own, prefill=replace(own.prefill, fuses=False))
    )


def chunks_that_end_anywhere(patch):
    patch.setattr(StepPlanner, "_cut", lambda self, sequence, start, length: length)


@pytest.mark.parametrize("take_out", [splits_of_the_batch, chunks_that_end_anywhere])
def test_without_a_cure_a_long_row_differs(take_out, monkeypatch):
    """Or tests with long rows would see nothing of it. The table of causes: benchmarks/batch_invariance.md."""
    take_out(monkeypatch)
    rows = rows_of(LONG, 50_000, most=100)
    together, *others = (
        served("qwen3-0.6b", "bfloat16", rows, **limits)[0] for limits in ({}, {"slots": 2}, {"tokens": 500})
    )
    assert any(differing(found, together) for found in others)


def tiles_that_fuse(patch):
    patch.setattr(attention_sizes.Sizes, "invariant", lambda own: replace(own, decode=replace(own.decode, pieces=16)))


def products_as_they_are_fastest(patch):
    patch.setattr(linear_sizes.Sizes, "invariant", lambda own: own)


def gelu_where_it_is_fastest(patch):
    begin = StreamedLinear.__init__

    def init(self, *args, invariant=False):
        begin(self, *args, invariant=invariant)
        self._invariant = False

    patch.setattr(StreamedLinear, "__init__", init)


def experts_in_two_dtypes(patch):
    patch.setattr(expert_sizes.Sizes, "invariant", lambda own: own)


@pytest.mark.parametrize(
    ("take_out", "family", "dtype"),
    [
        (library_products, "GPT2", torch.float32),
        (products_as_they_are_fastest, "Llama", torch.bfloat16),
        (gelu_where_it_is_fastest, "GPT2", torch.bfloat16),
        (experts_in_two_dtypes, "qwen3_moe", torch.bfloat16),
        (tiles_that_fuse, "GPT2", torch.float32),
        (no_replay, "Llama", torch.bfloat16),
    ],
)
def test_without_a_cure_some_row_differs(take_out, family, dtype, requests, make_engine, monkeypatch):
    """Or tests of small models would see nothing of it."""
    take_out(monkeypatch)

    def outcome(rows=requests, **limits):
        limits = {"seqs": 64, "max_num_batched_tokens": 8192, **limits}
        return run(make_engine(family, dtype, {"batch_invariant": True}, **limits), rows)

    together = outcome()
    ways = [{"seqs": 2}, {"max_num_batched_tokens": 50}, {"max_num_batched_tokens": 777}, {"blocks": 30}]
    assert any(differing(outcome(**limits), together) for limits in ways)


def test_answers_that_serve_prompts(make_engine, monkeypatch):
    """K and V of generated tokens have other bits than those of a prompt: a row behind its twin's answer differed."""
    first = Request(0, (5, 6, 7), SamplingParams(max_tokens=100, ignore_eos=True))

    def repeated(behind):
        engine = make_engine("Llama", torch.bfloat16, {"batch_invariant": True}, seqs=8)
        (answer,) = engine.run([first])
        engine = engine if behind else make_engine("Llama", torch.bfloat16, {"batch_invariant": True}, seqs=8)
        sampling = SamplingParams(max_tokens=30, logprobs=3, ignore_eos=True)
        rows = [Request(n, (5, 6, 7, *answer.token_ids[:n]), sampling) for n in (50, 80, 100)]
        return [run(engine, [row]) for row in rows]

    assert repeated(True) == repeated(False)
    answers_as_prompts(monkeypatch)
    assert repeated(True) != repeated(False)


def test_cublas_with_memory_splits_some_depth():
    """In a process of its own: cuBLAS reads the settings at its first product."""
    code = """
import torch
from rosebatch_kernels.linear.invariant import differing_rows
from rosebatch_kernels.linear.torch_linear import TorchLinear
torch.backends.cuda.preferred_blas_library("cublaslt")
print(differing_rows(TorchLinear, torch.empty(4096, 14336, dtype=torch.bfloat16, device="cuda"), None))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUBLAS")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() != "None"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [50257, 151_937])
def test_masked_rows_are_copied_with_their_padding(vocab, dtype):
    """Beside a row with a grammar all rows are copied: from a copy without padding, threads read other numbers."""
    whole = numbers(2048, -(-vocab // 8) * 8, dtype=dtype)[:, :vocab]
    held = [each.cuda() for each in parameters([(1.0, 0, 1.0, 0.0), (0.9, 0, 0.9, 0.0)] * 1024)]
    device = device_of(torch.device("cuda"))
    sizes = sampling_kernel.SIZES.of(device)

    def sampled(logits):
        return sampling_kernel.sample_rows(logits, *held, sizes=sizes, device=device).tolist()

    expected = sampled(whole)
    assert sampled(_copy(whole)) == expected
    assert sampled(whole.contiguous()) != expected


def test_tokens_do_not_depend_on_another_rows_penalty():
    """It made all logits fp32: sums over segments ran in another order, from 128,000 ids on."""
    vocab, slots = 151_936, 1024
    logits = numbers(slots, vocab, dtype=torch.bfloat16)
    device = logits.device
    kernels = device_ops(Switches.resolve({"batch_invariant": True}, "cuda"))

    def sampled(invariant, features):
        state = DeviceState(slots, 1, 1, device, vocab)
        state.allocate(features)
        real = state.fields.view(torch.float32)
        real[layout.TEMPERATURE], real[layout.TOP_P], real[layout.REPETITION] = 0.9, 0.9, 1.0
        state.fields[layout.SEED_LOW] = torch.arange(slots, device=device)
        sampler = TokenSampler(state, None, kernels, (), batched=True, invariant=invariant)
        return sampler.next_tokens(logits, features, None, decodes=True).tolist()

    alone = sampled(True, Features())
    assert sampled(True, Features(adjusts=True)) == alone
    # Else the test would see nothing.
    assert sampled(False, Features(adjusts=True)) != alone


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_whole(shape, dtype):
    """On Hopper cuBLAS splits nothing without memory for parts. Where this fails, runs take the slower fallback."""
    device, weight = device_of(torch.device("cuda")), torch.empty(shape, dtype=dtype, device="cuda")
    bias = torch.empty(shape[0], dtype=dtype, device="cuda")
    for own in (None, bias):
        assert differing_rows(lambda w, b: StreamedLinear(w, b, device, invariant=True), weight, own) is None
        assert differing_rows(TorchLinear, weight, own) is None
    assert differing_rows(lambda w, b: StreamedHead(w, device), weight, None) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_fallback_is_whole(shape, dtype):
    device, weight = device_of(torch.device("cuda")), torch.empty(shape, dtype=dtype, device="cuda")
    assert differing_rows(lambda w, b: FixedLinear(w, b, device), weight, None) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_gate_in_the_product_and_behind_it(dtype):
    """Few rows and very many have their gate in the product's kernel, others behind it: elementwise alike."""
    device = device_of(torch.device("cuda"))
    x, weight = numbers(2048, 1024, dtype=dtype), numbers(6144, 1024, dtype=dtype, scale=1 / 32)
    layer = StreamedLinear(weight, None, device, invariant=True)
    behind = mlp_kernel.silu_mul(layer(x), sizes=mlp_kernel.SIZES.of(device), device=device)
    assert layer.gates(x, "silu_mul")
    assert torch.equal(layer.activated(x, "silu_mul"), behind)
    assert torch.equal(layer.activated(x[:64], "silu_mul"), behind[:64])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_residuals_in_our_kernel_and_in_cublas(dtype):
    """Ours adds the product of few rows to the residual, cuBLAS that of many; both round the product before."""
    device = device_of(torch.device("cuda"))
    x, weight = numbers(64, 3072, dtype=dtype), numbers(1024, 3072, dtype=dtype, scale=1 / 50)
    onto = numbers(64, 1024, dtype=dtype)
    ours = kernel.add_(x, weight, onto.clone(), sizes=linear_sizes.SIZES.of(device), device=device)
    assert torch.equal(ours, onto.clone().addmm_(x, weight.t()))


def test_a_run_on_hopper_needs_no_fallback(make_engine, monkeypatch):
    """Else it would be right, and slow: the prompts' products are those of a few rows then."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs may need it")
    made = []
    monkeypatch.setattr(FixedLinear, "__init__", lambda self, *_: made.append(self))
    make_engine("Llama", torch.bfloat16, {"batch_invariant": True}, seqs=8)
    assert made == []
