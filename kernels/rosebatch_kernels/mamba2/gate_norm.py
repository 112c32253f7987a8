"""The gate after the state space and the RMSNorm of groups of channels, in Triton: both inputs are read once."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.activations import activate
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.whole_numbers import next_power_of_2


def gate_norm(x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float, *, device: Device) -> Tensor:
    """``rms_norm(x · silu(gate)) · weight`` of ``x, gate [T, C]`` with ``weight [C]``; rounded once, same dtype out.

    The norm is over each of the ``groups`` of neighbouring channels. Without a weight there is none. Rows may lie at
    any stride.
    """
    tokens, channels = x.shape
    assert x.stride(1) == gate.stride(1) == 1, "the channels of a token are contiguous"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    size = channels // groups
    block = next_power_of_2(size)
    _gate_norm[(tokens, groups)](
        out=out,
        x=x,
        gate=gate,
        weight=weight,
        x_stride=x.stride(0),
        gate_stride=gate.stride(0),
        eps=eps,
        SIZE=size,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **launch_options(device),
    )
    return out


@triton.jit
def _gate_norm(
    out,
    x,
    gate,
    weight,
    x_stride,
    gate_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < SIZE
    column = tl.program_id(1) * SIZE + place
    if PDL:
        wait()
    opening = tl.load(gate + token * gate_stride + column, inside, other=0.0).to(tl.float32)
    value = tl.load(x + token * x_stride + column, inside, other=0.0).to(tl.float32) * activate(opening, "silu")
    if weight is not None:
        scale = tl.rsqrt(tl.sum(value * value, 0) * (1.0 / SIZE) + eps)
        value = value * scale * tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(out + token * (tl.num_programs(1) * SIZE) + column, value.to(out.dtype.element_ty), inside)
