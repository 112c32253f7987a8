"""Chunks of sequences, packed one after the other, and the tiles that they are cut into."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# Maximum tokens of a tile: successive ones of one chunk, the work of one program.
TILE_ROWS = 64


class PackedChunks(NamedTuple):
    """Chunks of sequences, packed one after the other.

    Attributes:
        chunks: ``[S, 4]`` int32: slot, first row, position of that row, tokens. A chunk of 0 tokens is padding.
        tiles: ``[N, 2]`` int32: chunk, and its rows from this one on, at most ``TILE_ROWS`` of them. A chunk's tiles
            start at multiples of ``TILE_ROWS`` in it and may stand in any order. A chunk of -1 is padding.
    """

    chunks: Tensor
    tiles: Tensor


def max_tiles(tokens: int, chunks: int) -> int:
    """Tiles that so many tokens in so many chunks never exceed: the size of a launch that a graph can hold."""
    return tokens // TILE_ROWS + min(tokens, chunks)


def pack_chunks(
    chunks: Iterable[tuple[int, int, int, int]], device: torch.device | str = "cpu", tiles: int = 0
) -> PackedChunks:
    """Describe chunks, see ``PackedChunks.chunks``; the tiles are padded to the number ``tiles``."""
    rows = list(chunks)
    cuts = [(index, start) for index, (*_, count) in enumerate(rows) for start in range(0, count, TILE_ROWS)]
    cuts += [(-1, 0)] * (tiles - len(cuts))
    both = (torch.tensor(part, dtype=torch.int32).view(len(part), -1).to(device) for part in (rows, cuts))
    return PackedChunks(*both)
