"""Ranges around the steps of the GPU's runner: its operators are kernels, or PyTorch's where a switch is off."""

from contextlib import contextmanager

import pytest

from rosebatch.bench.parts import PARTS, STEPS, ranges
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from tests.engine.small_models import device_engine
from tests.helpers.marks import ON_TRITON_RUNNER

pytestmark = ON_TRITON_RUNNER

ALWAYS = {"qkv projection", "attention", "out projection", "norms", "gate, up projection", "down projection", "logits"}
FUSED = ("fused_norm", "fused_mlp", "fused_rotary", "fused_kv_append", "fused_sampler", "fused_peri_norm")
ROUTED = {"router", "experts"}
OWN = {"qwen3_5": {"activations"}, **dict.fromkeys(("qwen3_moe", "qwen2_moe", "nemotron_h"), ROUTED)}


@pytest.mark.thorough
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "off"),
    [
        *((name, ()) for name in ("qwen3_5", "llama", "gemma2", "gpt_neox", "qwen3_moe", "qwen2_moe")),
        *((name, ()) for name in ("falcon_h1", "nemotron_h")),
        *((name, FUSED) for name in ("gpt2", "hp1")),
    ],
)
def test_parts_of_kernels_and_of_operators(name, off):
    """A fallback outside of every range would count with the rest; an operator's range must not change a token."""
    engine = device_engine(name, off=off)
    opened = []

    @contextmanager
    def mark(part):
        opened.append(part)
        yield

    requests = [Request(i, (1, 2, 3 + i), SamplingParams(max_tokens=4, ignore_eos=True)) for i in range(2)]
    with ranges(engine, mark):
        named = [completion.token_ids for completion in engine.run(requests)]
    more = {"KV and rotary", "sampling"} if off else OWN.get(name, set())
    # All layers of this model have experts.
    dense = ALWAYS - ({"gate, up projection", "down projection"} if name == "qwen2_moe" else set())
    assert {*opened} == {*STEPS, *dense} | more
    assert {*opened} <= {*STEPS, *PARTS}
    opened.clear()
    assert [completion.token_ids for completion in engine.run(requests)] == named
    assert opened == []
