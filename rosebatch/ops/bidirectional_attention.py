"""The kernels of bidirectional attention."""

from collections.abc import Callable

import torch
from torch import Tensor

from rosebatch_kernels.bidirectional_attention import torch_attention
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.sizes import sized

__all__ = ["bidirectional_kernel", "torch_attention"]


def bidirectional_kernel(device: torch.device) -> Callable[..., Tensor]:
    """The kernel of the Triton runner, which documents shapes and dtypes."""
    from rosebatch_kernels.bidirectional_attention import kernel

    return sized(kernel, "attend", device_of(device))
