"""Small arrays between host and device, on the stream and without waiting: pinned memory, reused in turn."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rosebatch_kernels.common import host_waits

# Transfers under way before the oldest is waited for.
_DEPTH = 8
_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}


class Staging:
    """Copies arrays to the device and int32 tensors back, in stream order.

    Args:
        device: on a CPU, copies are immediate.

    Raises:
        AssertionError: a transfer would take the buffer of a fetch whose values nobody has read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned: list[Tensor] = [torch.empty(0, dtype=torch.int32) for _ in range(_DEPTH)]
        self._events: list[torch.cuda.Event | None] = [None] * _DEPTH
        self._unread = [False] * _DEPTH
        self._turn = 0

    def send(self, *arrays: np.ndarray) -> list[Tensor]:
        """One-dimensional arrays as tensors of their dtypes on the device, moved in one copy.

        Args:
            arrays: of numbers of 4 or 8 bytes.
        """
        if self.device.type == "cpu":
            return [torch.from_numpy(np.array(array, order="C")) for array in arrays]
        places, total = lay_out(arrays)
        turn = self._next()
        host = self._buffer(turn, total)[:total]
        cells = host.numpy()
        for array, place in zip(arrays, places, strict=True):
            cells[place].view(array.dtype)[:] = array
        there = torch.empty(total, dtype=torch.int32, device=self.device)
        there.copy_(host, non_blocking=True)
        self._mark(turn)
        return [there[place].view(_DTYPES[array.dtype.name]) for array, place in zip(arrays, places, strict=True)]

    def fetch(self, tensor: Tensor) -> Callable[[], np.ndarray]:
        """Begin to copy an int32 tensor to the host.

        Returns:
            a function that waits for the copy and returns its values; later transfers may overwrite them.
        """
        turn = self._next()
        self._unread[turn] = True
        if self.device.type == "cpu":
            event, view = None, tensor.clone()
        else:
            view = self._buffer(turn, tensor.numel())[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor, non_blocking=True)
            event = self._mark(turn)

        def wait() -> np.ndarray:
            if event is None:
                host_waits.note()
            else:
                host_waits.wait_for(event)
            self._unread[turn] = False
            return view.numpy()

        return wait

    def _next(self) -> int:
        turn = self._turn
        assert not self._unread[turn], f"{_DEPTH} transfers ago, a fetch was begun whose values nobody has read"
        self._turn = (turn + 1) % _DEPTH
        return turn

    def _buffer(self, turn: int, size: int) -> Tensor:
        event = self._events[turn]
        if event is not None and not event.query():
            host_waits.wait_for(event)
        if len(self._pinned[turn]) < size:
            self._pinned[turn] = torch.empty(max(1024, 2 * size), dtype=torch.int32, pin_memory=True)
        return self._pinned[turn]

    def _mark(self, turn: int) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        self._events[turn] = event
        return event


def lay_out(arrays: Sequence[np.ndarray]) -> tuple[list[slice], int]:
    """Places of arrays in a buffer of int32, and its length. Numbers of 8 bytes begin at even places."""
    places, end = [], 0
    for array in arrays:
        start = end + (end % 2 if array.itemsize == 8 else 0)
        end = start + array.nbytes // 4
        places.append(slice(start, end))
    return places, end
