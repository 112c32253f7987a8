"""The matrix product with a weight in fp8: our kernel for few rows, PyTorch's for many."""

from copy import copy

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch_kernels.common.device import HOPPER, Device
from rosebatch_kernels.fp8 import kernel, quantize, sizes
from rosebatch_kernels.fp8.carried import Quantized
from rosebatch_kernels.fp8.reference import BLOCK
from rosebatch_kernels.linear.interface import Linear, Scales

# PyTorch multiplies blocks on Hopper from this version of CUDA on.
_CUDA_OF_BLOCKS = (12, 9)
# Rows of x must then be a multiple of these: cuBLAS has no product for others (source: TransformerEngine's checks).
_ROWS_OF_BLOCKS = 8


class Fp8Linear(Linear):
    """``x [T, in] -> [T, out]`` in a 16-bit type, x quantized by rows, or by rows and 128 columns for scales of blocks.

    Args:
        weight: ``[out, in]`` e4m3, contiguous; both are multiples of 16.
        scales: fp32, ``[out]``, or of blocks of 128: ``[ceil(out / 128), ceil(in / 128)]``.
        bias: ``[out]`` in a 16-bit type, or None.
        device: a GPU that multiplies e4m3; decides the sizes of programs.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None, device: Device) -> None:
        self.weight = weight
        self.scales = scales
        self.bias = bias
        self._device = device
        self._one = torch.ones((), device=weight.device)
        self._sizes = sizes.SIZES.of(device)
        self._row_sizes = quantize.SIZES.of(device)
        self.input_group: int = BLOCK if scales.ndim == 2 else 0
        self._in_library = _multiplies_blocks(weight, device) if self.input_group else True

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._product(x, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._product(x, None)

    def in_one_order(self) -> Linear:
        """See ``Linear``."""
        found = copy(self)
        found._sizes = self._sizes.invariant()
        return found

    def divides(self, x: Tensor) -> bool:
        """See ``Linear``."""
        return len(x) <= self._sizes.max_rows_in_parts

    def parts(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        numbers, x_scales, _ = self._quantized(x)
        return kernel.parts(numbers, x_scales, self.weight, self.scales, sizes=self._sizes, device=self._device)

    def has_scales(self, x: Tensor) -> bool:
        """See ``Linear``. One scale of all rows lets cuBLAS take larger tiles than scales of rows do."""
        return not self.input_group and x.dtype == torch.bfloat16 and len(x) > self._sizes.max_rows

    def unscaled(self, x: Tensor) -> tuple[Tensor, Scales]:
        """See ``Linear``."""
        numbers, x_scales, _ = self._quantized(x)
        ones = self._one, self._one
        # Fast accumulation would add up all columns in some 14 bits.
        out = torch._scaled_mm(numbers, self.weight.t(), *ones, out_dtype=x.dtype, use_fast_accum=False)
        return out, Scales(x_scales.view(-1), self.scales)

    def _quantized(self, x: Tensor) -> Quantized:
        return quantize.quantized(x, self.input_group, sizes=self._row_sizes, device=self._device)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        numbers, x_scales, _ = self._quantized(x)
        # By rows PyTorch's product writes bf16 alone; with blocks it may not add a bias.
        library = self._in_library and x.dtype == torch.bfloat16 and (bias is None or not self.input_group)
        if len(x) <= self._sizes.max_rows or not library:
            each = numbers, x_scales, self.weight, self.scales
            return kernel.linear(*each, bias, x.dtype, sizes=self._sizes, device=self._device)
        return by_pytorch(numbers, x_scales, self.weight, self.scales, bias, x.dtype)


def by_pytorch(
    numbers: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See ``reference.linear``: by cuBLAS or CUTLASS, which serve some weights, dtypes and architectures."""
    lacking = -len(numbers) % _ROWS_OF_BLOCKS if scales.ndim == 2 else 0
    if lacking:
        padded = functional.pad(numbers, (0, 0, 0, lacking)), functional.pad(x_scales, (0, lacking))
        return by_pytorch(*padded, weight, scales, bias, dtype)[: len(numbers)]
    # Strides are checked, of dimensions of one element too.
    factors = (x_scales.t(), scales.t()) if scales.ndim == 2 else (x_scales.view(-1, 1), scales.view(1, -1))
    # Fast accumulation would add up all columns in some 14 bits.
    out: Tensor = torch._scaled_mm(numbers, weight.t(), *factors, bias, out_dtype=dtype, use_fast_accum=False)
    return out


def _multiplies_blocks(weight: Tensor, device: Device) -> bool:
    """Whether PyTorch multiplies weights of this shape by blocks."""
    # Versions of PyTorch differ in how rows of scales are padded; multiples of 4 need no padding.
    whole = len(weight) % BLOCK == 0 and weight.shape[1] % (4 * BLOCK) == 0
    version = tuple(int(number) for number in (torch.version.cuda or "0").split("."))
    return whole and device.arch == HOPPER and version >= _CUDA_OF_BLOCKS
