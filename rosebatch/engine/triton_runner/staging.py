"""Small arrays between host and device, on the stream and without waiting: pinned memory, reused in turn."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

# Transfers under way before the oldest is waited for.
_DEPTH = 8


class Staging:
    """Copies int32 arrays to the device and tensors back, in stream order.

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
        """The arrays as int32 tensors on the device, moved in one copy."""
        sizes = [len(array) for array in arrays]
        total = sum(sizes)
        if self.device.type == "cpu":
            return [torch.from_numpy(np.ascontiguousarray(array, np.int32).copy()) for array in arrays]
        turn = self._next()
        host = self._buffer(turn, total)
        np.concatenate(arrays, out=host.numpy()[:total], casting="same_kind")
        there = torch.empty(total, dtype=torch.int32, device=self.device)
        there.copy_(host[:total], non_blocking=True)
        self._mark(turn)
        return list(there.split(sizes))

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
            if event is not None:
                event.synchronize()
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
        if event is not None:
            event.synchronize()
        if len(self._pinned[turn]) < size:
            self._pinned[turn] = torch.empty(max(1024, 2 * size), dtype=torch.int32, pin_memory=True)
        return self._pinned[turn]

    def _mark(self, turn: int) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        self._events[turn] = event
        return event
