"""How 4-bit integers lie in memory, so that a kernel reads them in whole lines and needs few instructions for each.

A word of 16 bits holds four codes, of columns 32 apart. So two neighbouring words make four pairs of neighbours, each
by one shift and one instruction that keeps a nibble of both words and adds an exponent to it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Columns of a chunk: all codes of a word are in it.
CHUNK = 128
# Columns that share a place in their words.
QUARTER = CHUNK // 4
# The zero of weights without zeros of their own.
MIDDLE = 8
# What columns may share a scale.
GROUPS = (128, 64, 32)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """A matrix ``[out, in]``; a value is ``(code - zero) · scale``.

    Attributes:
        words: ``[in / 128 rounded up, out, 32]`` int16; word q of chunk c holds columns 128 · c + 32 · place + q, the
            first place in its lowest bits. Codes behind the last column are 0.
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


def empty_words(rows: int, columns: int, device: torch.device) -> Tensor:
    """Words of a matrix ``[rows, columns]``, for ``pack_``."""
    return torch.empty(-(-columns // CHUNK), rows, QUARTER, dtype=torch.int16, device=device)


def pack_(words: Tensor, first: int, codes: Tensor) -> None:
    """Write the rows from ``first`` on.

    Args:
        words: of the whole matrix, see ``Int4Weight``.
        first: row of the matrix.
        codes: ``[rows, in]`` of one byte each, 0 to 15.
    """
    padded = functional.pad(codes, (0, -codes.shape[1] % CHUNK))
    places = padded.view(len(codes), -1, CHUNK // QUARTER, QUARTER).permute(2, 1, 0, 3)
    own = words[:, first : first + len(codes)]
    own.copy_(places[0])
    for place, each in enumerate(places[1:], 1):
        own |= each.short() << 4 * place


def narrowest(scales: Tensor, preferred: torch.dtype = torch.bfloat16) -> Tensor:
    """The same fp32 numbers in 16 bits, if there is a type that has them all: the preferred one, if that has them."""
    for dtype in (preferred, torch.bfloat16, torch.float16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales
