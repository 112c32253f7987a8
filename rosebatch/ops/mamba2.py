"""Mamba2: types of its arguments, and its kernels."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rosebatch_kernels.common.chunks import TILE_ROWS
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.sizes import sized
from rosebatch_kernels.mamba2 import reference
from rosebatch_kernels.mamba2.layout import MambaState, MambaWeights

__all__ = ["TILE_ROWS", "MambaKernels", "MambaState", "MambaWeights", "mamba_kernels", "reference"]


class MambaKernels(NamedTuple):
    """Convolution and state space of packed chunks, and of decode steps; each kernel documents shapes and dtypes."""

    prefill: Callable[..., Tensor]
    decode: Callable[..., Tensor]


def mamba_kernels() -> MambaKernels:
    """The kernels, which a run on a CPU need not load."""
    from rosebatch_kernels.mamba2 import decode, prefill

    device = device_of(torch.device("cuda"))
    return MambaKernels(sized(prefill, "prefill", device), sized(decode, "decode", device))
