"""Which steps run from a graph. Captures and replays themselves need a GPU."""

import torch

from rosebatch.engine.triton_runner.graphs import Ran, StepGraphs


def test_a_profiler_sees_every_launch():
    """A replay hides its kernels' launches, so a profiler cannot say which product is which."""
    ran = []
    out = torch.zeros(1)

    def body(kind):
        ran.append(kind)
        return out

    graphs = StepGraphs(body, enabled=True)
    graphs.replaying = False
    for _ in range(2):
        assert graphs.run("decode", steps=3) == Ran(out)
    assert ran == ["decode"] * 6
