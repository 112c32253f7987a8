"""The tensor that holds every layer's K and V, in blocks, and how large it is."""

import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from rosebatch.config import ModelConfig
from rosebatch.ops import Ops


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block across all layers, K and V."""
    return 2 * config.num_layers * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize


def bytes_for_longest(
    config: ModelConfig, block_size: int, dtype: torch.dtype, lengths: Iterable[int], most: int
) -> int:
    """Bytes of a cache in which the ``most`` longest sequences fit whole, with a block to spare for each."""
    blocks = sum(-(-length // block_size) + 1 for length in heapq.nlargest(most, lengths))
    return blocks * bytes_per_block(config, block_size, dtype)


class KVCache:
    """``[layers, 2, blocks, kv_heads, block_size, D]``: K, then V; a head's tokens of a block are contiguous."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_heads = config.num_kv_heads
        shape = (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_dim)
        # Zeros, not empty: keys past a sequence's end are masked, and a masked NaN would still spread.
        self.data = _zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)
        self._copy_blocks = ops.copy_blocks

    def layer(self, index: int) -> Tensor:
        """One layer's cache, ``[2, blocks, kv_heads, block_size, D]``."""
        return self.data[index]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks in all layers; no block is both."""
        if pairs:
            sources, destinations = torch.tensor(pairs, device=self.data.device).unbind(1)
            self._copy_blocks(self.data, sources, destinations)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU whose pages stay untouched until they are written: torch.zeros takes 0.7 s for each GiB."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
