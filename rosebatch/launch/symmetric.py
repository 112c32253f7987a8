"""Memory of each GPU that the kernels of all others read and write, see ``rosebatch_kernels.common.rank_sum``."""

from itertools import accumulate
from threading import Event
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import _symmetric_memory as symmetric

from rosebatch.ops.ops import AllReduce
from rosebatch.ops.shard import Shard

# Two sums in one shot that follow each other need memory of their own.
_TURNS = 2
# How often this process has mapped memory of others.
_count = 0


def _rendezvous(memory: Tensor, group: Any) -> Any:
    global _count
    _count += 1
    return symmetric.rendezvous(memory, group)


def _catch_up(shard: Shard, device: torch.device) -> None:
    """Have all processes of the group count alike.

    PyTorch numbers the messages between processes then, and each counts since it began (2.11 to 2.13). The driver
    of an earlier model would wait forever for a message of a new worker.
    """
    counts = torch.tensor([_count, -_count], device=device)
    distributed.all_reduce(counts, distributed.ReduceOp.MAX)
    limit, minimum = counts.tolist()
    if limit == -minimum:
        return
    alone = [distributed.new_group([rank], backend="gloo") for rank in range(shard.size)][shard.rank]
    for _ in range(_count, limit):
        _rendezvous(symmetric.empty(16, dtype=torch.uint8, device=device), alone)
    distributed.destroy_process_group(alone)


class AllReduceBuffers:
    """What sums over ranks use. All processes of the group make it together.

    Args:
        shard: of this process.
        few: rows of a sum in one shot at most.
        many: rows of a sum in two shots at most; 0 for none.
        size: of a row.
        dtype: of the parts.
        device: of this process.
    """

    def __init__(self, shard: Shard, few: int, many: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._few, self._many, self._kind, self._turn = few, many, (size, dtype), 0
        ranks = shard.size
        one_shot = [(few * size, dtype), (few * ranks, torch.int32)]
        two_shots = [(AllReduce.places(many, size, ranks), dtype), (many * ranks, torch.int32), (many * size, dtype)]
        pieces = [*one_shot * _TURNS, *(two_shots if many else [])]
        # Each begins on 16 bytes: kernels are compiled for that.
        lengths = (count * kind.itemsize for count, kind in pieces)
        *starts, end = accumulate((length + -length % 16 for length in lengths), initial=0)
        self._memory = symmetric.empty(end, dtype=torch.uint8, device=device)
        self._memory.zero_()
        _catch_up(shard, device)
        assert distributed.group.WORLD is not None, "the group is there"
        handle = _rendezvous(self._memory, distributed.group.WORLD)
        # Nobody may signal before all signals are 0.
        distributed.barrier()
        torch.cuda.synchronize()
        shared = [
            tuple(handle.get_buffer(rank, (count,), kind, start // kind.itemsize) for rank in range(ranks))
            for start, (count, kind) in zip(starts, pieces, strict=True)
        ]
        turns = zip(shared[: 2 * _TURNS : 2], shared[1 : 2 * _TURNS : 2], strict=True)
        self._turns = [AllReduce(parts, signals, shard.rank) for parts, signals in turns]
        self._two_shots = None
        if many:
            inboxes, signals, sums = shared[2 * _TURNS :]
            self._two_shots = AllReduce(inboxes, signals, shard.rank, sums)
        # Made now: while a kernel waits, these would wait for it.
        self._told = torch.ones(max(few, many) * ranks, dtype=torch.int32).pin_memory()
        self._beside = torch.cuda.Stream(device)

    def fits(self, size: int, dtype: torch.dtype) -> bool:
        """Whether they are for such rows."""
        return self._kind == (size, dtype)

    def next(self, rows: int) -> AllReduce | None:
        """For the next sum of so many rows; None if they are too many."""
        if rows <= self._few:
            self._turn = (self._turn + 1) % _TURNS
            return self._turns[self._turn]
        return self._two_shots if rows <= self._many else None

    def let_go(self, ended: Event) -> None:
        """Have kernels that wait for a process that is gone go on, until ``ended``; their sums are worth nothing.

        Copies do that: kernels that wait may hold all multiprocessors.
        """
        all_reduces = (*self._turns, self._two_shots)
        own = [all_reduce.signals[all_reduce.rank] for all_reduce in all_reduces if all_reduce is not None]
        with torch.cuda.stream(self._beside):
            while not ended.is_set():
                for signals in own:
                    signals.copy_(self._told[: len(signals)], non_blocking=True)
                self._beside.synchronize()
