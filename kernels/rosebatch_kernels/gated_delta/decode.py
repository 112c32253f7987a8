"""A decode step of the gated delta rule in Triton: convolution and rule in one kernel.

Each state is read and written once.

One program serves some value columns of one head of one sequence: the columns of S never meet. Several programs compute
the same convolution of q and k, which is small next to S; one of them keeps its new input.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.causal_conv import convolve_token
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.sizes import table
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2
from rosebatch_kernels.gated_delta.layout import DeltaState, DeltaWeights
from rosebatch_kernels.gated_delta.parts import channel_log_decay, log_decay, unit_factor, written_share


@dataclass(frozen=True)
class Sizes:
    """Sizes of a program: value columns, and warps."""

    values: int = 32
    warps: int = 2


SIZES = table(Sizes())


def decode(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    state: DeltaState,
    slots: Tensor,
    positions: Tensor,
    limits: Tensor,
    weights: DeltaWeights,
    *,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """One new token for each sequence.

    The convolution's SiLU is rounded to the input's dtype; the rule is computed in fp32: q and k of each head are
    divided by their lengths, and q is multiplied by ``key_dim ** -0.5``. Then ``S = exp(g) · S``, g as in
    ``DeltaWeights``, and ``S += k ⊗ max_beta · sigmoid(b) · (v - Sᵀk)``. ``Sᵀq`` is the result. Each key head serves
    ``value_heads / key_heads`` successive value heads.

    Args:
        qkv: ``[B, C]``, q then k then v, as projected, rows at any stride.
        a, b: ``[B, value_heads]``, rows at any stride: of the decay, and of how much of a change is written. With a
            decay for each channel of a key, a is ``[B, value_heads · key_dim]``.
        state: updated in place; taken as zero where the position is 0. S is read while the predecessor still runs (see
            ``rosebatch_kernels.common.launch``), which must not write it.
        slots: ``[B]`` int32, each row's place in the state.
        positions: ``[B]`` int32 at any stride, of the new token.
        limits: ``[B]`` int32 at the same stride; a row with ``position >= limit`` is skipped: its state stays, its
            output is undefined.
        weights: of the layer.

    Returns:
        ``[B, value_heads · value_dim]``.
    """
    key_heads, value_heads, key_dim, value_dim = state.heads
    out = torch.empty(len(qkv), value_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    values = min(sizes.values, next_power_of_2(value_dim))
    _delta_decode[(cdiv(value_dim, values), value_heads, len(qkv))](
        out=out,
        qkv=qkv,
        a=a,
        b=b,
        inputs=state.inputs,
        memory=state.memory,
        slots=slots,
        positions=positions,
        limits=limits,
        conv=weights.conv,
        conv_bias=weights.conv_bias,
        log_rate=weights.log_rate,
        dt_bias=weights.dt_bias,
        qkv_stride=qkv.stride(0),
        a_stride=a.stride(0),
        b_stride=b.stride(0),
        slots_stride=slots.stride(0),
        positions_stride=positions.stride(0),
        KEY_HEADS=key_heads,
        VALUE_HEADS=value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=next_power_of_2(key_dim),
        VALUES=values,
        TAPS=state.inputs.shape[1],
        MAX_BETA=weights.max_beta,
        BY_CHANNEL=weights.by_channel,
        num_warps=sizes.warps,
        **launch_options(device),
    )
    return out


@triton.jit
def _delta_decode(
    out,
    qkv,
    a,
    b,
    inputs,
    memory,
    slots,
    positions,
    limits,
    conv,
    conv_bias,
    log_rate,
    dt_bias,
    qkv_stride,
    a_stride,
    b_stride,
    slots_stride,
    positions_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    TAPS: tl.constexpr,
    MAX_BETA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PDL: tl.constexpr,
):
    part = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    position = tl.load(positions + row * positions_stride)
    live = position < tl.load(limits + row * positions_stride)
    slot = tl.load(slots + row * slots_stride).to(tl.int64)
    d = tl.arange(0, WIDTH)
    c = part * VALUES + tl.arange(0, VALUES)
    cells = memory + ((slot * VALUE_HEADS + head) * KEY_DIM + d[:, None]) * VALUE_DIM + c[None, :]
    inside = (d < KEY_DIM)[:, None] & (c < VALUE_DIM)[None, :]
    # The last step wrote S, long before this kernel's predecessor: its loads overlap with the predecessor's end.
    known = tl.where(live & (position > 0), KEY_DIM, 0)
    past = tl.load(cells, inside & (d < known)[:, None], other=0.0)
    if PDL:
        wait()
    if live:
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        first_of_key = (part == 0) & (head % (VALUE_HEADS // KEY_HEADS) == 0)
        channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        x = qkv + row * qkv_stride
        kept = inputs + slot * (TAPS * channels)
        q_channel = key_head * KEY_DIM + d
        k_channel = KEY_HEADS * KEY_DIM + q_channel
        v_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + c
        keep = tl.where(first_of_key, KEY_DIM, 0)
        q = convolve_token(x, kept, q_channel, d, KEY_DIM, keep, position, conv, conv_bias, channels, TAPS)
        k = convolve_token(x, kept, k_channel, d, KEY_DIM, keep, position, conv, conv_bias, channels, TAPS)
        v = convolve_token(x, kept, v_channel, c, VALUE_DIM, VALUE_DIM, position, conv, conv_bias, channels, TAPS)
        q *= unit_factor(q, 0) * (KEY_DIM**-0.5)
        k *= unit_factor(k, 0)
        if BY_CHANNEL:
            own = head * KEY_DIM + d
            steps = channel_log_decay(a + row * a_stride + own, log_rate + head, dt_bias + own, d < KEY_DIM)
            past *= tl.exp(steps)[:, None]
            # What is left of S, before the token is written.
            decay = 1.0
        else:
            decay = tl.exp(log_decay(tl.load(a + row * a_stride + head), log_rate + head, dt_bias + head))
        beta = written_share(tl.load(b + row * b_stride + head), MAX_BETA)
        # Both sums over the past S, so that they do not wait for each other: Sᵀq follows from them.
        of_k = tl.sum(past * k[:, None], 0)
        of_q = tl.sum(past * q[:, None], 0)
        change = beta * (v - decay * of_k)
        result = decay * of_q + tl.sum(q * k, 0) * change
        tl.store(cells, decay * past + k[:, None] * change[None, :], inside)
        where = out + row * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + c
        tl.store(where, result.to(out.dtype.element_ty), c < VALUE_DIM)
