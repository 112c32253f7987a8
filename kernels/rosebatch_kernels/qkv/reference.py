"""PyTorch reference of the step between the fused QKV projection and attention."""

from typing import Any

import torch
from torch import Tensor

from rosebatch_kernels.common.head_norms import HeadNorm
from rosebatch_kernels.kv_cache import reference as kv_cache
from rosebatch_kernels.kv_cache.layout import cache_rows
from rosebatch_kernels.norm.reference import rms_norm
from rosebatch_kernels.qkv.torch_heads import split_heads


def prepare(
    qkv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: HeadNorm | None = None,
    rotary_rows: Tensor | None = None,
    scales: Tensor | None = None,
    append: bool = True,
) -> None:
    """Normalise and rotate q in place. Normalise and rotate k, and write k and v to the cache.

    Args:
        qkv: ``[T, (heads + 2 · kv_heads) · D]``, q then k then v; q is overwritten. Without ``append``, q alone.
        cache: ``[2, blocks, kv_heads, block_size, D]``, written in place.
        block_table: ``[S, M]`` int32 block ids, rows at any stride.
        rows: ``[T]`` int32, each token's row of the block table; a token with -1 is skipped.
        positions: ``[T]`` int32.
        num_heads: query heads.
        rotary: ``(cos, sin)``, ``[max_len, R]`` each in qkv's dtype; both halves of cos are equal, the first half of
            sin is negated. The first R of D channels are rotated.
        qk_norm: of each head, before the rotation.
        rotary_rows: ``[T]`` int32, each token's row of ``rotary``; None if it is the position.
        scales: of a cache of e4m3, written in place; see ``rosebatch_kernels.common.e4m3``.
        append: False where an earlier layer has written k and v: then only q is prepared.
    """
    real = rows >= 0
    qkv_real, where = qkv[real], positions[real].long()
    rotary_rows = where if rotary_rows is None else rotary_rows[real].long()
    _, _, kv_heads, block_size, size = cache.shape
    turned = None if rotary is None else (rotary[0][rotary_rows, None], rotary[1][rotary_rows, None])
    if not append:
        qkv_real, kv_heads = qkv_real[:, : num_heads * size], 0
    q, k, v = split_heads(qkv_real, num_heads, kv_heads, turned, qk_norm)
    qkv[real, : num_heads * size] = q.reshape(len(q), -1)
    if append:
        kv_cache.append(cache, k, v, cache_rows(block_table, rows[real], where, kv_heads, block_size), scales)


def whole_rms_norm_(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """RMSNorm of q and of k in place, each over all of its heads together, as OLMo 2 has it.

    Args:
        qkv: ``[T, (heads + 2 · kv_heads) · D]``, q then k then v, rows at any stride.
        q_weight, k_weight: ``[heads · D]`` and ``[kv_heads · D]``.
        eps: added to the mean of squares.
    """
    q, k = qkv[:, : len(q_weight)], qkv[:, len(q_weight) : len(q_weight) + len(k_weight)]
    q.copy_(rms_norm(q, q_weight, eps))
    k.copy_(rms_norm(k, k_weight, eps))


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, *, heads: int) -> None:
    """Rotate heads in place, of tokens that each have their own angles, such as patches of images.

    Args:
        qkv: ``[T, M · D]`` of M heads, rows at any stride.
        cos, sin: ``[T, D]`` fp32, contiguous; both halves of each are equal. Numbers are rounded once.
        heads: that are rotated, the first ones: q and k.
    """
    turned = qkv.unflatten(1, (-1, cos.shape[1]))[:, :heads]
    wide = turned.float()
    first, second = wide.chunk(2, -1)
    turned.copy_(wide * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None])


def prepared(
    qkv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    live: Tensor,
    *,
    num_heads: int,
    rotary: tuple[Tensor, Tensor] | None,
    qk_norm: HeadNorm | None,
    scales: Tensor | None = None,
) -> Tensor:
    """A copy of ``qkv`` after ``prepare``, for a decode step: row i of the block table is token i's.

    Args:
        live: ``[B]`` bool; the other tokens are skipped.
    """
    numbers = torch.arange(len(qkv), dtype=torch.int32, device=qkv.device)
    rows = torch.where(live, numbers, -1)
    qkv = qkv.clone()
    options: dict[str, Any] = {"num_heads": num_heads, "rotary": rotary, "qk_norm": qk_norm, "scales": scales}
    prepare(qkv, cache, block_table, rows, positions, **options)
    return qkv
