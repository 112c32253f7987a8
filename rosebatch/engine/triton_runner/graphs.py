"""Steps as CUDA graphs: a kind of step is captured when it comes a second time."""

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

# Tells kinds of step apart: a size, and whatever else decides which kernels are launched.
KindT = TypeVar("KindT", bound=Hashable)


class Ran(NamedTuple):
    """What the last step returned; how many steps were replayed, and graphs captured."""

    out: Tensor
    replays: int = 0
    captures: int = 0


class StepGraphs(Generic[KindT]):
    """Runs steps of a given kind, from a graph once there is one.

    Args:
        body: launches a step of a kind and returns a tensor. It neither waits nor reads from the host: all it
            reads and changes lies in tensors that stay in place.
        enabled: False runs the body every time.

    Attributes:
        replaying: a profiler sets it to False for a while, to see every launch: the bodies of steps run, not graphs.
        replay: launches a graph; a profiler puts one that takes the time in its place.
    """

    def __init__(self, body: Callable[[KindT], Tensor], *, enabled: bool) -> None:
        self.body = body
        self.enabled = enabled
        self.replaying = True
        self.replay: Callable[[torch.cuda.CUDAGraph], None] = torch.cuda.CUDAGraph.replay
        self._seen: set[KindT] = set()
        self._graphs: dict[KindT, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def run(self, kind: KindT, steps: int = 1) -> Ran:
        """Run steps back to back.

        The first step of a kind runs the body: a capture must not compile or load anything.
        """
        eager = int(kind not in self._seen) if self.enabled and self.replaying else steps
        for _ in range(eager):
            out = self.body(kind)
        self._seen.add(kind)
        if steps == eager:
            return Ran(out)
        captured = kind not in self._graphs
        if captured:
            self._graphs[kind] = self._capture(kind)
        graph, out = self._graphs[kind]
        for _ in range(steps - eager):
            self.replay(graph)
        return Ran(out, steps - eager, int(captured))

    def release(self) -> None:
        """Free the graphs, none of which may be running."""
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()

    def _capture(self, kind: KindT) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Graphs share their memory, because no two run at a time.
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = self.body(kind)
        self._pool = graph.pool()
        return graph, out


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collector out: freeing another engine's graphs breaks a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
