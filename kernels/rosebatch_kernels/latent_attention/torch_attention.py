"""Latent attention on a CPU: gather a sequence's blocks, then products in fp32 at least; see ``reference``.

A layer's cache is ``[1, blocks, 1, block_size, W]``; the new tokens are in it already. A token's bits depend neither on
the batch nor on its chunk: the shapes of all products follow from its position.
"""

import torch
from torch import Tensor

from rosebatch_kernels.common.batched_product import batched_product
from rosebatch_kernels.common.gather import gather


def decode(q: Tensor, cache: Tensor, rows: Tensor, mask: Tensor, rank: int, scale: float) -> Tensor:
    """Attention of one token for each sequence.

    Args:
        q: ``[B, heads, W]``.
        cache: ``[1, blocks, 1, block_size, W]``.
        rows: from ``gather_rows``, of one plane with one head.
        mask: ``[B, 1, 1, keys]``: 0 for the keys that a token sees, -inf for the others.
        rank: the first channels of a row, which are summed up.
        scale: factor on q·k.

    Returns:
        ``[B, heads, rank]``.
    """
    (keys,) = gather(cache, rows, len(q), mask.shape[-1])
    return _attend(q[:, None], keys, mask, rank, scale)[:, 0]


def prefill(q: Tensor, cache: Tensor, rows: Tensor, mask: Tensor, rank: int, scale: float) -> Tensor:
    """Attention of a tile of ``R`` successive tokens for each sequence, all tiles at the same positions.

    Args:
        q: ``[B · R, heads, W]``, the tokens of a sequence in order, sequence after sequence.
        cache, rows, rank, scale: as for ``decode``.
        mask: ``[R, keys]``, R even.

    Returns:
        ``[B · R, heads, rank]``.
    """
    tile, count = mask.shape
    (keys,) = gather(cache, rows, len(q) // tile, count)
    halves = q.view(-1, 2, tile // 2, *q.shape[1:])
    # In two halves, and each tile apart: the library divides the depth of a single product among threads.
    masks = mask.view(2, tile // 2, 1, count)
    out = [
        _attend(own.flatten(1, 2)[:, None], of_tile.expand(2, 1, -1, -1), masks, rank, scale)
        for own, of_tile in zip(halves, keys, strict=True)
    ]
    return torch.stack(out).view(*q.shape[:2], rank)


def _attend(q: Tensor, keys: Tensor, mask: Tensor, rank: int, scale: float) -> Tensor:
    """``q [B, 1, rows, W]`` over ``keys [B, 1, keys, W]``: ``[B, 1, rows, rank]`` in q's dtype.

    ``mask [B, tokens, 1, keys]``, tokens of as many rows.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    k = keys.to(wide)
    scores = batched_product(q.to(wide), k.transpose(-1, -2)) * scale
    seen = scores.view(len(q), mask.shape[1], -1, scores.shape[-1]) + mask
    weights = seen.softmax(-1).view(scores.shape)
    return batched_product(weights, k[..., :rank]).to(q.dtype)
