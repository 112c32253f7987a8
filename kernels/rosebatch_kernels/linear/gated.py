"""A gated MLP's first product for many rows in Triton, and what follows it: ``activation(x @ gateᵀ) · (x @ upᵀ)``.

A program multiplies the rows with a tile of the gate and with the same tile of up. So neither half goes to memory.
There are as many programs as multiprocessors. Each takes tile after tile: the loads of the next one overlap with the
end of the last one (persistent kernels, as in Triton's tutorial 09). TMA loads the tiles.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rosebatch_kernels.common.activations import GATES, activate
from rosebatch_kernels.common.device import Device, can_describe
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.rounded import rounded
from rosebatch_kernels.common.sizes import table
from rosebatch_kernels.common.whole_numbers import cdiv


@dataclass(frozen=True)
class Sizes:
    """Sizes of a program, the measured ones on an H100 80GB HBM3.

    Attributes:
        rows, columns, depth: of a tile; it has so many columns of the gate and as many of up.
        group: tiles of rows that use a tile of the weight one after the other.
        warps, stages: of a program.
        min_rows: rows of x from which it beats cuBLAS and a kernel for the activation. Fewer leave too many programs
            without a tile at the end.
        max_elements: elements of the weight up to which it does. More keep the GPU at its power limit, where cuBLAS
            does more with its clock.
    """

    rows: int = 128
    columns: int = 128
    depth: int = 64
    group: int = 8
    warps: int = 8
    stages: int = 4
    min_rows: int = 1792
    max_elements: int = 2**23


SIZES = table(Sizes())


def can_gate(x: Tensor, weight: Tensor, activation: str, *, sizes: Sizes) -> bool:
    """Whether ``gated`` takes these arguments, and is faster than a product and a kernel for the activation."""
    aligned = can_describe(weight.shape[1], weight.dtype) and can_describe(len(weight) // 2, weight.dtype)
    faster = len(x) >= sizes.min_rows and weight.numel() <= sizes.max_elements
    return activation in GATES and aligned and faster and x.is_contiguous()


def gated(x: Tensor, weight: Tensor, activation: str, *, sizes: Sizes, device: Device) -> Tensor:
    """``activation`` of the gate times up, each rounded where separate kernels would round.

    Args:
        x: ``[T, in]`` in a 16-bit type, contiguous.
        weight: ``[2·I, in]`` in x's dtype, contiguous, the gate's rows first; ``in`` and I are multiples of 8.
        activation: a name in ``common.activations.GATES``.

    Returns:
        ``[T, I]`` in x's dtype.
    """
    assert x.is_contiguous() and weight.is_contiguous(), "a descriptor needs contiguous tensors"
    (rows, depth), size = x.shape, len(weight) // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    tiles = cdiv(rows, sizes.rows) * cdiv(size, sizes.columns)
    programs = device.processors
    _gated_product[(min(programs, tiles),)](
        x=TensorDescriptor.from_tensor(x, [sizes.rows, sizes.depth]),
        weight=TensorDescriptor.from_tensor(weight.view(2, size, depth), [2, sizes.columns, sizes.depth]),
        out=TensorDescriptor.from_tensor(out, [sizes.rows, sizes.columns // 2]),
        rows=rows,
        size=size,
        K=depth,
        GATE=GATES[activation],
        ROWS=sizes.rows,
        COLUMNS=sizes.columns,
        DEPTH=sizes.depth,
        GROUP=sizes.group,
        PROGRAMS=programs,
        num_warps=sizes.warps,
        num_stages=sizes.stages,
        **launch_options(device),
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _gated_product(
    x,
    weight,
    out,
    rows,
    size,
    K: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(size, COLUMNS)
    # Flat: the compiler makes one loop of both, and its loads run ahead over the end of a tile.
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        # GROUP tiles of rows share a tile of the weight while it is in the L2 cache.
        group = tile // (GROUP * column_tiles)
        height = tl.minimum(row_tiles - group * GROUP, GROUP)
        place = tile % (GROUP * column_tiles)
        m = (group * GROUP + place % height) * ROWS
        n = place // height * COLUMNS
        acc = tl.zeros([ROWS, 2 * COLUMNS], tl.float32)
        for k in range(0, K, DEPTH):
            both = weight.load([0, n, k]).reshape(2 * COLUMNS, DEPTH)
            acc = tl.dot(x.load([m, k]), both.T, acc)
        gate, up = _halves(acc, ROWS, COLUMNS)
        # Half a tile at a time takes half of the registers.
        gate_0, gate_1 = _halves(gate, ROWS, COLUMNS // 2)
        up_0, up_1 = _halves(up, ROWS, COLUMNS // 2)
        out.store([m, n], _activated(gate_0, up_0, GATE, out.dtype))
        out.store([m, n + COLUMNS // 2], _activated(gate_1, up_1, GATE, out.dtype))


@triton.jit
def _halves(tile, ROWS: tl.constexpr, HALF: tl.constexpr):
    """The left and the right half of ``[ROWS, 2 · HALF]``."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, HALF)), (0, 2, 1)))


@triton.jit
def _activated(gate, up, GATE: tl.constexpr, DTYPE: tl.constexpr):
    factor = activate(rounded(gate, DTYPE), GATE).to(DTYPE).to(tl.float32)
    return (factor * rounded(up, DTYPE)).to(DTYPE)
