"""What TMA, Hopper's engine for copies of whole tiles, asks of a matrix."""

import torch

# Rows begin at a multiple of so many bytes.
_ALIGNMENT = 16


def can_describe(columns: int, dtype: torch.dtype) -> bool:
    """Whether a descriptor can stand for contiguous rows of so many elements."""
    return columns * dtype.itemsize % _ALIGNMENT == 0
