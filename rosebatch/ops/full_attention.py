"""The kernels of attention over whole prompts."""

from collections.abc import Callable

import torch
from torch import Tensor

from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.sizes import sized
from rosebatch_kernels.full_attention import torch_full as gathered

__all__ = ["full_kernel", "gathered"]


def full_kernel(device: torch.device) -> Callable[..., Tensor]:
    """The kernel of the Triton runner, which documents shapes and dtypes."""
    from rosebatch_kernels.full_attention import kernel

    return sized(kernel, "attend", device_of(device))
