"""PyTorch reference of attention over the paged cache as ``decode`` and ``prefill`` have it: a loop over sequences.

In fp32 at least, and in float64 where that comes in. Products are written out and summed instead of being left to a
matrix product, whose precision on a GPU is a global setting. For checking, not for speed: it reads block ids and
positions on the host.
"""

import torch
from torch import Tensor

from rosebatch_kernels.paged_attention.decode import DecodeWorkspace
from rosebatch_kernels.qkv.reference import prepare


def decode(
    qkv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    limits: Tensor,
    workspace: DecodeWorkspace,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
    append: bool = True,
) -> Tensor:
    """Attention of one new token for each sequence.

    Args:
        qkv: ``[B, (heads + 2 · kv_heads) · D]``, q then k then v, as the projection leaves them.
        cache: ``[2, blocks, kv_heads, block_size, D]``; with ``append`` the new K and V are written into it.
        block_table: ``[B, M]`` int32 block ids, rows at any stride.
        positions: ``[B]`` int32 at any stride, of the new token.
        limits: ``[B]`` int32; a row with ``position >= limit`` is skipped, its output undefined.
        workspace: not used.
        num_heads: query heads, a multiple of kv_heads.
        scale: factor on q·k.
        window: keys that the token sees, its own included; 0 for all.
        rotary: ``(cos, sin)``, ``[max_len, D]`` each in qkv's dtype, both halves of cos alike, the first of sin
            negated; None where q and k are rotated already, or never.
        qk_norm: ``(q weight [D], k weight [D], eps)`` of an RMSNorm over each head before the rotation.
        append: False where the new K and V are in the cache already; q is then taken as it is.

    Returns:
        ``[B, heads · D]``.
    """
    live = positions < limits
    if append:
        numbers = torch.arange(len(qkv), dtype=torch.int32, device=qkv.device)
        rows = torch.where(live, numbers, -1)
        qkv = qkv.clone()
        prepare(qkv, cache, block_table, rows, positions, num_heads=num_heads, rotary=rotary, qk_norm=qk_norm)
    out = torch.empty(len(qkv), num_heads * cache.shape[-1], dtype=qkv.dtype, device=qkv.device)
    for row in live.nonzero()[:, 0].tolist():
        q = qkv[row : row + 1]
        out[row] = _attend(q, cache, block_table[row], int(positions[row]), num_heads, scale, window)[0]
    return out


def prefill(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Attention of chunks of tokens, packed one behind the other.

    Args:
        q: ``[T, at least heads · D]``, rows at any stride: q stands first in each.
        cache: ``[2, blocks, kv_heads, block_size, D]``, the chunks' own K and V included.
        block_table: ``[S, M]`` int32 block ids, rows at any stride.
        tiles: ``[N, 4]`` int32: row of the block table, first row in q, position of that row, number of rows; the
            tiles cover the rows of q exactly once.
        num_heads: query heads, a multiple of kv_heads.
        scale: factor on q·k.
        window: keys that a token sees, its own included; 0 for all.

    Returns:
        ``[T, heads · D]``.
    """
    out = torch.empty(len(q), num_heads * cache.shape[-1], dtype=q.dtype, device=q.device)
    for sequence, first, position, count in tiles.tolist():
        rows = slice(first, first + count)
        out[rows] = _attend(q[rows], cache, block_table[sequence], position, num_heads, scale, window)
    return out


def _attend(
    q: Tensor, cache: Tensor, table: Tensor, position: int, num_heads: int, scale: float, window: int
) -> Tensor:
    """Attention of successive tokens ``q [R, at least heads · D]`` of one sequence, the first at ``position``."""
    _, _, kv_heads, block_size, size = cache.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    end = position + len(q)
    blocks = table[: -(-end // block_size)].long()
    k, v = cache[:, blocks].transpose(2, 3).flatten(1, 2)[:, :end].to(wide)
    queries = q[:, : num_heads * size].unflatten(1, (kv_heads, -1, size)).to(wide)
    own = torch.arange(position, end, device=q.device)[:, None]
    key = torch.arange(end, device=q.device)
    seen = key <= own
    if window:
        seen &= key > own - window
    # [R, kv_heads, group, keys]
    scores = (queries[:, :, :, None] * k.transpose(0, 1)[:, None]).sum(-1) * scale
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    out: Tensor = (weights[..., None] * v.transpose(0, 1)[:, None]).sum(-2)
    return out.flatten(1).to(q.dtype)
