"""The one place where the host waits for the device: every wait is counted.

A GPU works while the host plans, until the host reads a tensor's values or waits for an event. On a CPU nothing waits,
but the same reads are counted: they are the waits of the same code on a GPU. Every thread has a count of its own.
"""

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor


class _Count(threading.local):
    waits = 0


_COUNT = _Count()


def count() -> int:
    """Waits of this thread since it began."""
    return _COUNT.waits


def note() -> None:
    """Count a wait that happens elsewhere."""
    _COUNT.waits += 1


def wait_for(event: torch.cuda.Event) -> None:
    """Wait for what was recorded; a wait even if it is done already."""
    note()
    event.synchronize()


def to_list(tensor: Tensor) -> list[Any]:
    """The values as Python numbers, nested like the tensor."""
    note()
    values: list[Any] = tensor.tolist()
    return values


def to_int(tensor: Tensor) -> int:
    """The value of a tensor with one element."""
    note()
    return int(tensor)


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The values on the host."""
    note()
    return tensor.cpu().numpy()


def places_of(mask: Tensor) -> Tensor:
    """Where ``mask [S]`` is true, int64: the host waits for their number."""
    note()
    return mask.nonzero()[:, 0]
