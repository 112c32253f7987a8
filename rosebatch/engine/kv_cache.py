"""The tensors that hold every layer's K and V, in blocks, and how large they are."""

import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from rosebatch.config import KVShape
from rosebatch.engine.staging import Staging
from rosebatch.ops import Ops


def bytes_per_block(shapes: Sequence[KVShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block across all layers, K and V."""
    return 2 * block_size * dtype.itemsize * sum(shape.kv_heads * shape.head_dim for shape in shapes)


def bytes_for_longest(
    shapes: Sequence[KVShape], block_size: int, dtype: torch.dtype, lengths: Iterable[int], most: int
) -> int:
    """Bytes of a cache in which the ``most`` longest sequences fit whole, with a block to spare for each."""
    blocks = sum(-(-length // block_size) + 1 for length in heapq.nlargest(most, lengths))
    return blocks * bytes_per_block(shapes, block_size, dtype)


class KVCache:
    """K and V of all layers. Layers of one shape share a tensor.

    Args:
        shapes: of each layer, in order.
        num_blocks: blocks of every layer; a block id means the same place in all of them.
        block_size: tokens of a block.
        dtype: of K and V.
        device: where they lie.
        ops: the operators of this run.

    Attributes:
        groups: ``[layers of the shape, 2, blocks, kv_heads, block_size, D]`` each: K, then V. A head's tokens of a
            block are contiguous.
    """

    def __init__(
        self,
        shapes: Sequence[KVShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self._copy_blocks = ops.copy_blocks
        self.groups: list[Tensor] = []
        layers: dict[int, Tensor] = {}
        for shape in dict.fromkeys(shapes):
            members = [layer for layer, each in enumerate(shapes) if each == shape]
            size = (len(members), 2, num_blocks, shape.kv_heads, block_size, shape.head_dim)
            # Zeros, not empty: keys past a sequence's end are masked, but a masked NaN would still spread.
            data = zeros(size, dtype, device)
            self.groups.append(data)
            layers |= dict(zip(members, data, strict=True))
        self._layers = [layers[index] for index in range(len(shapes))]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(data.nbytes for data in self.groups)

    def layer(self, index: int) -> Tensor:
        """One layer's cache, ``[2, blocks, kv_heads, block_size, D]``."""
        return self._layers[index]

    def wipe(self, blocks: Sequence[int], staging: Staging) -> None:
        """Overwrite blocks with zeros in all layers."""
        if blocks:
            (index,) = staging.send(np.array(blocks, np.int64))
            for data in self.groups:
                data.index_fill_(2, index, 0)

    def copy(self, pairs: Sequence[tuple[int, int]], staging: Staging) -> None:
        """Copy (source, destination) blocks in all layers; no block is both."""
        if pairs:
            sources, destinations = staging.send(*np.array(pairs, np.int64).T)
            for data in self.groups:
                self._copy_blocks(data, sources, destinations)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU their pages stay untouched until they are written: torch.zeros takes 0.7 s for each GiB."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
