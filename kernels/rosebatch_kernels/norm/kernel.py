"""Triton kernels of the norms: a row stays in registers from the addition to the result, so memory is read once.

The sum goes to a new tensor: adding to the residual in place was slower under CUDA graphs (article S4).

With ``group``, the fp8 form of the normed rows is left with them (see ``rosebatch_kernels.fp8.carried``). It is the
number of columns that share a scale, 0 for all of a row.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.all_reduce import TILE, AllReduce
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.rank_sum import sum_over_ranks
from rosebatch_kernels.common.rows import rows_of
from rosebatch_kernels.common.sizes import Steps, table, value_at
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2
from rosebatch_kernels.fp8.carried import empty_form, leave
from rosebatch_kernels.fp8.rounding import store_quantized
from rosebatch_kernels.linear.interface import Scales


@dataclass(frozen=True)
class Sizes:
    """Sizes of a program, the measured ones on an H100 80GB HBM3.

    Attributes:
        tile: elements; narrower rows share a program.
        warps: of a program, by columns rounded up to a power of two. A row of up to 1024 columns stays within a warp:
            sums across warps wait at three barriers each. Narrow rows share a program of four warps.
    """

    tile: int = TILE
    warps: Steps = ((8192, 16), (4096, 8), (2048, 4), (512, 1), (0, 4))


SIZES = table(Sizes())


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    sizes: Sizes,
    device: Device,
    group: int | None = None,
) -> Tensor:
    """LayerNorm of ``x [T, H]``, rows at any stride, with ``weight`` and perhaps ``bias`` ``[H]``; same dtype out."""
    normed, _ = _launch(x, None, weight, eps, "layer", None, None, sizes, device, bias=bias, group=group)
    return normed


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    x_bias: Tensor | None = None,
    all_reduce: AllReduce | None = None,
    *,
    sizes: Sizes,
    device: Device,
    group: int | None = None,
    scales: Scales | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual + (x + x_bias)`` and its LayerNorm: ``(normed [T, H], residual [T, H])``, both new.

    ``x`` is ``[T, H]``; or ``[S, T, H]`` fp32, parts to be added up first (see ``rosebatch_kernels.linear.kernel``).
    With ``all_reduce``, ``x`` is this rank's part of a sum over ranks. With ``scales``, ``x [T, H]`` is multiplied by
    them first.
    """
    each = x, residual, weight, eps, "layer", x_bias, all_reduce, sizes, device
    return _launch(*each, bias=bias, group=group, scales=scales)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, sizes: Sizes, device: Device, group: int | None = None
) -> Tensor:
    """RMSNorm of ``x [T, H]`` or ``[T, heads, H]``, rows and heads at any stride, with ``weight [H]``; same dtype out.

    The normalised value is rounded to the input's dtype before the weight is applied; with an fp32 weight it is not.
    """
    normed, _ = _launch(x, None, weight, eps, "rms", None, None, sizes, device, group=group)
    return normed


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    x_bias: Tensor | None = None,
    scale: float = 1.0,
    all_reduce: AllReduce | None = None,
    *,
    sizes: Sizes,
    device: Device,
    group: int | None = None,
    scales: Scales | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual + scale · (x + x_bias)`` and its RMSNorm: ``(normed [T, H], residual [T, H])``, both new."""
    each = x, residual, weight, eps, "rms", x_bias, all_reduce, sizes, device
    return _launch(*each, scale=scale, group=group, scales=scales)


def add_post_norm(
    x: Tensor,
    residual: Tensor,
    post_weight: Tensor,
    weight: Tensor | None,
    eps: float,
    x_bias: Tensor | None = None,
    all_reduce: AllReduce | None = None,
    *,
    sizes: Sizes,
    device: Device,
    group: int | None = None,
    scales: Scales | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual + RMSNorm(x + x_bias)`` and its RMSNorm: ``(normed [T, H], residual [T, H])``; ``x`` as above.

    Without a second weight, both results are the same new tensor. With ``factor [1]`` fp32, the sum is multiplied by it
    before it is rounded.
    """
    kind = None if weight is None else "rms"
    each = x, residual, weight, eps, kind, x_bias, all_reduce, sizes, device
    return _launch(*each, post_weight=post_weight, group=group, scales=scales, factor=factor)


