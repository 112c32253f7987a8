"""Memory of each GPU that the kernels of all others read and write, see ``rosebatch_kernels.common.rank_sum``."""

from threading import Event
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import _symmetric_memory as symmetric

from rosebatch.ops import Exchange
from rosebatch.share import Share

# Two sums that follow each other need memory of their own.
_TURNS = 2
_SIGNAL_BYTES = 4
# How often this process has mapped memory of others.
_count = 0


def _rendezvous(memory: Tensor, group: Any) -> Any:
    global _count
    _count += 1
    return symmetric.rendezvous(memory, group)


def _catch_up(share: Share, device: torch.device) -> None:
    """Have all processes of the group count alike.

    PyTorch numbers what processes tell each other then, and each counts since it began (2.11 to 2.13). One that led
    another model before would wait for ever for what a new one tells it.
    """
    counts = torch.tensor([_count, -_count], device=device)
    distributed.all_reduce(counts, distributed.ReduceOp.MAX)
    most, least = counts.tolist()
    if most == -least:
        return
    alone = [distributed.new_group([rank], backend="gloo") for rank in range(share.size)][share.rank]
    for _ in range(_count, most):
        _rendezvous(symmetric.empty(16, dtype=torch.uint8, device=device), alone)
    distributed.destroy_process_group(alone)


class Exchanges:
    """What sums over ranks use in turn. All processes of the group make it together.

    Args:
        share: of this process.
        rows: most rows of a sum.
        size: of a row.
        dtype: of the parts.
        device: of this process.
    """

    def __init__(self, share: Share, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        # Parts and signals begin on 16 bytes: kernels are compiled for that.
        rows += -rows % 8
        part, count = rows * size * dtype.itemsize, rows * share.size
        signals = count * _SIGNAL_BYTES
        memory = symmetric.empty(_TURNS * (part + signals), dtype=torch.uint8, device=device)
        memory.zero_()
        _catch_up(share, device)
        assert distributed.group.WORLD is not None, "the group is there"
        handle = _rendezvous(memory, distributed.group.WORLD)
        # Nobody may signal before all signals are 0.
        distributed.barrier()
        torch.cuda.synchronize()
        self._rows, self._kind, self._memory, self._turn = rows, (size, dtype), memory, 0
        # Made now: while a kernel waits, these would wait for it.
        self._set, self._cleared = (torch.full((count,), n, dtype=torch.int32).pin_memory() for n in (1, 0))
        self._beside = torch.cuda.Stream(memory.device)
        self._turns = []
        for turn in range(_TURNS):
            start = turn * (part + signals)
            buffers = [
                handle.get_buffer(rank, (rows * size,), dtype, start // dtype.itemsize) for rank in range(share.size)
            ]
            flags = [
                handle.get_buffer(rank, (count,), torch.int32, (start + part) // _SIGNAL_BYTES)
                for rank in range(share.size)
            ]
            self._turns.append(Exchange(tuple(buffers), tuple(flags), share.rank))

    def fits(self, size: int, dtype: torch.dtype) -> bool:
        """Whether they are for such rows."""
        return self._kind == (size, dtype)

    def next(self, rows: int) -> Exchange | None:
        """For the next sum of so many rows; None if they are too many."""
        if rows > self._rows:
            return None
        self._turn = (self._turn + 1) % _TURNS
        return self._turns[self._turn]

    def let_go(self, ended: Event) -> None:
        """Have kernels that wait for a process that is gone go on, until ``ended``; their sums are worth nothing.

        Copies do that: kernels that wait may hold all multiprocessors.
        """
        with torch.cuda.stream(self._beside):
            while not ended.is_set():
                for exchange in self._turns:
                    for rank, signals in enumerate(exchange.signals):
                        signals.copy_(self._set if rank == exchange.rank else self._cleared, non_blocking=True)
                self._beside.synchronize()
