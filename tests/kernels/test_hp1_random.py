"""HP1 attention with everything drawn at random: lengths (to 8192 on a GPU), pages, gates, heads, splits."""

import math
import random

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from tests.kernels.decode_step import SCALE, check
from tests.kernels.hp1_exact import gated_attention, general_gate, make_gate
from tests.kernels.test_hp1_decode import make_gated_step
from tests.kernels.test_paged_prefill import cut, make

decode, prefill = Launchers("hp1.decode"), Launchers("hp1.prefill")

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

# Keys of a sequence, and sequences of a decode step: the interpreter takes its time.
LIMIT = {"cuda": 8192, "cpu": 256}
BATCHES = {"cuda": [1, 3, 20], "cpu": [1, 2, 3]}
# Rows of a chunk that are compared: float64 on the CPU takes its time.
ROWS = 12


def shape(numbers):
    """K/V heads, heads that share one, head size, page size."""
    return (
        numbers.choice([1, 2, 4]),
        numbers.choice([1, 2, 3, 8]),
        numbers.choice([64, 80, 128]),
        numbers.choice([16, 24, 64, 128]),
    )


def length(numbers, device):
    """Every order of magnitude is as likely."""
    limit = LIMIT[device]
    return min(int(2 ** numbers.uniform(0, math.log2(limit) + 0.01)), limit)


def gate_of(numbers, heads, randn, device):
    low = numbers.choice([0.0, 0.0, -0.5, 0.1])
    options = {"relu_pre": numbers.random() < 0.7, "clip_min": low, "clip_max": low + numbers.choice([0.25, 1.0, 3.0])}
    options["taps"] = numbers.choice([1, 2, 3, 3, 3, 4, 5, 8])
    return numbers.choice([make_gate, general_gate])(heads, randn, device, **options)


@pytest.fixture
def assert_sums_close(assert_close):
    """As ``assert_close``, whose table is for results of size 1: long sums are divided by their size.

    HP1 itself divides its sums by nothing, so they, and the rounding of what is added up, grow with the keys. Each row
    is compared in a unit of its own, a power of two, which costs no precision.
    """

    def check(actual, exact):
        size = exact.square().mean(-1, keepdim=True).sqrt()
        unit = torch.exp2(size.log2().ceil().clamp_min(0))
        assert_close((actual.double().cpu() / unit).to(actual.dtype), exact / unit)

    return check


@pytest.mark.parametrize("seed", range(16))
def test_decode(seed, dtype, device, randn, assert_sums_close):
    numbers = random.Random(seed)
    kv_heads, group, *_ = sizes = shape(numbers)
    gate = gate_of(numbers, kv_heads * group, randn, device)
    positions = [length(numbers, device) - 1 for _ in range(numbers.choice(BATCHES[device]))]
    options = {"rotary": numbers.random() < 0.5, "qk_norm": numbers.choice([None, "uclip", "uclip_each"])}
    options["append"] = numbers.random() < 0.7
    step = make_gated_step(positions, *sizes, dtype, device, randn, gate=gate, **options)
    step.options["sparse"] = numbers.random() < 0.7
    check(decode.decode, step, assert_sums_close)


@pytest.mark.parametrize("seed", range(16))
def test_prefill(seed, dtype, device, randn, assert_sums_close):
    numbers = random.Random(seed)
    kv_heads, group, size, block_size = shape(numbers)
    gate = gate_of(numbers, kv_heads * group, randn, device)
    chunks = []
    for _ in range(numbers.choice([1, 4])):
        count = min(length(numbers, device), 600)
        chunks.append((min(length(numbers, device) - 1, LIMIT[device] - count), count))
    q, paged = make(chunks, kv_heads, group, size, block_size, dtype, device, randn)
    tiles = cut(chunks, seed=seed).to(device)
    out = prefill.prefill(
        q.flatten(1).to(device), paged.cache, paged.table, tiles, gate, num_heads=kv_heads * group, scale=SCALE
    )
    assert out.isfinite().all()
    first = 0
    for sequence, (prefix, count) in enumerate(chunks):
        for row in {0, count - 1, *(numbers.randrange(count) for _ in range(ROWS))}:
            seen = prefix + row + 1
            exact = gated_attention(q[first + row], paged.k[sequence][:seen], paged.v[sequence][:seen], SCALE, gate)
            assert_sums_close(out[first + row], exact)
        first += count
