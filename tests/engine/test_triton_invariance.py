"""With ``--batch-invariant``, the Triton runner on its interpreter gives a row the same bits in any company.

Of products the fallback runs, whose tiles are fixed: the CPU's own go by the number of rows, and the trial sees it.
"""

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from rosebatch.config.switches import Switches
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.ops.select import select
from rosebatch_kernels.linear.invariant import FixedLinear
from tests.engine.small_models import VOCAB, device_engine
from tests.helpers import running
from tests.helpers.marks import ON_TRITON_RUNNER

pytestmark = [pytest.mark.matrix, *ON_TRITON_RUNNER]


@pytest.fixture(autouse=True)
def few_rows_in_the_trial(monkeypatch):
    monkeypatch.setattr("rosebatch_kernels.linear.invariant.ROWS", (1, 2, 7, 33, 64))


@pytest.fixture(autouse=True)
def dots_without_an_order(monkeypatch):
    """The interpreter's product of two tiles goes by a row's place in them. What tiles add up to does not here."""

    def create_dot(self, a, b, acc, *_):
        product = (a.data.astype(np.float64) @ b.data.astype(np.float64)).astype(acc.data.dtype)
        return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def requests():
    trunk = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(12)]
    rows = [
        (trunk[:10], {"max_tokens": 9, "ignore_eos": True}),
        (trunk[:8], {"max_tokens": 8, "temperature": 0.9, "top_k": 6, "seed": 5, "ignore_eos": True}),
        ([*trunk[:9], 17, 3, 4], {"max_tokens": 7, "frequency_penalty": 0.7, "ignore_eos": True}),
        ([4], {"max_tokens": 9, "temperature": 0.8, "seed": 3, "ignore_eos": True}),
    ]
    return [
        Request(i, tuple(prompt), SamplingParams(logprobs=2, **sampling)) for i, (prompt, sampling) in enumerate(rows)
    ]


def outcome(engine, rows):
    done = running.run(engine, rows)
    return {i: (each.token_ids, [list(some) for some in each.logprobs]) for i, each in done.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2", "softmaxes"])
@pytest.mark.parametrize("off", [(), ("streamed_linear", "fused_norm"), ("prefix_cache", "fused_kv_append")])
def test_a_row_alone_in_company_and_preempted(name, off):
    """A row's log-probabilities tell the last bits: of chunks, shared prefixes, replayed tokens and splits of keys."""
    rows, alone = requests(), {}
    for row in rows:
        alone |= outcome(device_engine(name, off, on=("batch_invariant",)), [row])
    for blocks in (60, 8):
        engine = device_engine(name, off, blocks=blocks, on=("batch_invariant",))
        assert outcome(engine, rows[::-1]) == alone
        assert (engine.stats.preemptions > 0) == (blocks == 8)
        assert engine.runner.prefix_groups is None, "keys that rows share are added up otherwise"


def test_products_are_tried():
    """The CPU's product of fp32 goes by the number of rows: the model must have got the other."""
    ops = select(Switches.resolve({"batch_invariant": True}, "cuda"), "cuda")
    assert isinstance(ops.linear(DenseWeight.of(torch.ones(96, 128)), None), FixedLinear)
