"""Attention over the paged cache as references have it: a loop over sequences, whatever turns scores into weights.

In fp32 at least, and in float64 where that comes in. Products are written out and summed instead of being left to a
matrix product, whose precision on a GPU is a global setting. For checking, not for speed: it reads block ids and
positions on the host.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rosebatch_kernels.qkv.norms import QKNorm
from rosebatch_kernels.qkv.reference import prepare

# From q·k ``[heads, R, keys]`` and the positions of queries ``[R, 1]`` and keys ``[keys]`` to the weights of values.
Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]


def decode_each(
    qkv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    limits: Tensor,
    weigh: Weigh,
    *,
    num_heads: int,
    rotary: tuple[Tensor, Tensor] | None,
    qk_norm: QKNorm | None,
    append: bool,
) -> Tensor:
    """One new token for each live sequence; arguments as of ``rosebatch_kernels.paged_attention.decode``."""
    live = positions < limits
    if append:
        numbers = torch.arange(len(qkv), dtype=torch.int32, device=qkv.device)
        rows = torch.where(live, numbers, -1)
        qkv = qkv.clone()
        prepare(qkv, cache, block_table, rows, positions, num_heads=num_heads, rotary=rotary, qk_norm=qk_norm)
    out = torch.empty(len(qkv), num_heads * cache.shape[-1], dtype=qkv.dtype, device=qkv.device)
    for row in live.nonzero()[:, 0].tolist():
        out[row] = _attend(qkv[row : row + 1], cache, block_table[row], int(positions[row]), num_heads, weigh)[0]
    return out


def prefill_each(
    q: Tensor, cache: Tensor, block_table: Tensor, tiles: Tensor, weigh: Weigh, *, num_heads: int
) -> Tensor:
    """Tiles of packed chunks; arguments as of ``rosebatch_kernels.paged_attention.prefill``."""
    out = torch.empty(len(q), num_heads * cache.shape[-1], dtype=q.dtype, device=q.device)
    for sequence, first, position, count in tiles.tolist():
        rows = slice(first, first + count)
        out[rows] = _attend(q[rows], cache, block_table[sequence], position, num_heads, weigh)
    return out


def _attend(q: Tensor, cache: Tensor, table: Tensor, position: int, num_heads: int, weigh: Weigh) -> Tensor:
    """Attention of successive tokens ``q [R, at least heads · D]`` of one sequence, the first at ``position``."""
    _, _, kv_heads, block_size, size = cache.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    end = position + len(q)
    blocks = table[: -(-end // block_size)].long()
    k, v = cache[:, blocks].transpose(2, 3).flatten(1, 2)[:, :end].to(wide)
    queries = q[:, : num_heads * size].unflatten(1, (kv_heads, -1, size)).to(wide)
    own = torch.arange(position, end, device=q.device)[:, None]
    key = torch.arange(end, device=q.device)
    # [R, kv_heads, group, keys]
    products = (queries[:, :, :, None] * k.transpose(0, 1)[:, None]).sum(-1)
    weights = weigh(products.flatten(1, 2).transpose(0, 1), own, key).transpose(0, 1).unflatten(1, (kv_heads, -1))
    out: Tensor = (weights[..., None] * v.transpose(0, 1)[:, None]).sum(-2)
    return out.flatten(1).to(q.dtype)
