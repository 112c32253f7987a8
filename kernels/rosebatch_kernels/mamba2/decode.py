"""A decode step of Mamba2 in Triton: convolution and state space in one kernel. Each state is read and written once.

One program serves some rows of one head's S of one sequence: the rows never meet. Several programs compute the same
convolution of B and C, which is small next to S; one of them keeps its new input.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.activations import softplus
from rosebatch_kernels.common.causal_conv import convolve_token
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.sizes import table
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2
from rosebatch_kernels.mamba2.layout import MambaState, MambaWeights


@dataclass(frozen=True)
class Sizes:
    """Sizes of a program: numbers of S, and warps."""

    numbers: int = 4096
    warps: int = 4


SIZES = table(Sizes())


def decode(
    xbc: Tensor,
    dt: Tensor,
    state: MambaState,
    slots: Tensor,
    positions: Tensor,
    limits: Tensor,
    weights: MambaWeights,
    *,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """One new token for each sequence.

    The convolution's SiLU is rounded to the input's dtype; the rest is computed in fp32. A token's step is
    ``softplus(dt + dt_bias)``. Then ``S = exp(-exp(log_rate) · step) · S + (step · x) ⊗ B``, and ``S C + skip · x`` is
    the result. Each pair of B and C serves ``heads / groups`` successive heads.

    Args:
        xbc: ``[B, C]``, x of all heads, then B and C of all groups, as projected, rows at any stride.
        dt: ``[B, heads]``, rows at any stride.
        state: updated in place; taken as zero where the position is 0. S is read while the predecessor still runs (see
            ``rosebatch_kernels.common.launch``), which must not write it.
        slots: ``[B]`` int32, each row's place in the state.
        positions: ``[B]`` int32 at any stride, of the new token.
        limits: ``[B]`` int32 at the same stride; a row with ``position >= limit`` is skipped: its state stays, its
            output is undefined.
        weights: of the layer.

    Returns:
        ``[B, heads · head_dim]``.
    """
    heads, head_dim, groups, size = state.heads
    out = torch.empty(len(xbc), heads * head_dim, dtype=xbc.dtype, device=xbc.device)
    width = next_power_of_2(size)
    rows = min(max(sizes.numbers // width, 1), next_power_of_2(head_dim))
    _mamba_decode[(cdiv(head_dim, rows), heads, len(xbc))](
        out=out,
        xbc=xbc,
        dt=dt,
        inputs=state.inputs,
        memory=state.memory,
        slots=slots,
        positions=positions,
        limits=limits,
        conv=weights.conv,
        conv_bias=weights.conv_bias,
        log_rate=weights.log_rate,
        dt_bias=weights.dt_bias,
        skip=weights.skip,
        xbc_stride=xbc.stride(0),
        dt_stride=dt.stride(0),
        slots_stride=slots.stride(0),
        positions_stride=positions.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        GROUPS=groups,
        SIZE=size,
        WIDTH=width,
        ROWS=rows,
        TAPS=state.inputs.shape[1],
        num_warps=sizes.warps,
        **launch_options(device),
    )
    return out


@triton.jit
def _mamba_decode(
    out,
    xbc,
    dt,
    inputs,
    memory,
    slots,
    positions,
    limits,
    conv,
    conv_bias,
    log_rate,
    dt_bias,
    skip,
    xbc_stride,
    dt_stride,
    slots_stride,
    positions_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    position = tl.load(positions + row * positions_stride)
    live = position < tl.load(limits + row * positions_stride)
    slot = tl.load(slots + row * slots_stride).to(tl.int64)
    p = part * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, WIDTH)
    cells = memory + ((slot * HEADS + head) * HEAD_DIM + p[:, None]) * SIZE + n[None, :]
    inside = (p < HEAD_DIM)[:, None] & (n < SIZE)[None, :]
    # The last step wrote S, long before this kernel's predecessor: its loads overlap with the predecessor's end.
    known = tl.where(live & (position > 0), SIZE, 0)
    past = tl.load(cells, inside & (n < known)[None, :], other=0.0)
    if PDL:
        wait()
    if live:
        group = head // (HEADS // GROUPS)
        first_of_group = (part == 0) & (head % (HEADS // GROUPS) == 0)
        channels: tl.constexpr = HEADS * HEAD_DIM + 2 * GROUPS * SIZE
        of_row = xbc + row * xbc_stride
        kept = inputs + slot * (TAPS * channels)
        x_channel = head * HEAD_DIM + p
        b_channel = HEADS * HEAD_DIM + group * SIZE + n
        c_channel = b_channel + GROUPS * SIZE
        keep = tl.where(first_of_group, SIZE, 0)
        x = convolve_token(of_row, kept, x_channel, p, HEAD_DIM, HEAD_DIM, position, conv, conv_bias, channels, TAPS)
        b = convolve_token(of_row, kept, b_channel, n, SIZE, keep, position, conv, conv_bias, channels, TAPS)
        c = convolve_token(of_row, kept, c_channel, n, SIZE, keep, position, conv, conv_bias, channels, TAPS)
        step = softplus(tl.load(dt + row * dt_stride + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32))
        decay = tl.exp(-tl.exp(tl.load(log_rate + head).to(tl.float32)) * step)
        new = decay * past + (step * x)[:, None] * b[None, :]
        result = tl.sum(new * c[None, :], 1) + tl.load(skip + head).to(tl.float32) * x
        tl.store(cells, new, inside)
        tl.store(out + row * (HEADS * HEAD_DIM) + x_channel, result.to(out.dtype.element_ty), p < HEAD_DIM)
