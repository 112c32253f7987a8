"""Every switch changes how the work is done, and none changes the result."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from rosebatch.config.switches import Switches
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch_kernels.linear.torch_packed import PackedLinear, can_pack
from tests.golden.conftest import NEW_TOKENS
from tests.helpers.running import run

NAMES = [field.name for field in dataclasses.fields(Switches) if "cpu" in field.metadata["devices"]]
COUNT, BUDGET = 24, 32
# Of several kinds, so that sampling has groups to form. The greedy ones are compared with transformers.
KINDS = [{}, {"temperature": 0.9}, {"temperature": 1.1, "top_k": 20}, {"temperature": 0.8, "top_p": 0.9}]


@dataclasses.dataclass
class Observed:
    """What a run did.

    Attributes:
        tokens: of each request.
        cached_tokens: prompt tokens from the prefix cache.
        step_tokens: computed in each step.
        sampled_rows: of each call of a sampling operator.
        product_rows: of each matrix product.
    """

    tokens: list[list[int]] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0
    step_tokens: list[int] = dataclasses.field(default_factory=list)
    sampled_rows: list[int] = dataclasses.field(default_factory=list)
    product_rows: list[int] = dataclasses.field(default_factory=list)


def reuses_prefixes(on, off):
    assert on.cached_tokens > 0 == off.cached_tokens
    assert sum(on.step_tokens) < sum(off.step_tokens)


def splits_prompts(on, off):
    assert max(on.step_tokens) == BUDGET < max(off.step_tokens)
    assert len(on.step_tokens) != len(off.step_tokens)


def samples_together(on, off):
    assert max(on.sampled_rows) > 1 == max(off.sampled_rows)
    assert len(on.sampled_rows) < len(off.sampled_rows)
    assert sum(on.sampled_rows) == sum(off.sampled_rows)


def computes_fewer_rows(on, off):
    assert len(on.product_rows) == len(off.product_rows)
    assert sum(on.product_rows) < sum(off.product_rows)


def pads_single_rows(on, off):
    """A product of a single row adds in another order than all others, so the invariant layout never computes one."""
    assert min(on.product_rows) == 2
    assert min(off.product_rows) == 1


# How the two sides show that they ran different code.
DIFFERENCES: dict[str, Callable[[Observed, Observed], None]] = {
    "prefix_cache": reuses_prefixes,
    "chunked_prefill": splits_prompts,
    "batched_sampling": samples_together,
    "trim_last_layer": computes_fewer_rows,
    "batch_invariant": pads_single_rows,
}


@pytest.fixture
def observe(monkeypatch, make_engine):
    """Run the same requests with a switch on or off, in a cache that is too small."""

    def observed(golden, **switch):
        seen = Observed()
        product = PackedLinear._product

        def counted_product(self, x, bias):
            seen.product_rows.append(len(x))
            return product(self, x, bias)

        def counted(operator):
            def call(logits, *args):
                seen.sampled_rows.append(len(logits))
                return operator(logits, *args)

            return call

        engine = make_engine(golden.folder, chunk=BUDGET, block_size=4, blocks=40, **switch)
        runner, ops = engine.runner, engine.runner.ops
        operators = {name: counted(getattr(ops, name)) for name in ("greedy", "sample", "sample_filtered")}
        runner.ops = dataclasses.replace(ops, **operators)
        launch = runner.launch

        def counted_launch(plan, masks):
            seen.step_tokens.append(plan.num_tokens)
            return launch(plan, masks)

        runner.launch = counted_launch
        with monkeypatch.context() as patch:
            patch.setattr(PackedLinear, "_product", counted_product)
            done = run(engine, requests_of(golden))
        assert engine.stats.preemptions > 0
        seen.tokens = [list(done[i].token_ids) for i in range(len(done))]
        seen.cached_tokens = sum(completion.cached_tokens for completion in done.values())
        return seen

    return observed


@pytest.fixture(scope="module")
def all_on():
    """Model -> what it did with every switch on, as all are by default."""
    return {}


def requests_of(golden):
    return [
        Request(
            i, tuple(prompt), SamplingParams(max_tokens=NEW_TOKENS, seed=i, ignore_eos=True, **KINDS[i % len(KINDS)])
        )
        for i, prompt in enumerate(golden.prompts[:COUNT])
    ]


def test_each_switch_has_a_difference():
    """A new switch must not be compared with itself."""
    assert list(DIFFERENCES) == NAMES


@pytest.mark.whole
@pytest.mark.parametrize("model", [pytest.param("gpt2", marks=pytest.mark.thorough), "qwen3"])
@pytest.mark.parametrize("name", NAMES)
def test_on_equals_off(name, model, goldens, observe, all_on):
    """Tokens in fp32 are equal, with chunks, copied blocks and preemptions on both sides, which ran different code."""
    golden = goldens(model)
    if model not in all_on:
        all_on[model] = observe(golden, **dict.fromkeys(NAMES, True))
    on, off = all_on[model], observe(golden, **{name: False})
    assert on.tokens == off.tokens
    assert on.tokens[:: len(KINDS)] == golden.expected[: COUNT : len(KINDS)]
    if name in ("batch_invariant", "trim_last_layer") and not can_pack(torch.empty(4, 4)):
        pytest.skip("this PyTorch has no packed products")
    DIFFERENCES[name](on, off)
