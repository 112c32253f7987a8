"""Products of weights that stay 4-bit on a GPU. Kernels are imported here, so that a CPU need not load Triton."""

import numpy as np
import torch
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.int4.layout import GROUPS as GROUPS
from rosebatch_kernels.int4.layout import Int4Weight as Int4Weight
from rosebatch_kernels.int4.layout import narrowest as narrowest
from rosebatch_kernels.linear.interface import Linear

# Rows and columns are a multiple of these, so that rows of x and of the result begin where 16 bytes do.
_ALIGNMENT = 8


def has_int4_product(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether ``int4_linear`` serves a matrix ``[out, in]`` in a run of this dtype; none serves ``[E, out, in]``."""
    return len(shape) == 2 and not any(size % _ALIGNMENT for size in shape) and dtype.itemsize == 2


def int4_linear(weight: Int4Weight, order: np.ndarray | None, bias: Tensor | None, device: Device) -> Linear:
    """The product with a weight whose codes are kept.

    Args:
        weight: ``[out, in]``, which ``has_int4_product``.
        order: ``[in]``, the column of x of each column of the weight; None for their own order.
        bias: ``[out]`` in the dtype of the run, or None.
        device: a GPU.
    """
    from rosebatch_kernels.int4.int4_linear import Int4Linear
    from rosebatch_kernels.int4.sizes import SIZES

    places = None if order is None else torch.from_numpy(order).to(weight.words.device)
    return Int4Linear(weight, bias, places, sizes=SIZES.of(device), device=device)
