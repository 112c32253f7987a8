"""QK norm, rotary positions and the KV append of packed tokens in one Triton kernel, one program a token."""

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.dependent_launch import launch_options, wait


def prepare(
    qkv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: tuple[Tensor, Tensor, float] | None = None,
) -> None:
    """See ``rosebatch_kernels.qkv.reference``."""
    tokens = len(qkv)
    _, blocks, kv_heads, block_size, size = cache.shape
    cos, sin = rotary if rotary is not None else (qkv, qkv)
    q_weight, k_weight, eps = qk_norm if qk_norm is not None else (qkv, qkv, 0.0)
    _prepare[(tokens,)](
        qkv,
        cache,
        block_table,
        rows,
        positions,
        cos,
        sin,
        q_weight,
        k_weight,
        eps,
        blocks,
        qkv.stride(0),
        block_table.stride(0),
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEADS_WIDTH=triton.next_power_of_2(num_heads),
        KV_WIDTH=triton.next_power_of_2(kv_heads),
        D=size,
        WIDTH=triton.next_power_of_2(size),
        BLOCK=block_size,
        ROTARY=rotary is not None,
        NORM=qk_norm is not None,
        num_warps=4,
        **launch_options(),
    )


@triton.jit
def normed_and_rotated(
    heads, weight, cos, sin, mask, D: tl.constexpr, WIDTH: tl.constexpr, eps, ROTARY: tl.constexpr, NORM: tl.constexpr
):
    """Heads ``[R, WIDTH]`` at the pointers ``heads [R, 1]`` after norm and rotation, rounded where PyTorch rounds.

    ``cos`` and ``sin`` point to the row of the token's position. The other half of a head is read a second time (from
    the L1 cache) instead of being exchanged between threads.
    """
    dtype = weight.dtype.element_ty
    d = tl.arange(0, WIDTH)[None, :]
    mask = mask & (d < D)
    x = tl.load(heads + d, mask=mask, other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        x = ((wide * factor).to(dtype).to(tl.float32) * w).to(dtype)
    if ROTARY:
        partner = tl.where(d < D // 2, d + D // 2, d - D // 2)
        other = tl.load(heads + partner, mask=mask, other=0.0)
        if NORM:
            w = tl.load(weight + partner, mask=d < D, other=0.0).to(tl.float32)
            other = ((other.to(tl.float32) * factor).to(dtype).to(tl.float32) * w).to(dtype)
        c = tl.load(cos + d, mask=d < D, other=0.0).to(tl.float32)
        s = tl.load(sin + d, mask=d < D, other=0.0).to(tl.float32)
        x = ((x.to(tl.float32) * c).to(dtype).to(tl.float32) + other.to(tl.float32) * s).to(dtype)
    return x


@triton.jit(do_not_specialize=["num_blocks"])
def _prepare(
    qkv,
    cache,
    block_table,
    rows,
    positions,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    num_blocks,
    qkv_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_WIDTH: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    token = tl.program_id(0)
    position = tl.load(positions + token)
    row = tl.load(rows + token)
    if row < 0:
        return
    start = qkv + token.to(tl.int64) * qkv_stride
    d = tl.arange(0, WIDTH)[None, :]
    cos_row, sin_row = cos + position.to(tl.int64) * D, sin + position.to(tl.int64) * D
    if ROTARY or NORM:
        h = tl.arange(0, HEADS_WIDTH)[:, None]
        heads = start + h * D
        q = normed_and_rotated(heads, q_weight, cos_row, sin_row, h < HEADS, D, WIDTH, eps, ROTARY, NORM)
        # Every half has been read before any is overwritten.
        tl.debug_barrier()
        tl.store(heads + d, q, mask=(h < HEADS) & (d < D))
    h = tl.arange(0, KV_WIDTH)[:, None]
    k_heads = start + (HEADS + h) * D
    k = normed_and_rotated(k_heads, k_weight, cos_row, sin_row, h < KV_HEADS, D, WIDTH, eps, ROTARY, NORM)
    mask = (h < KV_HEADS) & (d < D)
    v = tl.load(start + (HEADS + KV_HEADS + h) * D + d, mask=mask)
    block = tl.load(block_table + row * table_stride + position // BLOCK).to(tl.int64)
    place = cache + (block * KV_HEADS + h) * (BLOCK * D) + (position % BLOCK) * D + d
    tl.store(place, k, mask=mask)
    tl.store(place + num_blocks.to(tl.int64) * (KV_HEADS * BLOCK * D), v, mask=mask)
