"""The gated delta rule: types of its arguments, and its kernels."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rosebatch_kernels.common.chunks import TILE_ROWS
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.sizes import sized
from rosebatch_kernels.gated_delta import reference
from rosebatch_kernels.gated_delta.layout import DeltaState, DeltaWeights

__all__ = ["TILE_ROWS", "DeltaKernels", "DeltaState", "DeltaWeights", "delta_kernels", "reference"]


class DeltaKernels(NamedTuple):
    """Convolution and rule of packed chunks, and of decode steps; each kernel documents shapes and dtypes."""

    prefill: Callable[..., Tensor]
    decode: Callable[..., Tensor]


def delta_kernels() -> DeltaKernels:
    """The kernels, which a run on a CPU need not load."""
    from rosebatch_kernels.gated_delta import decode, prefill

    device = device_of(torch.device("cuda"))
    return DeltaKernels(sized(prefill, "prefill", device), sized(decode, "decode", device))
