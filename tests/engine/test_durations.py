"""Percentiles from buckets, beside those of the values themselves."""

import random
import sys

import pytest

from rosebatch.engine.metrics.durations import Durations

RANKS = (1, 50, 90, 99, 100)


@pytest.mark.parametrize("seed", range(20))
def test_as_exact_as_it_says(seed):
    """For any size and number of values, the error is at most a quarter of a percent."""
    rng = random.Random(seed)
    values = [10 ** rng.uniform(-6, 4) for _ in range(rng.randint(1, 400))]
    ordered = sorted(values)
    expected = {f"p{rank}": ordered[-(-len(ordered) * rank // 100) - 1] for rank in RANKS}
    assert Durations(values).percentiles(RANKS) == pytest.approx(expected, rel=0.0026)


def test_the_mean_and_repeated_values():
    """A window of 256 sequences counts once, with the number of them; the mean is exact."""
    one, other = Durations(), Durations([0.25] * 3 + [1.5] * 2)
    one.add(0.25, 3)
    one.add(1.5, 2)
    assert one.summary() == other.summary()
    assert one.summary()["mean"] == 0.75
    assert Durations().summary() == {}


def test_none_one_and_zero():
    """No error where there is nothing to round."""
    assert Durations().percentiles(RANKS) == {}
    assert set(Durations([0.123456]).percentiles(RANKS).values()) == {0.123456}
    assert set(Durations([0.0, 0.0]).percentiles(RANKS).values()) == {0.0}


def test_memory_does_not_grow():
    """More durations of the same range take no more memory."""
    rng = random.Random(0)
    durations, sizes = Durations(), []
    for _ in range(2):
        for _ in range(20_000):
            durations.add(rng.uniform(0.01, 0.1))
        sizes.append(sys.getsizeof(durations._buckets))
    assert len(durations) == 40_000
    assert sizes[0] == sizes[1]
