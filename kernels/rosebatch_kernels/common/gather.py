"""The K and V of a sequence as one tensor: its blocks, gathered from the paged cache with PyTorch's operators."""

import torch
from torch import Tensor


def padded_keys(seq_len: int) -> int:
    """Number of keys, masked ones included, that the last of ``seq_len`` tokens is computed with.

    It is a function of the position alone, because the shapes of a product decide the order in which a library adds
    up. It is a multiple of 64. Above 512 tokens the excess is at most an eighth.
    """
    step = 64
    while step * 8 < seq_len:
        step *= 2
    return -(-seq_len // step) * step


def gather_rows(block_table: Tensor, num_blocks: int, kv_heads: int) -> Tensor:
    """Where ``gather`` reads: ``[2 · B · kv_heads · M]`` int64 rows of a layer's ``[2 · blocks · kv_heads, ...]`` view.

    Args:
        block_table: ``[B, M]`` int64 block ids; entries past a sequence's end may be any valid block.
        num_blocks: blocks of the whole cache.
        kv_heads: heads of K and V.
    """
    heads = torch.arange(kv_heads, device=block_table.device)
    rows = block_table[:, None, :] * kv_heads + heads[None, :, None]
    return torch.stack((rows, rows + num_blocks * kv_heads)).view(-1)


def gather(cache: Tensor, rows: Tensor, batch: int, keys: int) -> tuple[Tensor, Tensor]:
    """The first ``keys`` K and V of each sequence, ``[B, kv_heads, keys, D]`` each, in one copy.

    Args:
        cache: ``[2, blocks, kv_heads, block_size, D]``.
        rows: from ``gather_rows``.
        batch: B.
        keys: at most the table's width times block_size.
    """
    _, _, kv_heads, block_size, size = cache.shape
    flat = cache.view(-1, block_size, size).index_select(0, rows)
    k, v = flat.view(2, batch, kv_heads, -1, size)[:, :, :, :keys]
    return k, v
