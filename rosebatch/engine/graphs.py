"""Decode steps as CUDA graphs: one for each batch size, captured when it is first needed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Body = Callable[[int], Tensor]


class DecodeGraphs:
    """Runs a step of a given batch size, from a graph once there is one.

    Args:
        body: launches the step for a batch size, without waiting and without reading anything from the host: what it
            reads and changes lies in tensors that stay where they are. Returns a tensor.
        enabled: False runs the body itself every time.
    """

    def __init__(self, body: Body, *, enabled: bool) -> None:
        self.body = body
        self.enabled = enabled
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def run(self, size: int, steps: int) -> tuple[Tensor, int]:
        """Run steps back to back: what the body of the last one returned, and how many were replayed.

        The first step of a size runs the body itself: it compiles and loads what a capture may not.
        """
        if not self.enabled or size not in self._graphs:
            out = self.body(size)
            if not self.enabled:
                for _ in range(steps - 1):
                    out = self.body(size)
                return out, 0
            steps -= 1
            self._graphs[size] = self._capture(size)
            if not steps:
                return out, 0
        graph, out = self._graphs[size]
        for _ in range(steps):
            graph.replay()
        return out, steps

    def _capture(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        # All graphs share their memory: no two run at a time.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = self.body(size)
        self._pool = graph.pool()
        return graph, out
