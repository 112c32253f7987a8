"""``--batch-invariant`` on a GPU reaches what decides the order of sums: each reader of the switch."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.engine import build as building
from rosebatch.engine import load
from rosebatch.engine.images import ImageEncoder
from rosebatch.engine.sampling.features import Features
from rosebatch.engine.triton_runner.state import DeviceState
from rosebatch.engine.triton_runner.token_sampler import TokenSampler
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.ops.device import keep_products_whole
from rosebatch.ops.ops import Experts
from rosebatch.ops.paged_attention import paged_attention_kernels
from rosebatch.ops.select import select
from rosebatch_kernels.feedback import layout
from tests.engine.family_models import FAMILIES
from tests.engine.small_models import build

CPU = torch.device("cpu")
SWITCHES = {on: Switches.resolve({"batch_invariant": on}, "cuda") for on in (True, False)}


def test_cublas_gets_no_memory_for_parts(monkeypatch):
    """Its defaults split products of few rows. Who has set a size keeps it."""
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    preferred = []
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred.append)
    keep_products_whole()
    assert os.environ["CUBLASLT_WORKSPACE_SIZE"] == "1"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert preferred == ["cublaslt"]


@pytest.mark.parametrize("on", [True, False])
def test_cublas_is_told_in_front_of_its_first_product(on, monkeypatch):
    """Later it reads no setting. Each rank loads its own engine."""
    told = []

    def stop(*_):
        raise InterruptedError

    monkeypatch.setattr(load, "keep_products_whole", lambda: told.append(True))
    monkeypatch.setattr(load, "select", stop)
    source = type("Source", (), {"quantization": type("Plain", (), {"input_group": None})})
    with pytest.raises(InterruptedError):
        load.load_engine(source, RunConfig(), SWITCHES[on], torch.device("cuda"))
    assert told == [True] * on


@pytest.mark.parametrize("on", [True, False])
def test_chunks_of_states_end_with_a_tile(on):
    """Their tiles have 64 tokens. Without the switch a step is filled."""
    switches = replace(Switches.resolve({}, "cpu"), batch_invariant=on, paged_attention=True)
    limits = RunConfig(device="cpu", max_num_seqs=4, block_size=24, kv_cache_memory=1 << 16)
    ops = select(Switches.resolve({}, "cpu"))
    model = building.LoadedModel(build("qwen3_5", ops), FAMILIES["qwen3_5"], ops, torch.float32, CPU)
    loaded = building.build_engine(model, limits, switches)
    assert loaded.engine.scheduler.planner.ends.unit == (192 if on else 1)


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("both_ways", ["", "all"])
def test_texts_beside_images_that_see_both_ways_have_one_kernel(on, both_ways, monkeypatch):
    """Hopper's kernel computed a text alone, and the other one a text beside an image."""
    seen = []

    def stop(model, cache, ops, kernels, switches, **_):
        seen.append(switches.hopper_prefill)
        raise InterruptedError

    memory = building.memory_of(CPU)
    monkeypatch.setattr(building, "memory_of", lambda device: memory)
    monkeypatch.setattr(building, "KVCache", lambda *_: None)
    monkeypatch.setattr(building, "device_ops", lambda switches: None)
    monkeypatch.setattr(building, "TritonRunner", stop)
    limits, ops = RunConfig(max_num_seqs=4, kv_cache_memory=1 << 20), select(Switches.resolve({}, "cpu"))
    images = ImageEncoder(lambda: None, (), CPU, both_ways=both_ways)
    cuda = torch.device("cuda")
    model = building.LoadedModel(build("gemma3", ops), FAMILIES["gemma3"], ops, torch.float32, cuda, images=images)
    with pytest.raises(InterruptedError):
        building.build_engine(model, limits, SWITCHES[on])
    assert seen == [not (on and both_ways)]


def test_attention_has_pieces_and_one_arithmetic():
    for on, switches in SWITCHES.items():
        kernels = paged_attention_kernels(4, {(4, 2, 16)}, {False}, switches, torch.bfloat16, CPU)
        sizes = kernels.prefill.keywords["sizes"]
        assert (sizes.decode.pieces > 0, sizes.prefill.fuses) == (on, not on)
        assert kernels.shares_keys and (kernels.pieces is not None) is on


def test_products_of_quantized_weights_have_one_order():
    """Each format's own has a form for it."""
    made = SimpleNamespace(in_one_order=lambda: "one order")
    weight = SimpleNamespace(shape=(8, 8), linear=lambda bias, device: made)
    weight.parts = lambda: [weight]
    for on, switches in SWITCHES.items():
        assert select(switches, "cuda").linear(weight, None) is ("one order" if on else made)
        assert select(switches, "cuda").head(weight) is ("one order" if on else made)


def test_parts_of_experts_have_one_dtype(monkeypatch):
    """In the operators, not in the table alone."""
    seen = []
    monkeypatch.setattr("rosebatch_kernels.experts.kernel.parts", lambda *_, sizes, **__: seen.append(sizes.max_exact))
    monkeypatch.setattr("rosebatch_kernels.experts.router.route", lambda *_, **__: (None, None))
    gate_up, down = DenseWeight.of(torch.zeros(2, 8, 8)), DenseWeight.of(torch.zeros(2, 8, 4))
    layer = Experts(gate_up=gate_up, down=down, k=1, normalize=True, activation="silu_mul")
    for switches in SWITCHES.values():
        select(switches, "cuda").experts(layer)(torch.zeros(1, 8), torch.zeros(1, 2), None)
    assert seen == [0, 256]


@pytest.mark.parametrize("invariant", [True, False])
def test_a_row_without_penalties_is_sampled_as_it_is_alone(invariant):
    """Penalties of other rows make logits fp32, and fp32 is added up in another order than 16 bits."""

    def sample_rows(logits, **_):
        return torch.full((len(logits),), 32 if logits.dtype == torch.float32 else 16, dtype=torch.int32)

    kernels = SimpleNamespace(
        sample_rows=sample_rows,
        adjust=lambda logits, *_, **__: logits.float(),
        mask_=lambda logits, *_: masked.append(logits.dtype),
        count_=lambda *_: None,
        advance=lambda *_: None,
    )
    masked, state = [], DeviceState(3, 1, 1, CPU, 5)
    state.fields[layout.ADJUSTS, 1] = 1
    sampler = TokenSampler(state, None, kernels, (), batched=True, invariant=invariant)

    def tokens(dtype, features, masks=None):
        return sampler.next_tokens(torch.zeros(3, 5, dtype=dtype), features, None, masks, decodes=True).tolist()

    adjusted = Features(adjusts=True)
    assert tokens(torch.float16, Features()) == [16, 16, 16]
    assert tokens(torch.float16, adjusted) == ([16, 32, 16] if invariant else [32, 32, 32])
    assert tokens(torch.float32, adjusted) == [32, 32, 32]
    assert masked == []
    assert tokens(torch.float16, adjusted, (None, None)) == ([16, 32, 16] if invariant else [32, 32, 32])
    assert masked == [torch.float32, torch.float16][: 1 + invariant]
