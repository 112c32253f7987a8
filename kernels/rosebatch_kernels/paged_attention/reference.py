"""PyTorch reference of paged attention: gather a sequence's blocks, then scaled dot-product attention.

A layer's cache is ``[2, blocks, kv_heads, block_size, D]``; the K and V of the new tokens are already in it.

The shapes of a product decide the order in which a library adds up. So the number of keys that a query is computed
with, masked ones included, is a function of its own position: see ``padded_keys``.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def padded_keys(seq_len: int) -> int:
    """Keys that the last of ``seq_len`` tokens is computed with: a multiple of 64, at most an eighth above 512."""
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
    """The first ``keys`` K and V of each sequence, ``[B, kv_heads, keys, D]`` each, in one copy."""
    _, _, kv_heads, block_size, size = cache.shape
    flat = cache.view(-1, block_size, size).index_select(0, rows)
    k, v = flat.view(2, batch, kv_heads, -1, size)[:, :, :, :keys]
    return k, v


def decode(q: Tensor, cache: Tensor, rows: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of one token for each sequence.

    Args:
        q: ``[B, heads, D]``; ``heads`` is a multiple of the cache's kv_heads.
        cache: ``[2, blocks, kv_heads, block_size, D]``.
        rows: from ``gather_rows``.
        mask: ``[B, 1, 1, keys]`` in q's dtype, 0 for keys that count and -inf for the rest.
        scale: factor on q·k.

    Returns:
        ``[B, heads · D]``.
    """
    batch, heads, size = q.shape
    k, v = gather(cache, rows, batch, mask.shape[-1])
    # The heads that share a K/V head become the query rows of one product: K and V are never repeated.
    grouped = q.reshape(batch, k.shape[1], -1, size)
    out = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads * size)


def prefill(q: Tensor, cache: Tensor, rows: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of a tile of ``R`` successive tokens for each sequence, all tiles at the same positions.

    Args:
        q: ``[B · R, heads, D]``, a sequence's tokens one behind the other.
        cache: ``[2, blocks, kv_heads, block_size, D]``.
        rows: from ``gather_rows``.
        mask: ``[R, keys]`` in q's dtype, 0 for keys that count and -inf for the rest.
        scale: factor on q·k.

    Returns:
        ``[B · R, heads · D]``.
    """
    _, heads, size = q.shape
    tile, keys = mask.shape
    tiles = q.view(-1, tile, heads, size).transpose(1, 2)
    k, v = gather(cache, rows, len(tiles), keys)
    out = scaled_dot_product_attention(tiles, k, v, attn_mask=mask, scale=scale, enable_gqa=heads != k.shape[1])
    return out.transpose(1, 2).reshape(-1, heads * size)
