"""Matrix products of a few rows in Triton, at the speed of reading the weight, and the activation after them.

A decode step multiplies each weight with few rows: the multiprocessors could hold them many times over. Reading the
weight then decides the time, if nothing else adds to it. Every program reads a few of the weight's rows, or a part of
them, once. It requests them while its predecessor is still running.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.activations import GATES, activate
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.common.launch import LINE, launch_options, lines_of, prefetch, wait
from rosebatch_kernels.common.rounded import rounded
from rosebatch_kernels.common.sizes import value_at
from rosebatch_kernels.common.whole_numbers import cdiv
from rosebatch_kernels.linear.sizes import Program, Sizes, program_of_parts

# Elements of 16 bits that fill a cache line.
_LINE = tl.constexpr(LINE // 2)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """``activation(x @ weightᵀ + bias)``.

    Args:
        x: ``[T, in]``, rows at any stride, T at most 64, a 16-bit type.
        weight: ``[out, in]``, contiguous.
        bias: ``[out]``.
        activation: ``gelu_tanh``, ``gelu_erf`` or ``relu``; or one of ``GATES``, such as ``silu_mul``, where the first
            half of the columns is the gate of the second.

    Returns:
        ``[T, out]``, or half as many columns with a gate.
    """
    gated = activation in GATES
    columns = len(weight) // 2 if gated else len(weight)
    out = torch.empty(len(x), columns, dtype=x.dtype, device=x.device)
    program = value_at(sizes.gated if gated else sizes.whole, len(x))
    _launch(x, weight, bias, None, out, columns, activation, program, device)
    return out


def add_(x: Tensor, weight: Tensor, onto: Tensor, *, sizes: Sizes, device: Device) -> Tensor:
    """``onto + x @ weightᵀ`` in ``onto [T, out]``, contiguous and of x's dtype; the product is rounded before the sum.

    Arguments as of ``linear``.
    """
    _launch(x, weight, None, onto, onto, len(weight), None, value_at(sizes.onto, len(x)), device)
    return onto


def parts(x: Tensor, weight: Tensor, *, sizes: Sizes, device: Device) -> Tensor:
    """``x @ weightᵀ`` in parts ``[S, T, out]`` fp32, which the reader adds up; arguments as of ``linear``.

    T may exceed 64. A weight with few rows would occupy few multiprocessors: each part multiplies some of its columns.
    """
    splits, program = program_of_parts(len(x), *weight.shape, sizes=sizes)
    out = torch.empty(splits, len(x), len(weight), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, None, out, len(weight), None, program, device)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    onto: Tensor | None,
    out: Tensor,
    columns: int,
    activation: str | None,
    program: Program,
    device: Device,
) -> None:
    rows, depth = x.shape
    splits = len(out) if out.ndim == 3 else 1
    gate = None if activation is None else GATES.get(activation)
    share = cdiv(cdiv(depth, splits), program.depth) * program.depth
    _product[(cdiv(columns, program.columns), splits, cdiv(rows, program.rows))](
        x=x,
        weight=weight,
        bias=bias,
        onto=onto,
        out=out,
        rows=rows,
        x_stride=x.stride(0),
        size=columns,
        K=depth,
        SHARE=share,
        ACTIVATION=gate or activation,
        GATED=gate is not None,
        PARTS=out.ndim == 3,
        LINES=lines_of(2 * share),
        ROWS=program.rows,
        TILE=program.columns,
        DEPTH=program.depth,
        STAGES=program.stages,
        num_warps=program.warps,
        maxnreg=program.registers,
        **launch_options(device),
    )


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    weight,
    bias,
    onto,
    out,
    rows,
    x_stride,
    size,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    split = tl.program_id(1)
    first_row = tl.program_id(2) * ROWS
    begin = split * SHARE
    # Past the end, read the last row again: its results are not stored.
    weight_rows = weight + _rows_of(n, size, TILE, GATED).to(tl.int64)[:, None] * K
    if PDL:
        prefetch_rows(weight_rows, begin, K, LINES)
        wait()
    m = first_row + tl.arange(0, ROWS)
    present = m < rows
    x_rows = x + m[:, None] * x_stride
    acc = multiply(x_rows, present, weight_rows, begin, K, SHARE, ROWS, 2 * TILE if GATED else TILE, DEPTH, STAGES)
    wanted = present[:, None] & (n < size)[None, :]
    if PARTS:
        place = out + (split * rows + m[:, None]).to(tl.int64) * size + n[None, :]
        tl.store(place, acc, mask=wanted)
    else:
        dtype = out.dtype.element_ty
        if GATED:
            gate, up = tl.split(tl.reshape(acc, (ROWS, TILE, 2)))
            # Rounded where separate kernels would round.
            gate = rounded(_plus(gate, bias, n, size), dtype)
            up = rounded(_plus(up, None if bias is None else bias + size, n, size), dtype)
            value = activate(gate, ACTIVATION).to(dtype).to(tl.float32) * up
        else:
            value = _plus(acc, bias, n, size)
            if ACTIVATION is not None:
                value = activate(value, ACTIVATION)
        place = m[:, None].to(tl.int64) * size + n[None, :]
        if onto is not None:
            # Rounded twice, as cuBLAS does.
            value = rounded(value, dtype) + tl.load(onto + place, mask=wanted, other=0.0).to(tl.float32)
        tl.store(out + place, value.to(dtype), mask=wanted)


@triton.jit
def _rows_of(n, size, TILE: tl.constexpr, GATED: tl.constexpr):
    """Rows of the weight that a program reads; with GATED those of the gate, each beside its own of up.

    One product has both, and a thread holds the two that it multiplies.
    """
    row = tl.minimum(n, size - 1)
    return tl.reshape(tl.join(row, row + size), (2 * TILE,)) if GATED else row


@triton.jit
def prefetch_rows(weight_rows, begin, K: tl.constexpr, LINES: tl.constexpr):
    """Start to bring ``LINES`` cache lines of each of the weight's rows into the L2 cache."""
    line = tl.minimum(begin + tl.arange(0, LINES) * _LINE, K - 1)[None, :]
    prefetch(weight_rows + line)


@triton.jit
def multiply(
    x_rows,
    present,
    weight_rows,
    begin,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Products ``[ROWS, WIDTH]`` of ``SHARE`` columns from ``begin`` on."""
    k = tl.arange(0, DEPTH)[None, :]
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + SHARE, K), DEPTH, num_stages=STAGES):
        inside = None if K % DEPTH == 0 else start + k < K
        a = _load(x_rows + start + k, present[:, None] if inside is None else present[:, None] & inside)
        acc = dot(a, tl.trans(_load(weight_rows + start + k, inside)), acc)
    return acc


@triton.jit
def _load(place, mask):
    """Zeros outside of the mask; None loads everything."""
    return tl.load(place) if mask is None else tl.load(place, mask=mask, other=0.0)


@triton.jit
def _plus(value, bias, n, size):
    if bias is not None:
        value += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[None, :]
    return value
