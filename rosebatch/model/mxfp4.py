"""MXFP4: 4-bit floats in blocks that share a power of two (OCP Microscaling Formats v1.0)."""

import torch
from torch import Tensor

# By code: a sign, two bits of exponent, one of mantissa.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_SCALE_BIAS = 127


def expand(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values ``[..., G · 2 · B]`` of ``blocks [..., G, B]`` uint8 with ``scales [..., G]`` uint8.

    A byte holds two codes, the first in its low half. All values are exact in bf16.
    """
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    table = torch.tensor(_VALUES, device=blocks.device)
    exponents = scales.int() - _SCALE_BIAS
    return torch.ldexp(table[codes.long()], exponents[..., None]).to(dtype).flatten(-2)
