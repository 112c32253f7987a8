"""Triton kernels of the MLP epilogues: each element read once, computed in fp32, written once (source: article S0)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.activations import GATES, activate, logistic
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.sizes import table
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2


@dataclass(frozen=True)
class Sizes:
    """Sizes of a program, the measured ones on an H100 80GB HBM3.

    Attributes:
        columns: of a tile: 16 bytes for each thread in 16-bit types.
        warps: of a program.
        few_tokens: above this many tokens a program takes several rows: full bandwidth needs more loads in flight.
        many_rows: rows that it takes then.
    """

    columns: int = 1024
    warps: int = 4
    few_tokens: int = 1024
    many_rows: int = 4


SIZES = table(Sizes())


def bias_gelu_erf_(x: Tensor, bias: Tensor | None = None, *, sizes: Sizes, device: Device) -> Tensor:
    """``gelu(x + bias)`` written over ``x [T, I]``, rows at any stride, which is returned; ``bias [I]``."""
    return _launch_activation(x, bias, "gelu_erf", sizes=sizes, device=device)


def bias_gelu_tanh_(x: Tensor, bias: Tensor | None = None, *, sizes: Sizes, device: Device) -> Tensor:
    """``gelu_tanh(x + bias)`` written over ``x [T, I]``, rows at any stride, which is returned; ``bias [I]``."""
    return _launch_activation(x, bias, "gelu_tanh", sizes=sizes, device=device)


def bias_relu_(x: Tensor, bias: Tensor | None = None, *, sizes: Sizes, device: Device) -> Tensor:
    """``relu(x + bias)`` written over ``x [T, I]``, rows at any stride, which is returned; ``bias [I]``."""
    return _launch_activation(x, bias, "relu", sizes=sizes, device=device)


def bias_residual_(residual: Tensor, y: Tensor, bias: Tensor, *, sizes: Sizes, device: Device) -> Tensor:
    """``residual += y + bias`` in place, and ``residual`` returned: ``[T, H]``, ``[T, H]`` and ``[H]``."""
    assert residual.stride(-1) == y.stride(-1) == 1, "the last axis is contiguous"
    tokens, size = residual.shape
    grid, tile = _tiles(tokens, size, sizes=sizes, device=device)
    _bias_residual[grid](
        residual=residual,
        y=y,
        bias=bias,
        tokens=tokens,
        size=size,
        residual_stride=residual.stride(0),
        y_stride=y.stride(0),
        **tile,
    )
    return residual


def silu_mul(gate_up: Tensor, *, sizes: Sizes, device: Device) -> Tensor:
    """``silu(gate) * up`` for ``gate_up [T, 2·I]``, gate first, rows at any stride: ``[T, I]``."""
    return _launch_gated(gate_up, "silu_mul", sizes=sizes, device=device)


def relu_mul(gate_up: Tensor, *, sizes: Sizes, device: Device) -> Tensor:
    """``relu(gate) * up`` for ``gate_up [T, 2·I]``, gate first, rows at any stride: ``[T, I]``."""
    return _launch_gated(gate_up, "relu_mul", sizes=sizes, device=device)


def gelu_tanh_mul(gate_up: Tensor, *, sizes: Sizes, device: Device) -> Tensor:
    """``gelu_tanh(gate) * up`` for ``gate_up [T, 2·I]``, gate first, rows at any stride: ``[T, I]``."""
    return _launch_gated(gate_up, "gelu_tanh_mul", sizes=sizes, device=device)


def gelu_erf_mul(gate_up: Tensor, *, sizes: Sizes, device: Device) -> Tensor:
    """``gelu(gate) * up`` for ``gate_up [T, 2·I]``, gate first, rows at any stride: ``[T, I]``."""
    return _launch_gated(gate_up, "gelu_erf_mul", sizes=sizes, device=device)


def sigmoid_mul(x: Tensor, gate: Tensor, *, sizes: Sizes, device: Device) -> Tensor:
    """``x · sigmoid(gate)`` of ``[T, I]`` each, rows at any stride, rounded once; a gate may be ``[T, 1]``."""
    assert x.stride(-1) == gate.stride(-1) == 1, "the last axis is contiguous"
    tokens, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    grid, tile = _tiles(tokens, size, sizes=sizes, device=device)
    _sigmoid_mul[grid](
        x=x,
        gate=gate,
        out=out,
        tokens=tokens,
        size=size,
        x_stride=x.stride(0),
        gate_stride=gate.stride(0),
        WIDE=gate.shape[1] > 1,
        **tile,
    )
    return out


def _launch_activation(x: Tensor, bias: Tensor | None, name: str, *, sizes: Sizes, device: Device) -> Tensor:
    assert x.stride(-1) == 1, "the last axis is contiguous"
    tokens, size = x.shape
    grid, tile = _tiles(tokens, size, sizes=sizes, device=device)
    _activation[grid](x=x, bias=bias, tokens=tokens, size=size, stride=x.stride(0), NAME=name, **tile)
    return x


def _launch_gated(gate_up: Tensor, name: str, *, sizes: Sizes, device: Device) -> Tensor:
    assert gate_up.stride(-1) == 1, "the last axis is contiguous"
    tokens, size = len(gate_up), gate_up.shape[-1] // 2
    out = gate_up.new_empty(tokens, size)
    grid, tile = _tiles(tokens, size, sizes=sizes, device=device)
    _activation_mul[grid](
        gate_up=gate_up, out=out, tokens=tokens, size=size, stride=gate_up.stride(0), NAME=GATES[name], **tile
    )
    return out


def _tiles(tokens: int, size: int, *, sizes: Sizes, device: Device) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid, and the tile of a program."""
    columns = min(sizes.columns, next_power_of_2(size))
    rows = sizes.columns // columns * (sizes.many_rows if tokens > sizes.few_tokens else 1)
    grid = cdiv(tokens, rows), cdiv(size, columns)
    return grid, {"ROWS": rows, "COLUMNS": columns, "num_warps": sizes.warps, **launch_options(device)}


