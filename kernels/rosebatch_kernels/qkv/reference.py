"""PyTorch reference of what stands between the fused QKV projection and attention."""

import torch
from torch import Tensor

from rosebatch_kernels.kv_cache.reference import append
from rosebatch_kernels.norm.reference import rms_norm
from rosebatch_kernels.qkv.norms import HeadUClip, QKNorm
from rosebatch_kernels.rope.reference import rope
from rosebatch_kernels.uclip.reference import uclip_norm


def split_heads(
    qkv: Tensor,
    num_heads: int,
    kv_heads: int,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: QKNorm | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of packed tokens, q and k normed and rotated.

    Args:
        qkv: ``[T, (heads + 2 · kv_heads) · D]``, q then k then v.
        num_heads, kv_heads: of q, and of k and v.
        rotary: ``(cos, sin)`` of the tokens' positions, ``[T, 1, D]`` each in qkv's dtype, see ``rope``.
        qk_norm: of each head before the rotation.

    Returns:
        q ``[T, heads, D]``, k and v ``[T, kv_heads, D]``.
    """
    count = num_heads + 2 * kv_heads
    heads = qkv.view(len(qkv), count, qkv.shape[1] // count)
    q, k, v = heads.split((num_heads, kv_heads, kv_heads), dim=1)
    if rotary is None and qk_norm is None:
        return q, k, v
    rotated = heads[:, : num_heads + kv_heads]
    if qk_norm is not None:
        rotated = torch.cat(_normed(q, k, qk_norm), dim=1)
    if rotary is not None:
        rotated = rope(rotated, *rotary)
    q, k = rotated.split((num_heads, kv_heads), dim=1)
    return q, k, v


def _normed(q: Tensor, k: Tensor, norm: QKNorm) -> tuple[Tensor, Tensor]:
    if isinstance(norm, HeadUClip):
        return uclip_norm(q, norm.q_alpha, norm.q_gamma), uclip_norm(k, norm.k_alpha, norm.k_gamma)
    q_weight, k_weight, eps = norm
    return rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)


def prepare(
    qkv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: QKNorm | None = None,
) -> None:
    """Norm and rotate q in place; norm and rotate k, and write it and v to the cache.

    Args:
        qkv: ``[T, (heads + 2 · kv_heads) · D]``, q then k then v; q is overwritten.
        cache: ``[2, blocks, kv_heads, block_size, D]``, written in place.
        block_table: ``[S, M]`` int32 block ids, rows at any stride.
        rows: ``[T]`` int32, each token's row of the block table; a token with -1 is skipped.
        positions: ``[T]`` int32.
        num_heads: query heads.
        rotary: ``(cos, sin)``, ``[max_len, D]`` each in qkv's dtype, both halves of cos alike, the first of sin
            negated.
        qk_norm: of each head before the rotation.
    """
    real = rows >= 0
    qkv_real, where = qkv[real], positions[real].long()
    _, _, kv_heads, block_size, size = cache.shape
    turned = None if rotary is None else (rotary[0][where, None], rotary[1][where, None])
    q, k, v = split_heads(qkv_real, num_heads, kv_heads, turned, qk_norm)
    qkv[real, : num_heads * size] = q.reshape(len(q), -1)
    append(cache, k, v, cache_rows(block_table, rows[real], where, kv_heads, block_size))


def cache_rows(block_table: Tensor, rows: Tensor, positions: Tensor, kv_heads: int, block_size: int) -> Tensor:
    """Where ``append`` writes each token's heads: ``[T, kv_heads]`` int64 rows of a layer's K or V as ``[rows, D]``.

    Args:
        block_table: ``[S, M]`` block ids.
        rows, positions: ``[T]``, of each token.
        kv_heads, block_size: of the cache.
    """
    positions = positions.long()
    block = block_table[rows.long(), positions // block_size].long()
    heads = torch.arange(kv_heads, device=block.device)
    return (block[:, None] * kv_heads + heads) * block_size + (positions % block_size)[:, None]
