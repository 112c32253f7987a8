"""Kernels' launchers with what ``rosebatch.ops`` hands them at load: sizes, and the record of the GPU."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from rosebatch_kernels.common.device import device_of


class Launchers:
    """The functions of a kernel's module. A call adds ``sizes`` and ``device`` where the function takes them.

    Args:
        name: of the module in ``rosebatch_kernels``, such as ``norm.kernel``. The table is there, or in ``sizes.py``.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self._module = import_module(f"rosebatch_kernels.{name}")
        package = name.partition(".")[0]
        has_own = hasattr(self._module, "SIZES")
        self._table = f"rosebatch_kernels.{name if has_own else f'{package}.sizes'}"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A function of the module. The table is read at each call: tests change it."""
        function = getattr(self._module, name)
        taken = inspect.signature(function).parameters.keys() & {"sizes", "device"}

        def call(*args: Any, **options: Any) -> Any:
            device = device_of(torch.device("cuda"))
            given: dict[str, Any] = {"device": device} if "device" in taken else {}
            if "sizes" in taken:
                given["sizes"] = import_module(self._table).SIZES.of(device)
            return function(*args, **given | options)

        return call
