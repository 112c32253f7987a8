"""PyTorch reference of rotary position embedding (arXiv 2104.09864)."""

import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel ``i`` with channel ``i + D/2`` of each head.

    Args:
        x: ``[T, heads, D]``.
        cos: ``[T, 1, D]`` in x's dtype, both halves alike.
        sin: ``[T, 1, D]`` in x's dtype, the first half negated.

    Returns:
        ``[T, heads, D]``.
    """
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, x.roll(half, -1), sin)
