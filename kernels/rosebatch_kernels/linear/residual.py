"""A sub-layer's last product for few rows, added to the residual, and the norm behind it but for its factors.

The product comes in parts, so that a weight with few rows occupies all multiprocessors. The last program of a tile to
finish adds them up. So there is no kernel of the norm that would begin when all are done: what a row needs of the other
tiles is its factor, and that is left to the product behind (see ``rosebatch_kernels.linear.factored``).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.arrivals import arrive
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.linear.factored import Factored
from rosebatch_kernels.linear.kernel import multiply, prefetch_rows
from rosebatch_kernels.linear.tuned import TUNED, lines_of, tile_of_parts

# Columns of the narrowest tile.
_NARROWEST = 32


def make_counters(weight: Tensor) -> Tensor:
    """What programs of a product with ``weight [out, in]`` count their arrivals in: zeros, as each call leaves them."""
    return torch.zeros(triton.cdiv(len(weight), _NARROWEST), dtype=torch.int32, device=weight.device)


def add_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    scale: float,
    counters: Tensor,
) -> tuple[Factored, Tensor]:
    """``residual + scale · (x @ weightᵀ + bias)`` and its RMSNorm without the factors.

    Args:
        x: ``[T, in]``, rows at any stride, T at most 64, bf16.
        weight: ``[out, in]``, contiguous.
        bias: ``[out]``.
        residual: ``[T, out]``, rows at any stride, written by a kernel that is older than the one in front.
        norm_weight: ``[out]``.
        eps: of the norm.
        counters: of ``make_counters``.

    Returns:
        ``(normed, residual [T, out])``, both new.
    """
    rows, depth = x.shape
    size = len(weight)
    splits, tile = tile_of_parts(rows, size, depth)
    tiles = triton.cdiv(size, tile["TILE"])
    assert rows <= tile["ROWS"] and tiles <= len(counters), "one tile of rows"
    share = triton.cdiv(triton.cdiv(depth, splits), tile["DEPTH"]) * tile["DEPTH"]
    total, value = (torch.empty(rows, size, dtype=x.dtype, device=x.device) for _ in range(2))
    squares = torch.empty(tiles, rows, dtype=torch.float32, device=x.device)
    sums = torch.empty(splits, rows, size, dtype=torch.float32, device=x.device)
    _add_product[(tiles, splits)](
        x,
        weight,
        bias,
        residual,
        norm_weight,
        total,
        value,
        squares,
        sums,
        counters,
        rows,
        x.stride(0),
        residual.stride(0),
        size,
        K=depth,
        SHARE=share,
        SCALE=float(scale),
        SPLITS=splits,
        LINES=lines_of(share),
        STAGES=TUNED.stages,
        num_warps=TUNED.warps,
        **tile,
        **launch_options(),
    )
    return Factored(value, squares, eps), total


@triton.jit(do_not_specialize=["rows"])
def _add_product(
    x,
    weight,
    bias,
    residual,
    norm_weight,
    total,
    value,
    squares,
    sums,
    counters,
    rows,
    x_stride,
    residual_stride,
    size,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    SCALE: tl.constexpr,
    SPLITS: tl.constexpr,
    LINES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * TILE + tl.arange(0, TILE)
    inside = n < size
    begin = split * SHARE
    # Past the end, read the last row again: its results are not stored.
    weight_rows = weight + tl.minimum(n, size - 1).to(tl.int64)[:, None] * K
    gain = tl.load(norm_weight + n, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        shift = tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        prefetch_rows(weight_rows, begin, K, LINES)
        wait()
    m = tl.arange(0, ROWS)
    present = m < rows
    wanted = present[:, None] & inside[None, :]
    x_rows = x + m[:, None] * x_stride
    acc, _ = multiply(
        x_rows, present, weight_rows, weight_rows, begin, K, SHARE, ROWS, TILE, DEPTH, STAGES, GATED=False
    )
    place = m[:, None] * size + n[None, :]
    if SPLITS > 1:
        tl.store(sums + split * rows * size + place, acc, mask=wanted)
        if arrive(counters + tile) < SPLITS - 1:
            return
        tl.store(counters + tile, 0)
        # In the order of the splits, whichever came last: the same rows give the same bits.
        acc = tl.zeros([ROWS, TILE], tl.float32)
        for part in tl.static_range(SPLITS):
            acc += tl.load(sums + part * rows * size + place, mask=wanted, other=0.0, cache_modifier=".cg")
    if bias is not None:
        acc += shift[None, :]
    if SCALE != 1.0:
        acc *= SCALE
    dtype = total.dtype.element_ty
    before = tl.load(residual + m[:, None] * residual_stride + n[None, :], mask=wanted, other=0.0).to(tl.float32)
    rounded = (before + acc).to(dtype)
    tl.store(total + place, rounded, mask=wanted)
    kept = tl.where(wanted, rounded.to(tl.float32), 0.0)
    tl.store(value + place, (kept * gain[None, :]).to(dtype), mask=wanted)
    tl.store(squares + tile * rows + m, tl.sum(kept * kept, 1), mask=present)
