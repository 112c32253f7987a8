"""QK norm, rotary positions and the KV append in one Triton kernel, one program for each packed token.

A norm over all heads together has a kernel of its own, which runs before it. So has the rotation alone, of tokens that
no cache keeps.
"""

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.head_norms import HeadNorm, norm_arguments
from rosebatch_kernels.common.heads import halves, normed_and_rotated, normed_values, shape_of, turn, weight_halves
from rosebatch_kernels.common.kv_tiles import pages_of, place_of, store
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.sizes import Steps, value_at
from rosebatch_kernels.common.whole_numbers import next_power_of_2

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
    scales: Tensor | None = None,
    append: bool = True,
    device: Device,
) -> None:
    """See ``rosebatch_kernels.qkv.reference``."""
    norm, q_norm, k_norm = norm_arguments(qk_norm)
    # No matrix product needs wider heads.
    shape = shape_of(cache, num_heads, rotary, norm)._replace(WIDTH=next_power_of_2(cache.shape[-1]))
    heads_width = next_power_of_2(num_heads)
    _prepare[(len(qkv),)](
        qkv=qkv,
        cache=cache,
        scales=scales,
        block_table=block_table,
        rows=rows,
        positions=positions,
        rotary_rows=rotary_rows,
        rotary=rotary,
        q_norm=q_norm,
        k_norm=k_norm,
        num_blocks=cache.shape[1],
        qkv_stride=qkv.stride(0),
        table_stride=block_table.stride(0),
        SHAPE=shape,
        HEADS_WIDTH=heads_width,
        KV_WIDTH=next_power_of_2(shape.KV_HEADS),
        APPEND=append,
        num_warps=value_at(_WARPS, heads_width * shape.WIDTH),
        **launch_options(device),
    )


def whole_rms_norm_(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, *, device: Device) -> None:
    """See ``rosebatch_kernels.qkv.reference``."""
    width = next_power_of_2(max(len(q_weight), len(k_weight)))
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
        **launch_options(device),
    )


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, *, heads: int, device: Device) -> None:
    """See ``rosebatch_kernels.qkv.reference``."""
    half = cos.shape[1] // 2
    heads_width, width = next_power_of_2(heads), next_power_of_2(half)
    _rotate[(len(qkv),)](
        qkv=qkv,
        cos=cos,
        sin=sin,
        stride=qkv.stride(0),
        HEADS=heads,
        HALF=half,
        HEADS_WIDTH=heads_width,
        WIDTH=width,
        num_warps=value_at(_WARPS, 2 * heads_width * width),
        **launch_options(device),
    )


@triton.jit
def _rotate(
    qkv,
    cos,
    sin,
    stride,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HEADS_WIDTH)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    c = tl.load(cos + token * 2 * HALF + d, mask=d < HALF, other=0.0)
    s = tl.load(sin + token * 2 * HALF + d, mask=d < HALF, other=0.0)
    place = qkv + token * stride + h * 2 * HALF + d
    mask = (h < HEADS) & (d < HALF)
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, first * c - second * s, mask=mask)
    tl.store(place + HALF, second * c + first * s, mask=mask)


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
    scales,
    block_table,
    rows,
    positions,
    rotary_rows,
    rotary,
    q_norm,
    k_norm,
    num_blocks,
    qkv_stride,
    table_stride,
    SHAPE: tl.constexpr,
    HEADS_WIDTH: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    APPEND: tl.constexpr,
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
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    turned = turn(rotary, position if rotary_rows is None else tl.load(rotary_rows + token), SHAPE)
    if SHAPE.ROTARY or SHAPE.NORM is not None:
        h = tl.arange(0, HEADS_WIDTH)[:, None]
        real = h < SHAPE.HEADS
        heads = start + h * SHAPE.D
        weight = weight_halves(q_norm, h, real, SHAPE)
        q = normed_and_rotated(halves(heads, real, SHAPE), weight, turned, SHAPE)
        # All threads must read both halves before any thread overwrites one.
        tl.debug_barrier()
        tl.store(heads + d, q, mask=real & (d < SHAPE.D))
    if not APPEND:
        return
    h = tl.arange(0, KV_WIDTH)[:, None]
    real = h < SHAPE.KV_HEADS
    k_halves = halves(start + (SHAPE.HEADS + h) * SHAPE.D, real, SHAPE)
    k_weight = weight_halves(k_norm, h, real, SHAPE)
    k = normed_and_rotated(k_halves, k_weight, turned, SHAPE)
    mask = real & (d < SHAPE.D)
    v = tl.load(start + (SHAPE.HEADS + SHAPE.KV_HEADS + h) * SHAPE.D + d, mask=mask, other=0.0)
    v = normed_values(v, k_weight, SHAPE)
    pages = pages_of(cache, scales, num_blocks, block_table + row * table_stride, h, SHAPE)
    store(pages, place_of(pages, position, SHAPE), k, v, mask, SHAPE.D)
