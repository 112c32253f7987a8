"""What the engine counts for the report."""

from array import array

import pytest

from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.engine.plan import Chunk, DecodeRow, DecodeWindow, PackedStep, StepResult


def chunk(length):
    return Chunk(0, 0, array("I", [1] * length), 1, (), ())


@pytest.mark.parametrize(
    ("plan", "prefill", "decode", "steps"),
    [
        (PackedStep(chunks=(chunk(1), chunk(1))), 0.0, 6.0, 1),
        (PackedStep(chunks=(chunk(5), chunk(7))), 6.0, 0.0, 0),
        (PackedStep(chunks=(chunk(1), chunk(1), chunk(10))), 5.0, 1.0, 0),
        (DecodeWindow(rows=(DecodeRow(0, 3, 2), DecodeRow(1, 3, 4)), steps=4), 0.0, 6.0, 4),
    ],
    ids=["decode", "prefill", "both", "window"],
)
def test_the_time_of_a_step_with_prompts_and_decodes(plan, prefill, decode, steps):
    """A run of 160,000 tokens on a CPU, where nearly all steps have both, showed a tenth of a second of decode."""
    stats = EngineStats()
    stats.record(plan, StepResult([[1]], seconds=6.0), 10.0, blocks_used=1, live=1)
    assert (stats.prefill_seconds, stats.decode_seconds, stats.decode_steps) == (prefill, decode, steps)
