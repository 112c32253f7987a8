"""Small arrays between host and device, on the stream and without waiting: pinned memory, reused in turn."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rosebatch_kernels.common import host_waits

_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "float64": torch.float64}


class Staging:
    """Copies arrays to the device and int32 tensors back, in stream order.

    Args:
        device: on a CPU, copies are immediate.
        size: int32 numbers that most transfers have at most. Larger ones take new memory, which takes time.
        depth: transfers under way before the oldest is waited for.

    Raises:
        AssertionError: a transfer would take the buffer of a fetch whose values were not read.
    """

    def __init__(self, device: torch.device, size: int = 0, depth: int = 8) -> None:
        self.device = device
        self._on_gpu = device.type != "cpu"
        # Even, so that each begins where numbers of 8 bytes may.
        size += size % 2
        self._pinned = list(torch.empty(depth, size, dtype=torch.int32, pin_memory=self._on_gpu and size > 0))
        self._cells = [pinned.numpy() for pinned in self._pinned]
        self._events = [torch.cuda.Event() for _ in range(depth)] if self._on_gpu else []
        self._unread = [False] * depth
        self._turn = 0

    def send(self, *arrays: np.ndarray) -> list[Tensor]:
        """One-dimensional arrays as tensors of their dtypes on the device, moved in one copy.

        Args:
            arrays: their numbers have 4 or 8 bytes.
        """
        if not self._on_gpu:
            return [torch.from_numpy(np.array(array, order="C")) for array in arrays]
        places, total = lay_out(arrays)
        turn = self._next()
        self._make_room(turn, total)
        for array, place in zip(arrays, places, strict=True):
            self._cells[turn][place].view(array.dtype)[:] = array
        there = self._pinned[turn][:total].to(self.device, non_blocking=True)
        self._events[turn].record()
        return [there[place].view(_DTYPES[array.dtype.name]) for array, place in zip(arrays, places, strict=True)]

    def fetch(self, tensor: Tensor) -> Callable[[], np.ndarray]:
        """Begin to copy an int32 tensor to the host.

        Returns:
            a function that waits for the copy and returns its values; later transfers may overwrite them.
        """
        turn = self._next()
        self._unread[turn] = True
        if self._on_gpu:
            self._make_room(turn, tensor.numel())
            view: Tensor = self._pinned[turn][: tensor.numel()].view(tensor.shape)
            view.copy_(tensor, non_blocking=True)
            self._events[turn].record()
        else:
            view = tensor.clone()

        def wait() -> np.ndarray:
            if self._on_gpu:
                host_waits.wait_for(self._events[turn])
            else:
                host_waits.note()
            self._unread[turn] = False
            values: np.ndarray = view.numpy()
            return values

        return wait

    def _next(self) -> int:
        turn = self._turn
        assert not self._unread[turn], (
            f"{len(self._unread)} transfers ago, a fetch was begun whose values were not read"
        )
        self._turn = (turn + 1) % len(self._unread)
        return turn

    def _make_room(self, turn: int, size: int) -> None:
        """Wait for the transfer that has the buffer, and replace it if it is too small."""
        if not self._events[turn].query():
            host_waits.wait_for(self._events[turn])
        if len(self._cells[turn]) < size:
            self._pinned[turn] = torch.empty(max(1024, 2 * size), dtype=torch.int32, pin_memory=True)
            self._cells[turn] = self._pinned[turn].numpy()


def lay_out(arrays: Sequence[np.ndarray]) -> tuple[list[slice], int]:
    """Places of arrays in a buffer of int32, and its length. Numbers of 8 bytes begin at even places."""
    places, end = [], 0
    for array in arrays:
        start = end + (end % 2 if array.itemsize == 8 else 0)
        end = start + array.nbytes // 4
        places.append(slice(start, end))
    return places, end