@triton.jit(do_not_specialize=["tokens"])
def _activation(
    x, bias, tokens, size, stride, NAME: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        wait()
    row, column, inside = _place(tokens, size, ROWS, COLUMNS)
    place = x + row * stride + column
    value = tl.load(place, inside).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, column < size).to(tl.float32)
    out = activate(value, NAME)
    tl.store(place, out.to(x.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens"])
def _bias_residual(
    residual,
    y,
    bias,
    tokens,
    size,
    residual_stride,
    y_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row, column, inside = _place(tokens, size, ROWS, COLUMNS)
    place = residual + row * residual_stride + column
    before = tl.load(place, inside).to(tl.float32)
    addend = tl.load(y + row * y_stride + column, inside).to(tl.float32)
    addend += tl.load(bias + column, column < size).to(tl.float32)
    tl.store(place, (before + addend).to(residual.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens"])
def _sigmoid_mul(
    x,
    gate,
    out,
    tokens,
    size,
    x_stride,
    gate_stride,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row, column, inside = _place(tokens, size, ROWS, COLUMNS)
    value = tl.load(x + row * x_stride + column, inside).to(tl.float32)
    opening = tl.load(gate + row * gate_stride + (column if WIDE else column * 0), inside).to(tl.float32)
    tl.store(out + row * size + column, (value * logistic(opening)).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["tokens"])
def _activation_mul(
    gate_up,
    out,
    tokens,
    size,
    stride,
    NAME: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row, column, inside = _place(tokens, size, ROWS, COLUMNS)
    place = gate_up + row * stride + column
    gate = tl.load(place, inside).to(tl.float32)
    up = tl.load(place + size, inside).to(tl.float32)
    dtype = out.dtype.element_ty
    # Rounded between the two operations, as in PyTorch.
    factor = activate(gate, NAME).to(dtype).to(tl.float32)
    tl.store(out + row * size + column, (factor * up).to(dtype), inside)


@triton.jit
def _place(tokens, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows in int64 and columns of this program's tile, and the mask of its existing elements."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row, column, (row < tokens) & (column < size)
