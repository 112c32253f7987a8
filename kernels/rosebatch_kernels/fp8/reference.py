"""PyTorch reference of fp8 products, which also says where numbers are rounded.

Sources: per-token scales as in vLLM; scales of 128 columns as in DeepSeek-V3 (arXiv 2412.19437, section 3.3).
"""

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch_kernels.common.e4m3 import LARGEST, scales_of

# Columns, and rows of a weight, that share a scale where scales are of blocks.
BLOCK = 128
# The least scale: of a row, and of 128 columns, where it only keeps zeros from being divided by zero.
MIN_SCALE = 1 / (LARGEST * 512)
MIN_BLOCK_SCALE = 1e-10 / LARGEST


def quantize(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """e4m3 numbers and their scales: ``scale = max(amax / 448, least)``, and ``x / scale`` to nearest even.

    In fp32, by true divisions: with a reciprocal, midpoints would be rounded otherwise.

    Args:
        x: ``[T, in]``.
        group: columns that share a scale, the last ones perhaps fewer; 0: all.

    Returns:
        ``numbers [T, in]`` e4m3; ``scales [G, T]`` fp32.
    """
    width = group or x.shape[1]
    padded = functional.pad(x.float(), (0, -x.shape[1] % width)).unflatten(1, (-1, width))
    least = MIN_BLOCK_SCALE if group else MIN_SCALE
    scales = scales_of(padded.abs().amax(2, keepdim=True), least)
    numbers = (padded / scales).clamp(-LARGEST, LARGEST).flatten(1)[:, : x.shape[1]]
    return numbers.to(torch.float8_e4m3fn).contiguous(), scales[..., 0].t().contiguous()


def parts(numbers: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The product in parts ``[S, T, out]`` fp32, which the reader adds up; here in a single part.

    128 columns at a time are multiplied and added up. Scales of blocks are applied to these sums, others at the end.

    Args:
        numbers: ``[T, in]`` e4m3.
        x_scales: ``[1, T]``, or ``[ceil(in / 128), T]`` if those of the weight are of blocks.
        weight: ``[out, in]`` e4m3.
        scales: fp32, ``[out]``, or ``[ceil(out / 128), ceil(in / 128)]``.
    """
    out = numbers.new_zeros(len(numbers), len(weight), dtype=torch.float32)
    in_blocks = scales.ndim == 2
    rows = torch.arange(len(weight), device=weight.device) // BLOCK
    pairs = zip(numbers.float().split(BLOCK, 1), weight.float().split(BLOCK, 1), strict=True)
    for block, (some, columns) in enumerate(pairs):
        factor = x_scales[block][:, None] * scales[rows, block] if in_blocks else 1.0
        out += some @ columns.t() * factor
    return (out if in_blocks else out * (x_scales[0][:, None] * scales))[None]


def linear(
    numbers: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The product ``[T, out]`` plus ``bias [out]``, rounded to ``dtype`` once; other arguments as of ``parts``."""
    out = parts(numbers, x_scales, weight, scales)[0]
    return (out if bias is None else out + bias.float()).to(dtype)
