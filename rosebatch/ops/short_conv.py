"""Short convolutions: their kernels."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.sizes import sized
from rosebatch_kernels.short_conv import reference

__all__ = ["ConvKernels", "conv_kernels", "reference"]


class ConvKernels(NamedTuple):
    """The convolution of packed chunks, and of decode steps; each kernel documents shapes and dtypes."""

    prefill: Callable[..., Tensor]
    decode: Callable[..., Tensor]


def conv_kernels() -> ConvKernels:
    """The kernels, which a run on a CPU need not load."""
    from rosebatch_kernels.short_conv import kernel

    device = device_of(torch.device("cuda"))
    return ConvKernels(sized(kernel, "prefill", device), sized(kernel, "decode", device))