def add(
    x: Tensor,
    residual: Tensor,
    x_bias: Tensor | None = None,
    all_reduce: AllReduce | None = None,
    *,
    sizes: Sizes,
    device: Device,
    scales: Scales | None = None,
) -> Tensor:
    """``residual + (x + x_bias)``, a new ``[T, H]``; ``x`` as above."""
    _, total = _launch(x, residual, None, 0.0, None, x_bias, all_reduce, sizes, device, scales=scales)
    return total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    kind: str | None,
    x_bias: Tensor | None,
    all_reduce: AllReduce | None,
    sizes: Sizes,
    device: Device,
    *,
    bias: Tensor | None = None,
    post_weight: Tensor | None = None,
    scale: float = 1.0,
    group: int | None = None,
    scales: Scales | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm of ``kind``: ``layer``, ``rms`` or None. Without a residual, the second result is ``x``."""
    rows, size = rows_of(x, residual), x.shape[-1]
    assert scales is None or x.ndim == 2, "parts have their scales"
    like = x if residual is None else residual
    # ``empty_like`` takes the host a microsecond less than ``empty`` with its arguments.
    total = x if residual is None else torch.empty_like(like, memory_format=torch.contiguous_format)
    normed = total if kind is None else torch.empty_like(like, memory_format=torch.contiguous_format)
    block = next_power_of_2(size)
    tile_rows = max(1, sizes.tile // block)
    # Heads alone are multiplied with no weight.
    form = None if group is None or kind is None or normed.ndim != 2 else empty_form(normed, group)
    _norm[(cdiv(rows.number, tile_rows),)](
        x=x,
        x_scales=scales,
        x_bias=x_bias,
        residual=residual,
        post_weight=post_weight,
        weight=weight,
        bias=bias,
        factor=factor,
        normed=normed,
        total=total,
        numbers=None if form is None else form.numbers,
        scales=None if form is None else form.scales,
        rows=rows.number,
        x_stride=rows.stride,
        inner_stride=rows.inner_stride,
        residual_stride=0 if residual is None else residual.stride(0),
        eps=eps,
        buffers=None if all_reduce is None else all_reduce.buffers,
        sums=None if all_reduce is None else all_reduce.sums,
        signals=None if all_reduce is None else all_reduce.signals,
        RANK=0 if all_reduce is None else all_reduce.rank,
        SCALE=float(scale),
        KIND=kind,
        GROUP=None if form is None else min(form.group, block),
        HEADS=rows.heads,
        PARTS=rows.parts,
        SIZE=size,
        BLOCK=block,
        TILE_ROWS=tile_rows,
        num_warps=value_at(sizes.warps, block),
        **launch_options(device),
    )
    return normed if form is None else leave(normed, form), total


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x,
    x_scales,
    x_bias,
    residual,
    post_weight,
    weight,
    bias,
    factor,
    normed,
    total,
    numbers,
    scales,
    rows,
    x_stride,
    inner_stride,
    residual_stride,
    eps,
    buffers,
    sums,
    signals,
    RANK: tl.constexpr,
    SCALE: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    # As wide as the tile: weights then load in the layout of the rows, without an exchange between threads.
    column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (TILE_ROWS, BLOCK))
    exists = column < SIZE
    inside = (row < rows) & exists
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    row = row.to(tl.int64)
    # All loads come before the first use of any, so that they are in flight together; weights before the wait.
    if post_weight is not None:
        post_factor = tl.load(post_weight + column, exists, other=0.0)
    if weight is not None:
        gain = tl.load(weight + column, exists, other=0.0)
    if bias is not None:
        offset = tl.load(bias + column, exists, other=0.0).to(tl.float32)
    if x_bias is not None:
        shift = tl.load(x_bias + column, exists, other=0.0).to(tl.float32)
    if x_scales is not None:
        x_scale = tl.load(x_scales.columns + column, exists, other=0.0)
    if PDL:
        wait()
    source = x + token * x_stride + head * inner_stride + column
    value = tl.load(source, inside, other=0.0).to(tl.float32)
    if residual is not None:
        addend = tl.load(residual + row * residual_stride + column, inside, other=0.0).to(tl.float32)
    if x_scales is not None:
        value *= tl.load(x_scales.rows + row, row < rows, other=0.0) * x_scale
    # Step by step: parts of many experts lie more than 2³¹ numbers apart.
    for _ in tl.static_range(1, PARTS):
        source += inner_stride
        value += tl.load(source, inside, other=0.0)
    if buffers is not None:
        at = row * SIZE + column
        value = sum_over_ranks(value, at, inside, TILE_ROWS * SIZE, buffers, sums, signals, RANK)
    if x_bias is not None:
        value += shift
    dtype = normed.dtype.element_ty
    if post_weight is not None:
        value = _rms(value, post_factor, SIZE, eps, dtype).to(dtype).to(tl.float32)
    if residual is not None:
        if SCALE != 1.0:
            value *= SCALE
        value += addend
        if factor is not None:
            value *= tl.load(factor)
        rounded = value.to(dtype)
        tl.store(total + row * SIZE + column, rounded, inside)
        value = rounded.to(tl.float32)
    if KIND == "rms":
        place = normed + row * SIZE + column
        result = _rms(value, gain, SIZE, eps, dtype).to(dtype)
        tl.store(place, result, inside)
    elif KIND == "layer":
        mean = tl.sum(value, 1, keep_dims=True) * (1.0 / SIZE)
        # From the differences, not from the mean of squares: that loses all digits if the mean is far from 0.
        centred = tl.where(exists, value - mean, 0.0)
        spread = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) * (1.0 / SIZE) + eps)
        out = centred * spread * gain.to(tl.float32)
        if bias is not None:
            out += offset
        place = normed + row * SIZE + column
        result = out.to(dtype)
        tl.store(place, result, inside)
    if GROUP is not None:
        store_quantized(result.to(tl.float32), numbers, scales, row, column, rows, 0, SIZE, GROUP, TILE_ROWS, BLOCK)


@triton.jit
def _rms(value, weight, SIZE: tl.constexpr, eps, DTYPE: tl.constexpr):
    """RMSNorm of fp32 rows, in fp32; rounded to ``dtype`` before the weight unless that is fp32."""
    out = value * tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) * (1.0 / SIZE) + eps)
    if weight.dtype != tl.float32:
        out = out.to(DTYPE).to(tl.float32)
    return out * weight.to(tl.float32)
