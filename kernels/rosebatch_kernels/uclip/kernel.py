"""Triton kernels of UClipNorm: no element needs another, so a tile is any part of a row, and memory is read once.

The sum goes to a new tensor, as in ``rosebatch_kernels.norm.kernel``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.clip import clip
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.head_norms import Gain
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.rows import rows_of
from rosebatch_kernels.common.sizes import table
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2


@dataclass(frozen=True)
class Sizes:
    """Sizes of a program, the measured ones on an H100 80GB HBM3.

    Attributes:
        warps: of a program.
        few: elements of a program in a small call. 32 rows of 1024 channels then make 128 programs. A thread has
            registers to load its two elements of eight parts at once.
        many: elements of a program in a large call: a thread loads 16 bytes of each of two rows.
        columns: most columns of a program: 16 bytes for each thread in 16-bit types.
        one_wave: elements of a small call at most: programs of ``few`` serve them in one wave of 132 multiprocessors.
    """

    warps: int = 4
    few: int = 256
    many: int = 2048
    columns: int = 1024
    one_wave: int = 2**19


SIZES = table(Sizes())


def uclip_norm(x: Tensor, alpha: Tensor, gamma: Gain, *, sizes: Sizes, device: Device) -> Tensor:
    """UClipNorm of ``x [T, H]`` or ``[T, heads, H]``, rows and heads at any stride; same dtype out.

    ``alpha`` is ``[H]``, ``gamma`` a number or ``[H]`` fp32.
    """
    normed, _ = _launch(x, None, None, 0.0, alpha, gamma, sizes=sizes, device=device)
    return normed


def add_uclip_norm(
    y: Tensor,
    residual: Tensor,
    post_alpha: Tensor,
    post_gamma: Gain,
    alpha: Tensor,
    gamma: Gain,
    *,
    sizes: Sizes,
    device: Device,
) -> tuple[Tensor, Tensor]:
    """``residual + UClip_post(y)``, and its UClipNorm: ``(normed [T, H], residual [T, H])``, both new.

    ``y`` is ``[T, H]``; or ``[S, T, H]`` fp32, parts to be added up first (see ``rosebatch_kernels.linear.kernel``).
    The clipped value is rounded to the residual's dtype before the addition, and so is the sum.
    """
    return _launch(y, residual, post_alpha, post_gamma, alpha, gamma, sizes=sizes, device=device)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    post_alpha: Tensor | None,
    post_gamma: Gain,
    alpha: Tensor,
    gamma: Gain,
    *,
    sizes: Sizes,
    device: Device,
) -> tuple[Tensor, Tensor]:
    """Without a residual the second result is ``x``."""
    rows, size = rows_of(x, residual), x.shape[-1]
    like = x if residual is None else residual
    normed = torch.empty_like(like, memory_format=torch.contiguous_format)
    total = x if residual is None else torch.empty_like(normed)
    tile = sizes.few if rows.number * size <= sizes.one_wave else sizes.many
    columns = min(tile, sizes.columns, next_power_of_2(size))
    tile_rows = tile // columns
    _uclip[(cdiv(rows.number, tile_rows), cdiv(size, columns))](
        x=x,
        residual=residual,
        post_alpha=post_alpha,
        alpha=alpha,
        normed=normed,
        total=total,
        rows=rows.number,
        size=size,
        x_stride=rows.stride,
        inner_stride=rows.inner_stride,
        residual_stride=0 if residual is None else residual.stride(0),
        post_gamma=post_gamma,
        gamma=gamma,
        HEADS=rows.heads,
        PARTS=rows.parts,
        POST_GAMMA_EACH=isinstance(post_gamma, Tensor),
        GAMMA_EACH=isinstance(gamma, Tensor),
        TILE_ROWS=tile_rows,
        COLUMNS=columns,
        num_warps=sizes.warps,
        # A product fused with the addition after it would not be rounded before it.
        enable_fp_fusion=False,
        **launch_options(device),
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
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    POST_GAMMA_EACH: tl.constexpr,
    GAMMA_EACH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    # As wide as the tile: weights then load in the layout of the rows, without an exchange between threads.
    column = tl.broadcast_to(column, (TILE_ROWS, COLUMNS))
    exists = column < size
    inside = (row < rows) & exists
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    row = row.to(tl.int64)
    # All loads come before the first use of any, so that they are in flight together; weights before the wait.
    factor = tl.load(alpha + column, exists)
    gain = tl.load(gamma + column, exists) if GAMMA_EACH else gamma
    if residual is not None:
        post_factor = tl.load(post_alpha + column, exists)
        post_gain = tl.load(post_gamma + column, exists) if POST_GAMMA_EACH else post_gamma
    if PDL:
        wait()
    source = x + token * x_stride + head * inner_stride + column
    value = tl.load(source, inside).to(tl.float32)
    if residual is not None:
        addend = tl.load(residual + row * residual_stride + column, inside)
    for _ in tl.static_range(1, PARTS):
        source += inner_stride
        value += tl.load(source, inside)
    dtype = normed.dtype.element_ty
    place = row * size + column
    if residual is not None:
        post = clip(value * post_factor.to(tl.float32), post_gain).to(dtype)
        rounded = (addend.to(tl.float32) + post.to(tl.float32)).to(dtype)
        tl.store(total + place, rounded, inside)
        value = rounded.to(tl.float32)
    tl.store(normed + place, clip(value * factor.to(tl.float32), gain).to(dtype), inside)
