"""Finds what the host reads from tensors, and what it builds tensors from, by watching every call of PyTorch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_READS = {"tolist", "item", "numpy", "nonzero", "__int__", "__float__", "__bool__", "__index__"}


class HostReads(TorchFunctionMode):
    """A context. On a GPU, each of these calls would make the host wait.

    Attributes:
        reads: names of calls that read a tensor, in order.
        uploads: names of calls that make a tensor of Python's numbers.
    """

    _paused = False

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.uploads: list[str] = []

    @classmethod
    @contextmanager
    def paused(cls) -> Iterator[None]:
        """While Triton's interpreter computes, which reads everything."""
        cls._paused = True
        try:
            yield
        finally:
            cls._paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if not self._paused:
            if name in _READS:
                self.reads.append(name)
            indexed = name in ("__getitem__", "__setitem__") and isinstance(args[1], list)
            if func in (torch.tensor, torch.as_tensor) or indexed:
                self.uploads.append(name)
        return func(*args, **(kwargs or {}))
