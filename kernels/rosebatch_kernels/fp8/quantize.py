"""Rows to fp8 in Triton, and the gate of an MLP whose result is multiplied in fp8: each element is read once."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.activations import GATES, activate
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.sizes import Steps, table, value_at
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2
from rosebatch_kernels.fp8.carried import Quantized, empty_form, leave, left
from rosebatch_kernels.fp8.rounding import store_quantized


@dataclass(frozen=True)
class Sizes:
    """Sizes of a program, measured on an H200 with gates of 14,336 columns.

    Attributes:
        tile: elements; narrower rows share a program.
        columns: of a tile where groups of columns have scales of their own; else it has whole rows.
        warps: of a program, by columns of the tile.
    """

    tile: int = 1024
    columns: int = 1024
    warps: Steps = ((16384, 32), (4096, 8), (0, 4))


SIZES = table(Sizes())


def quantized(x: Tensor, group: int, *, sizes: Sizes, device: Device) -> Quantized:
    """The fp8 form of x ``[T, in]``, rows at any stride: what its producer left, or else computed.

    Args:
        x: in a 16-bit type.
        group: see ``reference.quantize``.
    """
    return left(x, group) or quantize(x, group, sizes=sizes, device=device)


def quantize(x: Tensor, group: int = 0, chunk: int = 0, *, sizes: Sizes, device: Device) -> Quantized:
    """See ``reference.quantize``; rows of x at any stride.

    Args:
        x: in a 16-bit type.
        group: of ``reference.quantize``.
        chunk: 0, or columns that are stored as the first of one half, the first of the other, the second, ...; zeros
            fill up the last ones. It is a power of two, and no less than ``group``.
    """
    form = empty_form(x, group, chunk)
    _launch(x, None, form, x.shape[1], chunk, sizes, device)
    return form


def gated(gate_up: Tensor, kind: str, group: int = 0, *, sizes: Sizes, device: Device) -> Tensor:
    """The gate ``kind`` of ``gate_up [T, 2·I]``, rows at any stride: ``[T, I]``, whose fp8 form alone is computed."""
    # Nothing but the form is read: 16-bit values would be a third of the bytes that are written and read.
    out = gate_up.new_empty(1, 1).expand(len(gate_up), gate_up.shape[1] // 2)
    form = empty_form(out, group)
    _launch(gate_up, GATES[kind], form, out.shape[1], 0, sizes, device)
    return leave(out, form)


def _launch(x: Tensor, gate: str | None, form: Quantized, size: int, chunk: int, sizes: Sizes, device: Device) -> None:
    assert x.stride(-1) == 1, "the last axis is contiguous"
    rows, block = len(x), next_power_of_2(max(size, chunk))
    columns = min(block, sizes.columns) if form.group else block
    tile_rows = max(1, sizes.tile // columns)
    _quantize[(cdiv(rows, tile_rows), cdiv(size, columns))](
        x=x,
        numbers=form.numbers,
        scales=form.scales,
        rows=rows,
        stride=x.stride(0),
        SIZE=size,
        GATE=gate,
        GROUP=min(form.group, columns),
        ROWS=tile_rows,
        COLUMNS=columns,
        CHUNK=chunk,
        num_warps=value_at(sizes.warps, columns),
        **launch_options(device),
    )


@triton.jit(do_not_specialize=["rows"])
def _quantize(
    x,
    numbers,
    scales,
    rows,
    stride,
    SIZE: tl.constexpr,
    GATE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    first = tl.program_id(1) * COLUMNS
    column = first + tl.broadcast_to(tl.arange(0, COLUMNS)[None, :], (ROWS, COLUMNS))
    inside = (row < rows) & (column < SIZE)
    place = x + row * stride + column
    value = tl.load(place, inside, other=0.0).to(tl.float32)
    if GATE is not None:
        up = tl.load(place + SIZE, inside, other=0.0).to(tl.float32)
        dtype = x.dtype.element_ty
        # Rounded where the gate in 16 bits is.
        value = (activate(value, GATE).to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)
    store_quantized(value, numbers, scales, row, column, rows, first, SIZE, GROUP, ROWS, COLUMNS, CHUNK)
