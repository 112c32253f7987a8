"""Paged attention on a CPU: gather a sequence's blocks, then PyTorch's scaled dot-product attention.

A layer's cache is ``[2, blocks, kv_heads, block_size, D]``; the new tokens' K and V are in it already.
"""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rosebatch_kernels.common.gather import gather


def decode(q: Tensor, cache: Tensor, rows: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of one token for each sequence.

    Args:
        q: ``[B, heads, D]``; ``heads`` is a multiple of the cache's kv_heads.
        cache: ``[2, blocks, kv_heads, block_size, D]``.
        rows: from ``gather_rows``.
        mask: ``[B, 1, 1, keys]`` in q's dtype: 0 for the keys that a token sees, -inf for the others.
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
        q: ``[B · R, heads, D]``, the tokens of a sequence in order, sequence after sequence.
        cache: ``[2, blocks, kv_heads, block_size, D]``.
        rows: from ``gather_rows``.
        mask: ``[R, keys]`` in q's dtype: 0 for the keys that a token sees, -inf for the others.
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
