"""How codes of few bits lie in memory: kernels read them in whole lines, and decode pairs of neighbours.

A word of 16 bits holds a code of each piece of a chunk of columns. So two neighbouring words have pairs of neighbours,
and few instructions make a register of two numbers of each pair.
"""

import torch
from torch import Tensor
from torch.nn import functional

# Columns of a chunk: all codes of a word are in it.
CHUNK = 128
# The zero of 4-bit integers without zeros of their own.
MIDDLE = 8


def empty_words(shape: tuple[int, ...], piece: int, device: torch.device) -> Tensor:
    """Words ``[..., C, out, P]`` int16 of the C chunks of codes ``[..., out, in]``, for ``pack_``.

    Word q of a chunk has the codes of its columns q, q + P, ..., the first in its lowest bits. Codes behind the last
    column are 0.

    Args:
        shape: of the codes.
        piece: P, neighbouring columns whose codes have the same place in their words: 8 for each bit of a code.
        device: of the words.
    """
    *lead, rows, columns = shape
    return torch.empty(*lead, -(-columns // CHUNK), rows, piece, dtype=torch.int16, device=device)


def pack_(words: Tensor, codes: Tensor) -> None:
    """Write the words ``[C, out, P]`` of codes ``[out, in]``, of a byte each."""
    piece, bits = words.shape[2], 16 * words.shape[2] // CHUNK
    padded = functional.pad(codes, (0, -codes.shape[1] % CHUNK))
    places = padded.view(len(codes), -1, CHUNK // piece, piece).permute(2, 1, 0, 3)
    words.copy_(places[0])
    for place, each in enumerate(places[1:], 1):
        words |= each.short() << bits * place
