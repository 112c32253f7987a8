"""Finds what the host reads from tensors, by watching every call of PyTorch."""

from typing import Any

from torch.overrides import TorchFunctionMode

_READS = {"tolist", "item", "numpy", "nonzero", "__int__", "__float__", "__bool__", "__index__"}


class HostReads(TorchFunctionMode):
    """A context. Each of these calls waits for the device if the tensor is on a GPU.

    Attributes:
        names: of the calls, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in _READS:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))
