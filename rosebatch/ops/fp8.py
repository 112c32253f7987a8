"""Products of weights that stay in fp8 on a GPU."""

import torch
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.e4m3 import LARGEST as LARGEST
from rosebatch_kernels.common.e4m3 import scales_of as scales_of
from rosebatch_kernels.fp8.reference import BLOCK as BLOCK
from rosebatch_kernels.fp8.reference import MIN_SCALE as MIN_SCALE
from rosebatch_kernels.linear.interface import Linear

# Rows and columns that share a scale in the products, 0 for all.
BLOCKS = ((0, 0), (1, 0), (BLOCK, BLOCK))
# What sides of a matrix must be multiples of: PyTorch's products need it, and 16 bytes are the widest load.
_ALIGNMENT = 16


def has_fp8_product(shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> bool:
    """Whether ``fp8_linear`` serves a matrix ``[out, in]`` in a run of this dtype; none serves ``[E, out, in]``."""
    aligned = len(shape) == 2 and all(size % _ALIGNMENT == 0 for size in shape)
    return aligned and device.has_e4m3 and dtype.itemsize == 2


def fp8_linear(numbers: Tensor, scales: Tensor, bias: Tensor | None, device: Device) -> Linear:
    """The product with a weight whose numbers are kept.

    Args:
        numbers: ``[out, in]`` e4m3, contiguous.
        scales: fp32, ``[out]``, or of blocks: ``[ceil(out / BLOCK), ceil(in / BLOCK)]``.
        bias: ``[out]`` in the dtype of the run, or None.
        device: a GPU that ``has_fp8_product``.
    """
    # Here, so that a run on a CPU need not load Triton.
    from rosebatch_kernels.fp8.fp8_linear import Fp8Linear

    return Fp8Linear(numbers, scales, bias, device)
