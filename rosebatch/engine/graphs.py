"""Steps as CUDA graphs: one for each size that comes a second time, captured then."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Body = Callable[[int], Tensor]


class Ran(NamedTuple):
    """What the body of the last step returned, and how many steps were replayed and graphs captured."""

    out: Tensor
    replays: int = 0
    captures: int = 0


class StepGraphs:
    """Runs steps of a given size, from a graph once there is one.

    Args:
        body: launches the step for a size, without waiting and without reading anything from the host: what it
            reads and changes lies in tensors that stay where they are. Returns a tensor.
        enabled: False runs the body itself every time.
    """

    def __init__(self, body: Body, *, enabled: bool) -> None:
        self.body = body
        self.enabled = enabled
        self._seen: set[int] = set()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def run(self, size: int, steps: int = 1) -> Ran:
        """Run steps back to back.

        The first step of a size runs the body itself: it compiles and loads what a capture may not.
        """
        eager = steps if not self.enabled else int(size not in self._seen)
        for _ in range(eager):
            out = self.body(size)
        self._seen.add(size)
        if steps == eager:
            return Ran(out)
        captured = size not in self._graphs
        if captured:
            self._graphs[size] = self._capture(size)
        graph, out = self._graphs[size]
        for _ in range(steps - eager):
            graph.replay()
        return Ran(out, steps - eager, int(captured))

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        # All graphs share their memory: no two run at a time.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = self.body(size)
        self._pool = graph.pool()
        return graph, out
