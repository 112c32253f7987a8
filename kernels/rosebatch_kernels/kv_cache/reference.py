"""PyTorch reference of the KV cache writes; ``layout`` describes the cache."""

import torch
from torch import Tensor

from rosebatch_kernels.common.e4m3 import quantized


def append(cache: Tensor, k: Tensor, v: Tensor, rows: Tensor, scales: Tensor | None = None) -> None:
    """Write the K and V of new tokens to their slots (source: article S2).

    Args:
        cache: ``[2, blocks, kv_heads, block_size, D]``, written in place.
        k, v: ``[T, kv_heads, D]``.
        rows: ``[T, kv_heads]`` int64: the row of each token and head in ``[blocks · kv_heads · block_size, D]``, which
            is ``(block · kv_heads + head) · block_size + offset``.
        scales: ``[2, blocks, kv_heads, block_size, 1]`` fp32, written in place, if the cache holds bytes of e4m3.
    """
    if scales is not None:
        (k, k_scales), (v, v_scales) = quantized(k), quantized(v)
        append(scales, k_scales, v_scales, rows)
    size = cache.shape[-1]
    flat = rows.view(-1)
    cache[0].view(-1, size).index_copy_(0, flat, k.reshape(-1, size))
    cache[1].view(-1, size).index_copy_(0, flat, v.reshape(-1, size))


def copy_blocks(cache: Tensor, sources: Tensor, destinations: Tensor) -> None:
    """Copy whole blocks of all layers.

    Args:
        cache: ``[layers, planes, blocks, heads, block_size, width]``, written in place.
        sources, destinations: ``[C]`` int64 block ids; no block is in both.
    """
    cache.index_copy_(2, destinations, torch.index_select(cache, 2, sources))
