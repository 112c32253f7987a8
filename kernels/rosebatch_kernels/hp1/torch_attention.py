"""HP1 attention on a CPU: gather a sequence's blocks, then the formula. The new K and V are in the cache already."""

import torch
from torch import Tensor

from rosebatch_kernels.common.batched_product import batched_product
from rosebatch_kernels.common.gather import gather
from rosebatch_kernels.hp1.gate import Gate
from rosebatch_kernels.hp1.reference import probabilities


def decode(q: Tensor, cache: Tensor, rows: Tensor, mask: Tensor, scale: float, gate: Gate) -> Tensor:
    """See ``rosebatch_kernels.paged_attention.torch_attention.decode``."""
    batch, heads, size = q.shape
    k, v = gather(cache, rows, batch, mask.shape[-1])
    return _attend(q[:, :, None], k, v, mask == 0, scale, gate).reshape(batch, heads * size)


def prefill(q: Tensor, cache: Tensor, rows: Tensor, mask: Tensor, scale: float, gate: Gate) -> Tensor:
    """See ``rosebatch_kernels.paged_attention.torch_attention.prefill``."""
    _, heads, size = q.shape
    tile, keys = mask.shape
    tiles = q.view(-1, tile, heads, size).transpose(1, 2)
    k, v = gather(cache, rows, len(tiles), keys)
    return _attend(tiles, k, v, mask == 0, scale, gate).transpose(1, 2).reshape(-1, heads * size)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, gate: Gate) -> Tensor:
    """Attention of queries over all keys of their sequences, computed in fp32 at least.

    Args:
        q: ``[B, heads, R, D]``.
        k, v: ``[B, kv_heads, keys, D]``; heads is a multiple of kv_heads.
        seen: bool, broadcast to ``[B, heads, R, keys]``: False for keys after the query.
        scale: factor on q·k.
        gate: of the layer.

    Returns:
        ``[B, heads, R, D]`` in q's dtype.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1).to(wide) for x in (k, v))
    scores = batched_product(q.to(wide), keys.transpose(-1, -2)) * scale
    # masked_fill, not a product with 0: a key that no query sees may hold any value.
    weights = probabilities(scores, gate).masked_fill(~seen, 0.0)
    return batched_product(weights, values).to(q.dtype)
