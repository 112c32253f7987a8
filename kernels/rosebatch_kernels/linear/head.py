"""The output projection of few rows in Triton: a weight far larger than the L2 cache, read at memory's pace.

As many programs as multiprocessors take tile after tile of the weight. TMA loads of the next tile overlap with the end
of the last one, so the memory is never idle. These are the persistent kernels of Triton's tutorial 09. The weight's
rows are rows of the matrix instruction, which takes no fewer than 64. The rows of x are its columns, of which it
takes 8.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rosebatch_kernels.common.device import Device, can_describe
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.sizes import Steps, table, value_at
from rosebatch_kernels.common.whole_numbers import cdiv


@dataclass(frozen=True)
class Sizes:
    """Sizes of a program, the measured ones on an H100 80GB HBM3.

    Attributes:
        rows: rows of x in a tile, by rows of x.
        columns, depth: rows and columns of the weight in a tile.
        warps, stages: of a program.
        max_rows: rows of x up to which it beats cuBLAS.
    """

    rows: Steps = ((33, 64), (17, 32), (0, 16))
    columns: int = 128
    depth: int = 128
    warps: int = 4
    stages: int = 4
    max_rows: int = 64


SIZES = table(Sizes())


def can_stream_head(x: Tensor, weight: Tensor, *, sizes: Sizes) -> bool:
    """Whether ``logits`` takes these arguments of 16 bits. It is faster than cuBLAS where it does."""
    aligned = can_describe(weight.shape[1], weight.dtype) and can_describe(len(weight), weight.dtype)
    return aligned and len(x) <= sizes.max_rows and x.is_contiguous()


def logits(x: Tensor, weight: Tensor, *, sizes: Sizes, device: Device) -> Tensor:
    """``x @ weightᵀ``.

    Args:
        x: ``[T, in]`` in a 16-bit type, contiguous; T is at most 64.
        weight: ``[V, in]`` in x's dtype, contiguous; ``in`` and V are multiples of 8.

    Returns:
        ``[T, V]`` in x's dtype.
    """
    (rows, depth), size = x.shape, len(weight)
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    tile_rows = value_at(sizes.rows, rows)
    assert rows <= tile_rows, "a tile holds all rows of x"
    tiles = cdiv(size, sizes.columns)
    programs = device.processors
    _logits[(min(programs, tiles),)](
        x=TensorDescriptor.from_tensor(x, [tile_rows, sizes.depth]),
        weight=TensorDescriptor.from_tensor(weight, [sizes.columns, sizes.depth]),
        out=TensorDescriptor.from_tensor(out, [tile_rows, sizes.columns]),
        size=size,
        K=depth,
        ROWS=tile_rows,
        COLUMNS=sizes.columns,
        DEPTH=sizes.depth,
        PROGRAMS=programs,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
        **launch_options(device),
    )
    return out


@triton.jit
def _logits(
    x,
    weight,
    out,
    size,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    # Flat: the compiler makes one loop of both, and its loads run ahead over the end of a tile.
    for tile in tl.range(tl.program_id(0), tl.cdiv(size, COLUMNS), PROGRAMS, flatten=True):
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
        for k in range(0, K, DEPTH):
            acc = tl.dot(weight.load([tile * COLUMNS, k]), x.load([0, k]).T, acc)
        out.store([0, tile * COLUMNS], acc.T.to(out.dtype))
