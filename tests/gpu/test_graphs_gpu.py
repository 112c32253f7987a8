"""Capturing graphs while other things happen in the process."""

import gc

import pytest
import torch

from rosebatch.engine.triton_runner.graphs import StepGraphs

pytestmark = pytest.mark.gpu


def test_garbage_is_not_collected_during_a_capture(device):
    """Python's collector freed another engine's graphs during a capture, which then failed."""
    values = torch.zeros(4, device=device)
    old = StepGraphs(lambda kind: values.add_(1), enabled=True)
    old.run(0, steps=2)
    held = [old]

    def body(kind):
        if torch.cuda.is_current_stream_capturing():
            garbage: list[object] = [held.pop()]
            garbage.append(garbage)
            del garbage
            assert len([[] for _ in range(1000)]) == 1000
        return values.add_(1)

    del old
    before = gc.get_threshold()
    gc.set_threshold(1, *before[1:])
    try:
        new = StepGraphs(body, enabled=True)
        new.run(0, steps=3)
    finally:
        gc.set_threshold(*before)
    assert not held and gc.isenabled()
    torch.cuda.synchronize()
    assert values.tolist() == [5.0] * 4
