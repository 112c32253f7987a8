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


def delta_kernels(*, by_channel: bool) -> DeltaKernels:
    """The kernels, which a run on a CPU need not load; ``by_channel`` see ``DeltaWeights``."""
    from rosebatch_kernels.gated_delta import channel_prefill, decode, prefill

    device = device_of(torch.device("cuda"))
    of_chunks = sized(channel_prefill if by_channel else prefill, "prefill", device)
    return DeltaKernels(of_chunks, sized(decode, "decode", device))
