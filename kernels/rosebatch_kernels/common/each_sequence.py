"""The loop of the attention references: one sequence after another, with any function from scores to weights.

It computes in fp32 at least, and in float64 where the input is float64. Products are written out and summed: the
precision of a matrix product on a GPU is a global setting. This is for checking, not for speed: block ids and
positions are read on the host.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# From q·k ``[heads, R, keys]``, the positions of queries ``[R, 1]``, of the last key that each sees ``[R, 1]``, and of
# keys ``[keys]`` to the weights of values.
Weigh = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def decode_each(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    live: Tensor,
    weigh: Weigh,
    *,
    num_heads: int,
    window: int = 0,
) -> Tensor:
    """Attention of one token for each sequence whose ``live [B]`` is true; the other rows are undefined.

    Args:
        q: ``[B, at least heads · D]``; q stands first in each row.
        cache: ``[2, blocks, kv_heads, block_size, D]``, the tokens' own K and V included.
        block_table: ``[B, M]`` block ids.
        positions: ``[B]``.
        live: ``[B]`` bool.
        weigh: gives the weights.
        num_heads: query heads.
        window: blocks before the first query's window are not read; 0 for none. ``weigh`` masks keys.

    Returns:
        ``[B, heads · D]``.
    """
    out = torch.empty(len(q), num_heads * cache.shape[-1], dtype=q.dtype, device=q.device)
    for row in live.nonzero()[:, 0].tolist():
        out[row] = _attend(q[row : row + 1], cache, block_table[row], int(positions[row]), num_heads, weigh, window)[0]
    return out


def prefill_each(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    weigh: Weigh,
    *,
    num_heads: int,
    window: int = 0,
    key_ends: Tensor | None = None,
) -> Tensor:
    """Attention of tiles of packed chunks, see ``rosebatch_kernels.common.tiles``.

    Args:
        q: ``[T, at least heads · D]``; q stands first in each row.
        cache: ``[2, blocks, kv_heads, block_size, D]``, the chunks' own K and V included.
        block_table: ``[S, M]`` block ids.
        tiles: ``[N, 4]``.
        weigh: gives the weights.
        num_heads: query heads.
        window: blocks before the first query's window are not read; 0 for none. ``weigh`` masks keys.
        key_ends: ``[T]``, the place after the last key that each row sees; None for its own plus one.

    Returns:
        ``[T, heads · D]``; rows that no tile covers are undefined.
    """
    out = torch.empty(len(q), num_heads * cache.shape[-1], dtype=q.dtype, device=q.device)
    for sequence, first, position, count in tiles.tolist():
        rows = slice(first, first + count)
        ends = None if key_ends is None else key_ends[rows]
        out[rows] = _attend(q[rows], cache, block_table[sequence], position, num_heads, weigh, window, ends)
    return out


def _attend(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    position: int,
    num_heads: int,
    weigh: Weigh,
    window: int,
    ends: Tensor | None = None,
) -> Tensor:
    """Attention of successive tokens ``q [R, at least heads · D]`` of one sequence, the first at ``position``."""
    _, _, kv_heads, block_size, size = cache.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    own = torch.arange(position, position + len(q), device=q.device)[:, None]
    last = own if ends is None else ends[:, None] - 1
    end = position + len(q) if ends is None else int(ends.max())
    first = max(0, position + 1 - window) // block_size if window else 0
    start = first * block_size
    blocks = table[first : -(-end // block_size)].long()
    k, v = cache[:, blocks].transpose(2, 3).flatten(1, 2)[:, : end - start].to(wide)
    queries = q[:, : num_heads * size].unflatten(1, (kv_heads, -1, size)).to(wide)
    key = torch.arange(start, end, device=q.device)
    # [R, kv_heads, group, keys]
    products = (queries[:, :, :, None] * k.transpose(0, 1)[:, None]).sum(-1)
    weights = weigh(products.flatten(1, 2).transpose(0, 1), own, last, key).transpose(0, 1).unflatten(1, (kv_heads, -1))
    out: Tensor = (weights[..., None] * v.transpose(0, 1)[:, None]).sum(-2)
    return out.flatten(1).to(q.dtype)
