"""Which form of decode attention's kernel a step has."""

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from rosebatch.config.switches import Switches
from rosebatch.engine.triton_runner.attention import DecodeAttention, RunMixers, triton_mixers
from rosebatch.engine.triton_runner.prefix_groups import MIN_ROWS
from rosebatch.engine.triton_runner.slots import batch_buckets
from rosebatch.engine.triton_runner.warm_up import warm_up_decodes, warm_up_tokens
from rosebatch.model.mixers.hp1.mixer import HP1Spec
from rosebatch.model.mixers.mixer import TritonSetup
from rosebatch.model.mixers.paged_attention.mixer import PagedAttentionSpec
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.feedback import layout

CPU, BF16 = torch.device("cpu"), torch.bfloat16
QWEN, GPT2, MQA, HP1 = (16, 8, 128), (12, 12, 64), (32, 1, 128), (8, 4, 128)


@pytest.fixture
def kernels(monkeypatch):
    """Makes what steps share for layers with these heads, on a GPU of a known size."""
    monkeypatch.setattr("rosebatch.ops.paged_attention.device_of", lambda device: Device.of_arch(90, 132))

    def shared(softmax, gated=()):
        kinds = [(PagedAttentionSpec, heads, {}) for heads in softmax] + [
            (HP1Spec, heads, {"gate": None}) for heads in gated
        ]
        specs = [
            kind(layer=layer, num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], scale=1.0, **more)
            for layer, (kind, heads, more) in enumerate(kinds)
        ]
        return RunMixers(None, None, None, triton_mixers(specs, TritonSetup(2, BF16, CPU, Switches())))

    return shared


@pytest.mark.parametrize("slots", [20, 256, 576, 2048])
@pytest.mark.parametrize(
    "heads", [({QWEN}, ()), ({GPT2}, ()), ({MQA}, ()), ({QWEN, GPT2}, ()), ((), {HP1}), ({QWEN}, {HP1})], ids=str
)
def test_all_forms_are_warmed_up(kernels, slots, heads):
    """A kernel was compiled in mid-run: with 576 slots for 160 to 256 long rows, and for 16 rows of HP1, 4 seconds."""
    form, sizes = kernels(*heads).decode_form, batch_buckets(slots)
    for minimum in (1, MIN_ROWS):
        warmed_up = {form(rows, divided=divided) for rows, divided in warm_up_decodes(sizes, form) if rows >= minimum}
        assert warmed_up == {form(rows, divided=divided) for rows in sizes for divided in (0, 1) if rows >= minimum}


def test_large_steps_are_warmed_up():
    """The first large prompt step waited for the kernels of experts with many tokens, and of attention on Hopper."""
    assert max(warm_up_tokens(16384)) == 16384
    for limit in (16, 100, 3000, 10**6):
        assert all(tokens <= limit + limit // 8 for tokens in warm_up_tokens(limit))


def test_a_gate_divides_nothing(kernels):
    """Each size had two graphs with the same kernels."""
    assert kernels((), {QWEN}).undivided_keys(8) == sys.maxsize
    assert kernels({QWEN}, {QWEN}).undivided_keys(8) < sys.maxsize


@pytest.mark.parametrize(("window", "divided"), [(0, False), (128, False), (4096, True)])
def test_windows_where_others_share_keys(window, divided):
    """The few keys after a shared prefix decided for layers that read a whole window: one program for a row."""
    seen = {}

    def decode(qkv, *_, **options):
        seen.update(options)
        return qkv

    setup = TritonSetup(2, BF16, CPU, Switches(fused_rotary=False))
    spec = PagedAttentionSpec(layer=0, num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0, window=window)
    mixers = triton_mixers([spec], setup)
    mixers[PagedAttentionSpec].decode_kernel = decode
    mixers[PagedAttentionSpec].kernels = SimpleNamespace(undivided_keys=lambda batch: 1000)
    state = SimpleNamespace(
        fields=torch.zeros(layout.NUM_FIELDS, 2, dtype=torch.int32), block_tables=torch.zeros(1, 2, 1)
    )
    cache = SimpleNamespace(layer=lambda layer: (torch.zeros(1, dtype=BF16),), group_of=[0])
    shared, keys = RunMixers(cache, state, None, mixers), object()
    DecodeAttention(shared, 2, state.fields, keys, divided=False)(spec, torch.zeros(2, 32))
    assert (seen["keys"], seen["divided"]) == (None if window else keys, divided)
    # Without shared keys the host has counted all of them.
    DecodeAttention(shared, 2, state.fields, divided=False)(spec, torch.zeros(2, 32))
    assert not seen["divided"]
