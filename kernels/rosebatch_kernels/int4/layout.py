"""A matrix of 4-bit integers as the kernels read it.

Two neighbouring words make four pairs of neighbours, each by one shift and one instruction that keeps a nibble of both
words and adds an exponent to it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rosebatch_kernels.common.packing import CHUNK as CHUNK
from rosebatch_kernels.common.packing import MIDDLE as MIDDLE

# Columns that share a place in their words.
QUARTER = CHUNK // 4
# What columns may share a scale.
GROUPS = (128, 64, 32)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """A matrix ``[out, in]``; a value is ``(code - zero) · scale``.

    Attributes:
        words: ``[in / 128 rounded up, out, 32]`` int16, see ``empty_words``: word q of chunk c holds columns
            128 · c + 32 · place + q.
        scales: ``[in / group rounded up, out]`` in a float type of 16 or 32 bits.
        zeros: ``[in / group rounded up, out]`` int32, 15 at most: the kernel's pipeline copies no loads of fewer bytes.
            None if all are 8.
        columns: in.
        group: neighbouring columns that share scale and zero, one of ``GROUPS``.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    columns: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return self.words.shape[1], self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.words.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)


def narrowest(scales: Tensor, preferred: torch.dtype = torch.bfloat16) -> Tensor:
    """The same fp32 numbers in 16 bits, if there is a type that has them all: the preferred one, if that has them."""
    for dtype in (preferred, torch.bfloat16, torch.float16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales
