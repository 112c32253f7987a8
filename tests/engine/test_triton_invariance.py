"""With ``--batch-invariant``, the Triton runner on its interpreter gives a row the same bits in any company.

Of products the fallback runs, whose tiles are fixed: the CPU's own go by the number of rows, and the trial sees it.
"""

import pytest
import torch

from rosebatch.config.switches import Switches
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.scheduling.prefix_cache import PrefixCache
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.ops.select import select
from rosebatch_kernels.linear.invariant import FixedLinear
from tests.engine.small_models import VOCAB, device_engine
from tests.helpers import running
from tests.helpers.interpreter import add_up_exactly
from tests.helpers.marks import ON_TRITON_RUNNER

pytestmark = [pytest.mark.matrix, *ON_TRITON_RUNNER]


@pytest.fixture(autouse=True)
def few_rows_in_the_trial(monkeypatch):
    monkeypatch.setattr("rosebatch_kernels.linear.invariant.ROWS", (1, 2, 7, 33, 64))


@pytest.fixture(autouse=True)
def few_likeliest(monkeypatch):
    """Rows ask for two: a row that asks for any is looked through for twenty, in most of the sampler's time."""
    monkeypatch.setattr("rosebatch.engine.sampling.features.MAX_LOGPROBS", 2)


@pytest.fixture(autouse=True)
def short_groups(monkeypatch):
    """HP1's are computed to their end for a sequence of two keys."""
    monkeypatch.setattr("rosebatch_kernels.hp1.decode.runs_and_keys", lambda *_, **sizes: (4, 2))


@pytest.fixture(autouse=True)
def dots_without_an_order(monkeypatch):
    add_up_exactly(monkeypatch)


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


# Whole prompts: chunks of these end at multiples of 64 tokens.
BUDGETS = {"qwen3_5": 16, "kimi_linear": 16, "bamba": 16, "hp1": 16}


def engine_of(name, off=(), **limits):
    return device_engine(name, off, on=("batch_invariant",), budget=BUDGETS.get(name, 10), **limits)


def alone(name, off=()):
    """The outcome of each row by itself, and the rows: the last repeats the answer of one before it."""
    rows, done = requests(), {}

    def serve(row):
        done.update(outcome(engine_of(name, off), [row]))

    for row in rows:
        serve(row)
    prompt = (*rows[3].prompt_token_ids, *done[3][0][:7], 5)
    rows.append(Request(4, prompt, SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True)))
    serve(rows[4])
    return done, rows


def in_company(name, rows, off=(), blocks=60, host_blocks=0):
    """The outcome of rows in another order, the repeated answer behind the first one; and their engine."""
    engine = engine_of(name, off, blocks=blocks, host_blocks=host_blocks)
    return outcome(engine, [*rows[3::-1], rows[4]]), engine


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("llama", ()),
        ("gpt2", ("streamed_linear", "fused_norm")),
        ("softmaxes", ("prefix_cache", "fused_kv_append")),
        ("e4m3", ()),
        ("qwen3_5", ()),
        ("kimi_linear", ()),
        ("bamba", ()),
        ("hp1", ()),
        ("deepseek_v3", ()),
        ("gemma4_e", ()),
    ],
)
def test_a_row_alone_in_company_and_preempted(name, off):
    """A row's log-probabilities tell the last bits: of chunks, shared prefixes, replayed tokens and splits of keys."""
    expected, rows = alone(name, off)
    for blocks in (60, 8):
        found, engine = in_company(name, rows, off, blocks)
        assert found == expected
        assert (engine.stats.preemptions > 0) == (blocks == 8)
        assert engine.runner.prefix_groups is None, "keys that rows share are added up otherwise"


@pytest.mark.thorough
def test_a_row_that_waits_on_the_host():
    """Its K and V come back, and decode steps go on: a packed step would give the last token's other bits."""
    expected, rows = alone("gpt2")
    found, engine = in_company("gpt2", rows, blocks=8, host_blocks=60)
    assert found == expected
    assert engine.stats.restored_blocks > 0


def library_products(patch):
    patch.setattr("rosebatch_kernels.linear.invariant.differing_rows", lambda *_: None)


def no_replay(patch):
    patch.setattr(Scheduler, "_rewind", lambda *_: None)


def answers_as_prompts(patch):
    begin = PrefixCache.__init__
    patch.setattr(PrefixCache, "__init__", lambda self, *args, **kind: begin(self, *args, **{**kind, "exact": False}))


@pytest.mark.thorough
@pytest.mark.parametrize("take_out", [library_products, no_replay, answers_as_prompts])
def test_without_a_cure_a_row_differs(take_out, monkeypatch):
    """Or the test above would see nothing of it. The table of causes: benchmarks/batch_invariance.md."""
    expected, rows = alone("gpt2")
    take_out(monkeypatch)
    assert any(in_company("gpt2", rows, blocks=blocks)[0] != expected for blocks in (60, 8))


def test_products_are_tried():
    """The CPU's product of fp32 goes by the number of rows: the model must have got the other."""
    ops = select(Switches.resolve({"batch_invariant": True}, "cuda"), "cuda")
    assert isinstance(ops.linear(DenseWeight.of(torch.ones(96, 128)), None), FixedLinear)
