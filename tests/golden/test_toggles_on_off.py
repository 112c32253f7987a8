"""Every switch changes how the work is done, and none changes the result."""

import dataclasses

import pytest

from rosebatch.toggles import Toggles

NAMES = [field.name for field in dataclasses.fields(Toggles) if "cpu" in field.metadata["devices"]]


@pytest.mark.parametrize("model", ["gpt2", "qwen3"])
@pytest.mark.parametrize("name", NAMES)
def test_on_equals_off(name, model, goldens, make_engine, greedy_tokens):
    """Greedy tokens in fp32 are equal, with chunks, copied blocks and preemptions on both sides."""
    golden = goldens(model)
    for value in (True, False):
        engine = make_engine(golden.folder, chunk=32, block_size=4, blocks=40, **{name: value})
        assert greedy_tokens(engine, golden.prompts[:40]) == golden.expected[:40]
        assert engine.stats.preemptions > 0
        # The switch has reached the code that reads it.
        assert getattr(engine.scheduler, name, value) is value
