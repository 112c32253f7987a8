"""QK norm, rotary positions and the KV append in one Triton kernel, one program for each packed token.

A norm over all heads together has a kernel of its own in front of it.
"""

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.head_norms import HeadNorm, norm_arguments
from rosebatch_kernels.common.heads import halves, normed_and_rotated, turn, weight_halves
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.sizes import Steps, value_at

# Warps of the one program of each token, by the elements of q in its registers; 4 measured on an H100 80GB HBM3.
_WARPS: Steps = ((16384, 16), (8192, 8), (0, 4))
# Of a program of the norm over all heads, by columns rounded up to a power of two: as a row of ``norm`` has.
_WHOLE_WARPS: Steps = ((8192, 16), (4096, 8), (2048, 4), (0, 1))


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
) -> None:
    """See ``rosebatch_kernels.qkv.reference``."""
    tokens = len(qkv)
    _, blocks, kv_heads, block_size, size = cache.shape
    cos, sin = rotary if rotary is not None else (qkv, qkv)
    heads_width, width = triton.next_power_of_2(num_heads), triton.next_power_of_2(size)
    norm, q_weight, k_weight, q_number, k_number = norm_arguments(qk_norm, qkv)
    _prepare[(tokens,)](
        qkv=qkv,
        cache=cache,
        block_table=block_table,
        rows=rows,
        positions=positions,
        rotary_rows=rotary_rows,
        cos=cos,
        sin=sin,
        q_weight=q_weight,
        k_weight=k_weight,
        q_number=q_number,
        k_number=k_number,
        num_blocks=blocks,
        qkv_stride=qkv.stride(0),
        table_stride=block_table.stride(0),
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEADS_WIDTH=heads_width,
        KV_WIDTH=triton.next_power_of_2(kv_heads),
        D=size,
        WIDTH=width,
        BLOCK=block_size,
        ROTARY=0 if rotary is None else cos.shape[1],
        NORM=norm,
        num_warps=value_at(_WARPS, heads_width * width),
        **launch_options(),
    )


def whole_rms_norm_(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    """See ``rosebatch_kernels.qkv.reference``."""
    width = triton.next_power_of_2(max(len(q_weight), len(k_weight)))
    # A program for q of each token, and one for k.
    _whole_norm[(len(qkv), 2)](
        qkv=qkv,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        stride=qkv.stride(0),
        Q_SIZE=len(q_weight),
        K_SIZE=len(k_weight),
        WIDTH=width,
        num_warps=value_at(_WHOLE_WARPS, width),
        **launch_options(),
    )


@triton.jit
def _whole_norm(
    qkv,
    q_weight,
    k_weight,
    eps,
    stride,
    Q_SIZE: tl.constexpr,
    K_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    column = tl.arange(0, WIDTH)
    place = qkv + tl.program_id(0).to(tl.int64) * stride + column
    if tl.program_id(1) == 0:
        _norm_row(place, q_weight + column, column < Q_SIZE, eps, Q_SIZE, PDL)
    else:
        _norm_row(place + Q_SIZE, k_weight + column, column < K_SIZE, eps, K_SIZE, PDL)


@triton.jit
def _norm_row(place, weight, exists, eps, SIZE: tl.constexpr, PDL: tl.constexpr):
    """RMSNorm of ``SIZE`` numbers in place, rounded where PyTorch rounds."""
    factor = tl.load(weight, mask=exists, other=0.0).to(tl.float32)
    if PDL:
        wait()
    x = tl.load(place, mask=exists, other=0.0)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)).to(x.dtype).to(tl.float32) * factor
    tl.store(place, normed.to(x.dtype), mask=exists)


@triton.jit(do_not_specialize=["num_blocks"])
def _prepare(
    qkv,
    cache,
    block_table,
    rows,
    positions,
    rotary_rows,
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
    turned = turn(cos, sin, position if rotary_rows is None else tl.load(rotary_rows + token), WIDTH, ROTARY)
    if ROTARY or NORM is not None:
        h = tl.arange(0, HEADS_WIDTH)[:, None]
        heads = start + h * D
        weight = weight_halves(q_weight, q_number, h, h < HEADS, D, WIDTH, ROTARY, NORM)
        q = normed_and_rotated(halves(heads, h < HEADS, D, WIDTH, ROTARY), weight, turned, D, ROTARY, NORM)
        # All threads must read both halves before any thread overwrites one.
        tl.debug_barrier()
        tl.store(heads + d, q, mask=(h < HEADS) & (d < D))
    h = tl.arange(0, KV_WIDTH)[:, None]
    k_halves = halves(start + (HEADS + h) * D, h < KV_HEADS, D, WIDTH, ROTARY)
    weight = weight_halves(k_weight, k_number, h, h < KV_HEADS, D, WIDTH, ROTARY, NORM)
    k = normed_and_rotated(k_halves, weight, turned, D, ROTARY, NORM)
    mask = (h < KV_HEADS) & (d < D)
    v = tl.load(start + (HEADS + KV_HEADS + h) * D + d, mask=mask)
    block = tl.load(block_table + row * table_stride + position // BLOCK).to(tl.int64)
    place = cache + (block * KV_HEADS + h) * (BLOCK * D) + (position % BLOCK) * D + d
    tl.store(place, k, mask=mask)
    tl.store(place + num_blocks.to(tl.int64) * (KV_HEADS * BLOCK * D), v, mask=mask)
