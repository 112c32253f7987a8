"""Ranks as threads of one process: tests of divided models need no other processes."""

from collections.abc import Sequence
from queue import SimpleQueue
from threading import Barrier, Thread
from typing import Any

import torch
from torch import Tensor

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.engine.engine import Engine
from rosebatch.engine.load import load_engine
from rosebatch.launch.driver import DriverRunner
from rosebatch.launch.tp_worker import follow
from rosebatch.model.source import ModelSource
from rosebatch.ops.shard import Shard
from tests.helpers.waiting import PATIENCE_SECONDS

_CPU = torch.device("cpu")


class Meeting:
    """Where threads put what they bring, and find what all have brought."""

    def __init__(self, size: int) -> None:
        self.brought: list[Any] = [None] * size
        self._barrier = Barrier(size, timeout=PATIENCE_SECONDS)

    def prepare(self, size: int, dtype: torch.dtype) -> None:
        pass

    def all_reduce(self, rank: int, value: Any) -> list[Any]:
        self.brought[rank] = value
        self._barrier.wait()
        found = list(self.brought)
        self._barrier.wait()
        return found

    def end(self) -> None:
        self._barrier.abort()


class ThreadGroup:
    """See ``rosebatch.ops.tensor_parallel.Group``."""

    def __init__(self, shard: Shard, meeting: Meeting) -> None:
        self.shard = shard
        self._meeting = meeting

    def sum_(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous()
        parts = self._meeting.all_reduce(self.shard.rank, tensor.clone())
        return tensor.copy_(torch.stack(parts).sum(0))

    sum_in_order_ = sum_

    def gather(self, tensor: Tensor) -> Tensor:
        assert tensor.is_contiguous()
        return torch.stack(self._meeting.all_reduce(self.shard.rank, tensor))

    def prepare(self, rows: int, size: int, dtype: torch.dtype) -> None:
        pass

    def all_reduce(self, rows: int, size: int, dtype: torch.dtype) -> None:
        return None

    def all_min(self, numbers: Sequence[int]) -> list[int]:
        return [min(each) for each in zip(*self._meeting.all_reduce(self.shard.rank, numbers), strict=True)]


def make_tensor_parallel_engine(
    source: ModelSource, limits: RunConfig, switches: Switches, size: int, device: torch.device = _CPU
) -> Engine:
    """An engine whose model is held by so many threads; this one leads. No graph can be captured over threads."""
    meeting = Meeting(size)
    inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(size - 1)]

    def load(rank: int, drive: Any = None) -> Engine:
        return load_engine(source, limits, switches, device, ThreadGroup(Shard(rank, size), meeting), drive).engine

    def run(rank: int) -> None:
        try:
            engine = load(rank)
            follow(engine.runner, inboxes[rank - 1].get, engine.async_depth)
        finally:
            meeting.end()

    for rank in range(1, size):
        Thread(target=run, args=(rank,), daemon=True).start()

    def send(message: Any) -> None:
        for inbox in inboxes:
            inbox.put(message)

    def explain(error: Exception) -> Any:
        raise error

    return load(0, lambda own: DriverRunner(own, send, explain, lambda: None))
