"""What the operators of the gated delta rule share: parameters, states, and how packed chunks are described."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

# Most tokens of a tile of a chunk, and the length of the triangular systems.
TILE_ROWS = 64


class DeltaWeights(NamedTuple):
    """Parameters of a layer.

    Attributes:
        conv: ``[C, taps]``, of each channel; the last factor is that of the token itself.
        conv_bias: ``[C]`` or None.
        log_rate: ``[value_heads]``; a token's decay is ``exp(-exp(log_rate) · softplus(a + dt_bias))``.
        dt_bias: ``[value_heads]``.
    """

    conv: Tensor
    conv_bias: Tensor | None
    log_rate: Tensor
    dt_bias: Tensor


class DeltaState(NamedTuple):
    """What the sequences of a layer keep, one slot each.

    Attributes:
        inputs: ``[slots, taps, C]`` in the activations' dtype: the convolution's input at position p lies in row
            ``p mod taps``. One row more than the past tokens that are read: programs write a new token's input while
            others still read the past ones.
        memory: ``[slots, value_heads, key_dim, value_dim]`` fp32, the rule's matrix S.
    """

    inputs: Tensor
    memory: Tensor

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Key heads, value heads, key size, value size."""
        _, value_heads, key_dim, value_dim = self.memory.shape
        return (self.inputs.shape[2] - value_heads * value_dim) // (2 * key_dim), value_heads, key_dim, value_dim


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
