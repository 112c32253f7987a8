"""The fp8 form of a tensor, which the kernel that makes the tensor may leave with it.

The form is a function of the 16-bit values alone: a product gets the same bits whether it was left or not. Where all
readers multiply in fp8, the tensor has no values, and only its form is computed.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

_NAME = "_rosebatch_fp8"


class Quantized(NamedTuple):
    """Rows in fp8; see ``reference.quantize``.

    Attributes:
        numbers: ``[T, in]`` e4m3.
        scales: ``[G, T]`` fp32.
        group: columns that share a scale; 0: all.
    """

    numbers: Tensor
    scales: Tensor
    group: int


def empty_form(x: Tensor, group: int, chunk: int = 0) -> Quantized:
    """Memory for the fp8 form of x ``[T, in]``, its columns filled up to a multiple of ``chunk``."""
    groups = -(-x.shape[1] // group) if group else 1
    width = -(-x.shape[1] // chunk) * chunk if chunk else x.shape[1]
    numbers = torch.empty(len(x), width, dtype=torch.float8_e4m3fn, device=x.device)
    return Quantized(numbers, torch.empty(groups, len(x), dtype=torch.float32, device=x.device), group)


def leave(x: Tensor, form: Quantized) -> Tensor:
    """Hand the fp8 form on with ``x``, which nobody changes from now on, and return ``x``."""
    # An attribute lives as long as this tensor object: views and copies have none.
    setattr(x, _NAME, form)
    return x


def left(x: Tensor, group: int) -> Quantized | None:
    """The form that was left with x; None if there is none with scales of this kind."""
    found: Any = getattr(x, _NAME, None)
    return found if found is not None and found.group == group else None
