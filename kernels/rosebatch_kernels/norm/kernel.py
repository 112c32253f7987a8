"""Triton kernels of the norms: a row stays in registers from the addition to the result, so memory is read once.

The sum is returned in a new tensor: adding to the residual in place was found slower under CUDA graphs (article S4).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a program: rows narrower than this share one.
_TILE = 1024


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of ``x [T, H]``, rows at any stride, with ``weight`` and ``bias`` ``[H]``; same dtype out."""
    normed, _ = _launch(x, None, None, weight, bias, eps)
    return normed


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, x_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``residual + (x + x_bias)`` and its LayerNorm: ``(normed [T, H], residual [T, H])``, both new."""
    return _launch(x, x_bias, residual, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x [T, H]`` or ``[T, heads, H]``, rows and heads at any stride, with ``weight [H]``; same dtype out.

    The normalised value is rounded to the input's dtype before the weight is applied.
    """
    normed, _ = _launch(x, None, None, weight, None, eps)
    return normed


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, x_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``residual + (x + x_bias)`` and its RMSNorm: ``(normed [T, H], residual [T, H])``, both new."""
    return _launch(x, x_bias, residual, weight, None, eps)


def _launch(
    x: Tensor, x_bias: Tensor | None, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """LayerNorm where there is a bias, else RMSNorm; without a residual the second result is ``x``."""
    assert x.stride(-1) == 1 and (residual is None or residual.stride(-1) == 1), "the last axis is contiguous"
    size = x.shape[-1]
    heads, head_stride = (x.shape[1], x.stride(1)) if x.ndim == 3 else (1, 0)
    rows = len(x) * heads
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    block = triton.next_power_of_2(size)
    tile_rows = max(1, _TILE // block)
    _norm[(triton.cdiv(rows, tile_rows),)](
        x,
        x_bias,
        residual,
        weight,
        bias,
        normed,
        total,
        rows,
        x.stride(0),
        head_stride,
        0 if residual is None else residual.stride(0),
        eps,
        heads=heads,
        size=size,
        block=block,
        tile_rows=tile_rows,
        num_warps=_num_warps(block),
    )
    return normed, total


def _num_warps(block: int) -> int:
    """A row of up to 1024 elements stays within a warp: sums across warps wait at three barriers each."""
    if block <= 256:
        return 4
    return 1 if block <= 1024 else min(block // 512, 16)


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x,
    x_bias,
    residual,
    weight,
    bias,
    normed,
    total,
    rows,
    x_stride,
    head_stride,
    residual_stride,
    eps,
    heads: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    tile_rows: tl.constexpr,
):
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)[:, None]
    # As wide as the tile, so that weights are loaded in the layout of the rows, without an exchange between threads.
    column = tl.broadcast_to(tl.arange(0, block)[None, :], (tile_rows, block))
    exists = column < size
    inside = (row < rows) & exists
    token, head = (row // heads).to(tl.int64), row % heads
    row = row.to(tl.int64)
    # All loads come before the first use of any, so that their latencies pass together.
    value = tl.load(x + token * x_stride + head * head_stride + column, inside, other=0.0).to(tl.float32)
    if residual is not None:
        addend = tl.load(residual + row * residual_stride + column, inside, other=0.0).to(tl.float32)
    if x_bias is not None:
        value += tl.load(x_bias + column, exists, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, exists, other=0.0).to(tl.float32)
    if bias is not None:
        offset = tl.load(bias + column, exists, other=0.0).to(tl.float32)
    dtype = normed.dtype.element_ty
    if residual is not None:
        rounded = (addend + value).to(dtype)
        tl.store(total + row * size + column, rounded, inside)
        value = rounded.to(tl.float32)
    if bias is None:
        scale = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) * (1.0 / size) + eps)
        out = (value * scale).to(dtype).to(tl.float32) * factor
    else:
        mean = tl.sum(value, 1, keep_dims=True) * (1.0 / size)
        # Of the differences, not of the squares: a mean far from 0 would leave no digits.
        centred = tl.where(exists, value - mean, 0.0)
        scale = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) * (1.0 / size) + eps)
        out = centred * scale * factor + offset
    tl.store(normed + row * size + column, out.to(dtype), inside)
