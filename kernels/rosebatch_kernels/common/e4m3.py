"""K and V as e4m3: a byte for each number, and an fp32 scale for each token and K/V head.

A value is number times scale, and the scale is the head's largest value / 448: nothing is cut off, and no calibration
is needed. The bytes and their scales are two caches of one layout, see ``rosebatch_kernels.kv_cache.layout``.
"""

import torch
from torch import Tensor

# The largest number of e4m3.
LARGEST = 448.0
# Heads of zeros, or nearly, have one that divides nothing by zero.
MIN_HEAD_SCALE = 2.0**-100


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of e4m3 and their scales.

    Args:
        x: ``[..., D]``, any float dtype.

    Returns:
        ``[..., D]`` uint8, and ``[..., 1]`` fp32.
    """
    x = x.float()
    scales = scales_of(x.abs().amax(-1, keepdim=True), MIN_HEAD_SCALE)
    return (x / scales).to(torch.float8_e4m3fn).view(torch.uint8), scales


def scales_of(amax: Tensor, minimum: float) -> Tensor:
    """The scales, fp32, with which the largest values ``amax`` become the largest number; ``minimum`` at least."""
    # On a GPU, PyTorch multiplies by the reciprocal of a Python number.
    return (amax / torch.full_like(amax, LARGEST)).clamp_min(minimum)


def dequantized(numbers: Tensor, scales: Tensor) -> Tensor:
    """The values ``[..., D]`` fp32 of bytes ``[..., D]`` and scales ``[..., 1]``."""
    return numbers.view(torch.float8_e4m3fn).float() * scales
