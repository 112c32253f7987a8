"""Paged attention on a CPU: gather a sequence's blocks, then PyTorch's scaled dot-product attention.

A layer's cache is ``[2, blocks, kv_heads, block_size, D]``; the new tokens' K and V are in it already. It may hold
bytes of e4m3 with scales, see ``rosebatch_kernels.common.e4m3``.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rosebatch_kernels.common.batched_product import batched_product
from rosebatch_kernels.common.e4m3 import dequantized
from rosebatch_kernels.common.gather import gather
from rosebatch_kernels.paged_attention.reference import softmax


def decode(
    q: Tensor,
    cache: Tensor,
    rows: Tensor,
    mask: Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Attention of one token for each sequence.

    Args:
        q: ``[B, heads, D]``; ``heads`` is a multiple of the cache's kv_heads.
        cache: ``[2, blocks, kv_heads, block_size, D]``.
        rows: from ``gather_rows``.
        mask: ``[B, 1, 1, keys]`` in q's dtype: 0 for the keys that a token sees, -inf for the others.
        scale: factor on q·k.
        soft_cap: bound of a score, see ``rosebatch_kernels.paged_attention.decode``; 0 for none.
        sinks: ``[heads]``, a further logit of each head's softmax, without a value.
        scales: of a cache of e4m3; None for one of floats.

    Returns:
        ``[B, heads · D]``.
    """
    batch, heads, size = q.shape
    k, v = _keys(q, cache, scales, rows, batch, mask.shape[-1])
    if soft_cap or sinks is not None:
        return _attend(q[:, :, None], k, v, mask, scale, soft_cap, sinks).view(batch, heads * size)
    # The heads that share a K/V head become the query rows of one product: K and V are never repeated.
    grouped = q.reshape(batch, k.shape[1], -1, size)
    out = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads * size)


def prefill(
    q: Tensor,
    cache: Tensor,
    rows: Tensor,
    mask: Tensor,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Attention of a tile of ``R`` successive tokens for each sequence, all tiles at the same positions.

    Args:
        q: ``[B · R, heads, D]``, the tokens of a sequence in order, sequence after sequence.
        cache: ``[2, blocks, kv_heads, block_size, D]``.
        rows: from ``gather_rows``.
        mask: ``[R, keys]`` in q's dtype: 0 for the keys that a token sees, -inf for the others.
        scale: factor on q·k.
        soft_cap, sinks, scales: as for ``decode``.

    Returns:
        ``[B · R, heads · D]``.
    """
    _, heads, size = q.shape
    tile, keys = mask.shape
    tiles = q.view(-1, tile, heads, size).transpose(1, 2)
    k, v = _keys(q, cache, scales, rows, len(tiles), keys)
    if soft_cap or sinks is not None:
        out = _attend(tiles, k, v, mask, scale, soft_cap, sinks)
    else:
        out = scaled_dot_product_attention(tiles, k, v, attn_mask=mask, scale=scale, enable_gqa=heads != k.shape[1])
    return out.transpose(1, 2).reshape(-1, heads * size)


def _keys(q: Tensor, cache: Tensor, scales: Tensor | None, rows: Tensor, batch: int, keys: int) -> tuple[Tensor, ...]:
    """K and V ``[B, kv_heads, keys, D]`` in q's dtype."""
    gathered = gather(cache, rows, batch, keys)
    if scales is None:
        return gathered
    factors = gather(scales, rows, batch, keys)
    return tuple(dequantized(*each).to(q.dtype) for each in zip(gathered, factors, strict=True))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, soft_cap: float, sinks: Tensor | None
) -> Tensor:
    """What ``scaled_dot_product_attention`` has no argument for, computed in fp32 at least.

    Args:
        q: ``[B, heads, R, D]``.
        k, v: ``[B, kv_heads, keys, D]``.
        mask: broadcast to ``[B, heads, R, keys]``.
        scale, soft_cap, sinks: as for ``decode``.

    Returns:
        ``[B, heads, R, D]`` in q's dtype.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, kv_heads, keys, size = k.shape
    grouped = q.to(wide).reshape(batch, kv_heads, -1, size)
    scores = (batched_product(grouped, k.to(wide).transpose(-1, -2)) * scale).view(*q.shape[:3], keys)
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    weights = softmax(scores + mask, sinks).reshape(batch, kv_heads, -1, keys)
    return batched_product(weights, v.to(wide)).view(q.shape).to(q.dtype)
