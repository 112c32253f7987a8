"""A run over time: nothing is lost where samples are merged, and no step leaves a hole."""

import random

import pytest

from rosebatch.engine.metrics.timeline import Timeline


def totals(line):
    values = line.as_dict()
    width = values["seconds_per_sample"]
    return tuple(sum(values[name]) * width for name in ("prompt_tokens_per_s", "output_tokens_per_s"))


@pytest.mark.parametrize("seed", range(10))
def test_tokens_add_up(seed):
    """Short steps and long ones, for a second or a day: all tokens are there, in a bounded number of samples."""
    rng = random.Random(seed)
    line, now, prompt, output = Timeline(), 0.0, 0, 0
    for _ in range(3000):
        now += rng.choice([0.0, 1e-4, 0.003, 0.05, 2.0 * seed])
        a, b = rng.randrange(100), rng.randrange(100)
        line.add(now, prompt_tokens=a, output_tokens=b, live=1, blocks=1)
        prompt, output = prompt + a, output + b
    assert totals(line) == pytest.approx((prompt, output))
    values = line.as_dict()
    lengths = {len(v) for name, v in values.items() if name != "seconds_per_sample"}
    assert len(lengths) == 1
    assert max(lengths) <= 240
    assert (
        (max(lengths) - 1) * values["seconds_per_sample"] <= now <= max(lengths) * values["seconds_per_sample"] * 1.001
    )


def test_a_step_longer_than_a_sample():
    """It was running all the while: zeros in between would look like pauses."""
    line = Timeline()
    line.add(0.02, prompt_tokens=0, output_tokens=2, live=3, blocks=4)
    line.add(0.10, prompt_tokens=8, output_tokens=4, live=5, blocks=6)
    values = line.as_dict()
    assert values["seconds_per_sample"] == 0.02
    assert values["live_sequences"][1:5] == [5, 5, 5, 5]
    assert values["blocks_used"][1:5] == [6, 6, 6, 6]
    assert values["output_tokens_per_s"][:5] == pytest.approx([100, 50, 50, 50, 50])
    assert values["prompt_tokens_per_s"][:5] == pytest.approx([0, 100, 100, 100, 100])


def test_nothing():
    """A run in which every row failed."""
    assert Timeline().as_dict()["live_sequences"] == []
