"""PyTorch reference of paged attention: gather a sequence's blocks, then scaled dot-product attention.

A layer's cache is ``[2, blocks, kv_heads, block_size, D]``; the K and V of the new tokens are already in it.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


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


def gather(cache: Tensor, rows: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Contiguous K and V, ``[B, kv_heads, M · block_size, D]`` each, in one copy."""
    _, _, kv_heads, block_size, size = cache.shape
    flat = cache.view(-1, block_size, size).index_select(0, rows)
    k, v = flat.view(2, batch, kv_heads, -1, size)
    return k, v


def decode(q: Tensor, cache: Tensor, rows: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of one new token for each sequence.

    Args:
        q: ``[B, heads, D]``; ``heads`` is a multiple of the cache's kv_heads.
        cache: ``[2, blocks, kv_heads, block_size, D]``.
        rows: from ``gather_rows``.
        mask: ``[B, 1, 1, M · block_size]`` in q's dtype, 0 for keys that count and -inf for the rest.
        scale: factor on q·k.

    Returns:
        ``[B, heads · D]``.
    """
    batch, heads, size = q.shape
    k, v = gather(cache, rows, batch)
    # The heads that share a K/V head become the query rows of one product: K and V are never repeated.
    grouped = q.view(batch, k.shape[1], -1, size)
    out = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads * size)


def prefill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of a chunk of one sequence over its prefix and itself.

    Args:
        q: ``[T, heads, D]``.
        k, v: ``[kv_heads, L, D]``, the chunk's own tokens last.
        mask: ``[T, L]`` bool, True for keys that count; None for plain causal with ``T == L``.
        scale: factor on q·k.

    Returns:
        ``[T, heads · D]``.
    """
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[0],
    )
    return out[0].transpose(0, 1).reshape(q.shape[0], -1)
