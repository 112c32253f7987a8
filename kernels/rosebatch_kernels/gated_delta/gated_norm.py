"""The gated RMSNorm after the rule, in Triton: both inputs are read once."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.activations import activate, logistic
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2

# Elements of a program: heads share one.
_TILE = 1024


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu", *, device: Device
) -> Tensor:
    """See ``reference.gated_norm``. Tokens of both inputs may lie at any stride."""
    tokens, heads, size = x.shape
    assert x.stride()[1:] == gate.stride()[1:] == (size, 1), "the heads of a token are contiguous"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = next_power_of_2(size)
    rows = max(1, _TILE // block)
    _gated_norm[(cdiv(tokens * heads, rows),)](
        out=out,
        x=x,
        gate=gate,
        weight=weight,
        number=tokens * heads,
        x_stride=x.stride(0),
        gate_stride=gate.stride(0),
        eps=eps,
        HEADS=heads,
        SIZE=size,
        BLOCK=block,
        ROWS=rows,
        SIGMOID=activation == "sigmoid",
        **launch_options(device),
    )
    return out


@triton.jit(do_not_specialize=["number"])
def _gated_norm(
    out,
    x,
    gate,
    weight,
    number,
    x_stride,
    gate_stride,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    inside = (row < number) & (column < SIZE)
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    factor = tl.load(weight + column, column < SIZE, other=0.0)
    if PDL:
        wait()
    value = tl.load(x + token * x_stride + head * SIZE + column, inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + token * gate_stride + head * SIZE + column, inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    scale = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) * (1.0 / SIZE) + eps)
    if SIGMOID:
        normed = value * scale * factor.to(tl.float32)
    else:
        normed = ((value * scale).to(dtype).to(tl.float32) * factor.to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(out + row.to(tl.int64) * SIZE + column, (normed * _opened(opening, SIGMOID)).to(dtype), inside)


@triton.jit
def _opened(gate, SIGMOID: tl.constexpr):
    return logistic(gate) if SIGMOID else activate(gate, "silu")
