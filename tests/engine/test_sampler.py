"""Rows of many kinds sampled in one step: each as if it were alone."""

import random

import pytest
import torch

from rosebatch.config.switches import Switches
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.sampling import sampler
from rosebatch.engine.staging import Staging
from rosebatch.ops.select import select
from rosebatch_kernels.sampling.philox import uniform

OPS = select(Switches())


def sample(*arguments, **options):
    return sampler.sample(*arguments, Staging(torch.device("cpu")), **options).tolist()


def mixed_params(count, seed=0):
    """Greedy, plain and filtered rows in no order, each with its own seed."""
    numbers = random.Random(seed)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.5},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.8, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 50, "top_p": 0.99, "min_p": 0.01},
    ]
    return [SamplingParams(seed=numbers.getrandbits(64), **numbers.choice(kinds)) for _ in range(count)]


def random_logits(rows, vocab, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("vocab", [1, 63, 1000, 5000])
def test_a_row_is_the_same_alone_in_a_group_and_in_another_order(vocab):
    params, positions = mixed_params(64), list(range(100, 164))
    logits = random_logits(64, vocab)
    together = sample(logits, params, positions, OPS)
    assert all(0 <= token < vocab for token in together)
    alone = [sample(logits[i : i + 1], params[i : i + 1], positions[i : i + 1], OPS)[0] for i in range(64)]
    assert alone == together
    order = random.Random(1).sample(range(64), 64)
    shuffled = sample(logits[order], [params[i] for i in order], [positions[i] for i in order], OPS)
    assert shuffled == [together[i] for i in order]


def test_each_row_gets_its_own_parameters():
    """Row by row against the operator called with that row's numbers alone."""
    params, positions = mixed_params(64, seed=2), list(range(64))
    logits = random_logits(64, 200, seed=3)
    expected = []
    for row, p, position in zip(logits.split(1), params, positions, strict=True):
        temperature, top_p, min_p = (torch.tensor([value]) for value in (p.temperature, p.top_p, p.min_p))
        number = torch.tensor([uniform(p.seed, position)], dtype=torch.float64)
        if p.temperature == 0:
            token = row.argmax(-1)
        elif p.top_k or p.top_p < 1 or p.min_p:
            token = OPS.sample_filtered(row, temperature, number, p.top_k, top_p, min_p)
        else:
            token = OPS.sample(row, temperature, number)
        expected.append(token.item())
    assert sample(logits, params, positions, OPS) == expected


def test_greedy_tie_takes_the_lowest_id():
    logits = torch.zeros(3, 50)
    logits[:, [7, 20, 49]] = 1.0
    tokens = sample(logits, [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams()], [1, 1, 1], OPS)
    assert (tokens[0], tokens[2]) == (7, 7)
    assert sample(logits, [SamplingParams()] * 3, [1, 1, 1], OPS) == [7, 7, 7]


def test_the_same_seed_and_position_draw_the_same_token():
    logits = random_logits(1, 1000).expand(3, -1) * 0.1
    tokens = sample(logits, [SamplingParams(temperature=1.0, seed=9)] * 3, [5, 5, 5], OPS)
    assert len(set(tokens)) == 1


def test_no_seed_is_seed_0():
    """On every path: the device's state has a number there as well."""
    logits = random_logits(1, 1000).expand(2, -1) * 0.1
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, seed=0)]
    first, second = sample(logits, params, [5, 5], OPS)
    assert first == second


def test_another_seed_or_position_draws_another_token():
    """Of 1000 tokens nearly equally likely: hardly ever the same, were either left out always."""
    logits = random_logits(1, 1000).expand(40, -1) * 0.01
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(40)]
    assert len(set(sample(logits, params, [5] * 40, OPS))) > 35
    assert len(set(sample(logits, params[:1] * 40, list(range(40)), OPS))) > 35


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_logits(dtype):
    """Probabilities are worked out in fp32: the same tokens as from the same logits in fp32."""
    params = mixed_params(64)
    logits = random_logits(64, 1000).to(dtype)
    assert sample(logits, params, [3] * 64, OPS) == sample(logits.float(), params, [3] * 64, OPS)


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-37, 1e-40, 1e-46])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 3}])
def test_a_temperature_near_zero_is_greedy(temperature, filters):
    """All allowed by SamplingParams. Logits divided by it overflow fp32, and it may itself be 0 in fp32."""
    logits = random_logits(8, 100)
    params = [SamplingParams(temperature=temperature, seed=i, **filters) for i in range(8)]
    assert sample(logits, params, [1] * 8, OPS) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("top_p", [1e-6, 1e-30, 1e-40, 1e-46])
def test_a_top_p_near_zero_is_greedy(top_p):
    """All allowed by SamplingParams. The likeliest token stays even where top_p is 0 in fp32."""
    logits = random_logits(8, 100)
    params = [SamplingParams(temperature=1.0, top_p=top_p, seed=i) for i in range(8)]
    assert sample(logits, params, [1] * 8, OPS) == logits.argmax(-1).tolist()


def test_extreme_parameters_at_the_other_end():
    logits = random_logits(2, 100)
    params = [SamplingParams(temperature=1e300), SamplingParams(temperature=1.0, top_k=2**70, min_p=1.0)]
    first, second = sample(logits, params, [1, 1], OPS)
    assert 0 <= first < 100 and second == int(logits[1].argmax())
