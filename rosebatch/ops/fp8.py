"""Products of weights that stay in fp8 on a GPU. Kernels are imported here, so that a CPU need not load Triton."""

import torch
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.fp8.reference import BLOCK as BLOCK
from rosebatch_kernels.linear.interface import Linear


def has_fp8_product(shape: tuple[int, ...], dtype: torch.dtype, device: Device) -> bool:
    """Whether ``fp8_linear`` serves a matrix ``[out, in]`` in a run of this dtype; none serves ``[E, out, in]``."""
    from rosebatch_kernels.fp8.fp8_linear import can_serve

    return len(shape) == 2 and can_serve(shape[0], shape[1], dtype, device)


def fp8_linear(numbers: Tensor, scales: Tensor, bias: Tensor | None, device: Device) -> Linear:
    """The product with a weight whose numbers are kept.

    Args:
        numbers: ``[out, in]`` e4m3, contiguous.
        scales: fp32, ``[out]``, or of blocks: ``[ceil(out / BLOCK), ceil(in / BLOCK)]``.
        bias: ``[out]`` in the dtype of the run, or None.
        device: a GPU that ``has_fp8_product``.
    """
    from rosebatch_kernels.fp8.fp8_linear import Fp8Linear

    return Fp8Linear(numbers, scales, bias, device)
