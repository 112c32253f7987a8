"""Where tokens lie in a layer's cache ``[2, blocks, kv_heads, block_size, D]``.

K comes first, then V. Within a block, the tokens of one head are contiguous.
"""

import torch
from torch import Tensor


def cache_rows(block_table: Tensor, rows: Tensor, positions: Tensor, kv_heads: int, block_size: int) -> Tensor:
    """Where ``append`` writes each token's heads: ``[T, kv_heads]`` int64 rows of a layer's K or V as ``[rows, D]``.

    Args:
        block_table: ``[S, M]`` block ids.
        rows, positions: ``[T]``, of each token.
        kv_heads, block_size: of the cache.
    """
    positions = positions.long()
    block = block_table[rows.long(), positions // block_size].long()
    heads = torch.arange(kv_heads, device=block.device)
    return (block[:, None] * kv_heads + heads) * block_size + (positions % block_size)[:, None]
