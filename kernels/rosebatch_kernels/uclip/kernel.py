"""Triton kernels of UClipNorm: no element needs another, so a tile is any part of a row, and memory is read once.

The sum is returned in a new tensor, as the norms' is (see ``rosebatch_kernels.norm.kernel``).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.dependent_launch import launch_options, wait

_NUM_WARPS = 4
# Elements of a program. Few: 32 rows of 1024 channels make 128 programs, and a thread's two elements of eight parts
# leave it registers enough to ask for all of them at once. Many: a thread asks for 16 bytes of each of two rows.
_FEW = 256
_MANY = 2048
# Columns of a program: 16 bytes for each thread of four warps in 16-bit types.
_COLUMNS = 1024
# Elements in all that programs of few serve in one wave of 132 multiprocessors.
_ONE_WAVE = 2**19


def uclip_norm(x: Tensor, alpha: Tensor, gamma: float) -> Tensor:
    """UClipNorm of ``x [T, H]`` or ``[T, heads, H]``, rows and heads at any stride; ``alpha [H]``; same dtype out."""
    normed, _ = _launch(x, None, None, 0.0, alpha, gamma)
    return normed


def add_uclip_norm(
    y: Tensor, residual: Tensor, post_alpha: Tensor, post_gamma: float, alpha: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """``residual + UClip_post(y)``, and its UClipNorm: ``(normed [T, H], residual [T, H])``, both new.

    ``y`` is ``[T, H]``, or ``[S, T, H]`` fp32, parts that are added up first (see ``rosebatch_kernels.linear.kernel``).
    What is added is rounded to the residual's dtype first, and so is the sum.
    """
    return _launch(y, residual, post_alpha, post_gamma, alpha, gamma)


def _launch(
    x: Tensor, residual: Tensor | None, post_alpha: Tensor | None, post_gamma: float, alpha: Tensor, gamma: float
) -> tuple[Tensor, Tensor]:
    """Without a residual the second result is ``x``."""
    assert x.stride(-1) == 1 and (residual is None or residual.stride(-1) == 1), "the last axis is contiguous"
    size = x.shape[-1]
    parts = heads = 1
    row_stride, inner_stride = x.stride(0), 0
    if x.ndim == 3 and residual is not None:
        parts, row_stride, inner_stride = len(x), x.stride(1), x.stride(0)
    elif x.ndim == 3:
        heads, inner_stride = x.shape[1], x.stride(1)
    like = x if residual is None else residual
    rows = len(like) * heads
    normed = torch.empty(like.shape, dtype=like.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    tile = _FEW if rows * size <= _ONE_WAVE else _MANY
    columns = min(tile, _COLUMNS, triton.next_power_of_2(size))
    tile_rows = tile // columns
    _uclip[(triton.cdiv(rows, tile_rows), triton.cdiv(size, columns))](
        x,
        residual,
        post_alpha,
        alpha,
        normed,
        total,
        rows,
        size,
        row_stride,
        inner_stride,
        0 if residual is None else residual.stride(0),
        post_gamma,
        gamma,
        heads=heads,
        parts=parts,
        tile_rows=tile_rows,
        columns=columns,
        num_warps=_NUM_WARPS,
        # A product fused with the addition behind it would be added without having been rounded, in fp32.
        enable_fp_fusion=False,
        **launch_options(),
    )
    return normed, total


@triton.jit(do_not_specialize=["rows"])
def _uclip(
    x,
    residual,
    post_alpha,
    alpha,
    normed,
    total,
    rows,
    size,
    x_stride,
    inner_stride,
    residual_stride,
    post_gamma,
    gamma,
    heads: tl.constexpr,
    parts: tl.constexpr,
    tile_rows: tl.constexpr,
    columns: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)[:, None]
    column = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
    # As wide as the tile, so that weights are loaded in the layout of the rows, without an exchange between threads.
    column = tl.broadcast_to(column, (tile_rows, columns))
    exists = column < size
    inside = (row < rows) & exists
    token, head = (row // heads).to(tl.int64), row % heads
    row = row.to(tl.int64)
    # All loads come before the first use of any, so that their latencies pass together; weights before the wait.
    factor = tl.load(alpha + column, exists)
    if residual is not None:
        post_factor = tl.load(post_alpha + column, exists)
    if PDL:
        wait()
    source = x + token * x_stride + head * inner_stride + column
    value = tl.load(source, inside).to(tl.float32)
    if residual is not None:
        addend = tl.load(residual + row * residual_stride + column, inside)
    for _ in tl.static_range(1, parts):
        source += inner_stride
        value += tl.load(source, inside)
    dtype = normed.dtype.element_ty
    place = row * size + column
    if residual is not None:
        post = _clip(value * post_factor.to(tl.float32), post_gamma).to(dtype)
        rounded = (addend.to(tl.float32) + post.to(tl.float32)).to(dtype)
        tl.store(total + place, rounded, inside)
        value = rounded.to(tl.float32)
    tl.store(normed + place, _clip(value * factor.to(tl.float32), gamma).to(dtype), inside)


@triton.jit
def _clip(value, gamma):
    """``gamma · clamp(value, -1, 1)``; NaN stays NaN, as in PyTorch."""
    return tl.clamp(value, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL) * gamma
