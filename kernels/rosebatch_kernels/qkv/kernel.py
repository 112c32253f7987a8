"""QK norm, rotary positions and the KV append of packed tokens in one Triton kernel, one program a token."""

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.dependent_launch import launch_options, wait
from rosebatch_kernels.qkv.norms import QKNorm, norm_arguments


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
    """See ``rosebatch_kernels.qkv.reference``."""
    tokens = len(qkv)
    _, blocks, kv_heads, block_size, size = cache.shape
    cos, sin = rotary if rotary is not None else (qkv, qkv)
    norm, q_weight, k_weight, q_number, k_number = norm_arguments(qk_norm, qkv)
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
        q_number,
        k_number,
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
        NORM=norm,
        num_warps=4,
        **launch_options(),
    )


@triton.jit
def halves(place, mask, D: tl.constexpr, WIDTH: tl.constexpr, SWAPPED: tl.constexpr):
    """``[R, WIDTH]`` at the pointers ``place [R, 1]``, and the same with the halves of D exchanged.

    Read a second time (from the L1 cache) instead of being exchanged between threads; not without SWAPPED.
    """
    d = tl.arange(0, WIDTH)[None, :]
    mask = mask & (d < D)
    x = tl.load(place + d, mask=mask, other=0.0)
    swapped = x
    if SWAPPED:
        swapped = tl.load(place + tl.where(d < D // 2, d + D // 2, d - D // 2), mask=mask, other=0.0)
    return x, swapped


@triton.jit
def turn(cos, sin, position, D: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr):
    """cos and sin ``[1, WIDTH]`` of a position; something unused without ROTARY."""
    d = tl.arange(0, WIDTH)[None, :]
    if ROTARY:
        place = position.to(tl.int64) * D + d
        c = tl.load(cos + place, mask=d < D, other=0.0)
        s = tl.load(sin + place, mask=d < D, other=0.0)
    else:
        c = d
        s = d
    return c, s


@triton.jit
def weight_halves(weight, D: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr):
    """Both ``halves`` of a norm's weight ``[D]``; something unused without NORM."""
    one = tl.zeros([1, 1], tl.int32)
    if NORM is not None:
        own, swapped = halves(weight + one, one == 0, D, WIDTH, ROTARY)
    else:
        own = one
        swapped = one
    return own, swapped


@triton.jit
def normed_and_rotated(x, weight, cos, sin, D: tl.constexpr, number, ROTARY: tl.constexpr, NORM: tl.constexpr):
    """Heads after norm and rotation, rounded where PyTorch rounds.

    ``x`` and ``weight`` are both ``halves`` each, ``cos`` and ``sin`` ``[1, WIDTH]``; all were loaded by the caller, so
    that their latencies pass together. ``number`` is a norm's eps, or the factor of a clip.
    """
    own, other = x
    dtype = own.dtype
    if NORM == "uclip":
        own = _clipped(own, weight[0], number)
        if ROTARY:
            other = _clipped(other, weight[1], number)
    elif NORM == "rms":
        wide = own.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 1) / D + number)[:, None]
        own = ((wide * factor).to(dtype).to(tl.float32) * weight[0].to(tl.float32)).to(dtype)
        if ROTARY:
            other = ((other.to(tl.float32) * factor).to(dtype).to(tl.float32) * weight[1].to(tl.float32)).to(dtype)
    if ROTARY:
        turned = (own.to(tl.float32) * cos.to(tl.float32)).to(dtype).to(tl.float32)
        own = (turned + other.to(tl.float32) * sin.to(tl.float32)).to(dtype)
    return own


@triton.jit
def _clipped(x, alpha, gamma):
    inside = tl.clamp(x.to(tl.float32) * alpha.to(tl.float32), -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)
    return (inside * gamma).to(x.dtype)


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
    q_number,
    k_number,
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
    c, s = turn(cos, sin, position, D, WIDTH, ROTARY)
    if ROTARY or NORM is not None:
        h = tl.arange(0, HEADS_WIDTH)[:, None]
        heads = start + h * D
        weight = weight_halves(q_weight, D, WIDTH, ROTARY, NORM)
        q = normed_and_rotated(halves(heads, h < HEADS, D, WIDTH, ROTARY), weight, c, s, D, q_number, ROTARY, NORM)
        # Every half has been read before any is overwritten.
        tl.debug_barrier()
        tl.store(heads + d, q, mask=(h < HEADS) & (d < D))
    h = tl.arange(0, KV_WIDTH)[:, None]
    k_halves = halves(start + (HEADS + h) * D, h < KV_HEADS, D, WIDTH, ROTARY)
    weight = weight_halves(k_weight, D, WIDTH, ROTARY, NORM)
    k = normed_and_rotated(k_halves, weight, c, s, D, k_number, ROTARY, NORM)
    mask = (h < KV_HEADS) & (d < D)
    v = tl.load(start + (HEADS + KV_HEADS + h) * D + d, mask=mask)
    block = tl.load(block_table + row * table_stride + position // BLOCK).to(tl.int64)
    place = cache + (block * KV_HEADS + h) * (BLOCK * D) + (position % BLOCK) * D + d
    tl.store(place, k, mask=mask)
    tl.store(place + num_blocks.to(tl.int64) * (KV_HEADS * BLOCK * D), v, mask=mask)
