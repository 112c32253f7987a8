"""A causal convolution of each channel with SiLU, in Triton: of packed chunks, and of a token of a decode step.

It comes before the rules that keep a matrix: the gated delta rule and Mamba2. ``causal_conv_reference`` has the
formula, and says what a slot keeps.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.activations import activate
from rosebatch_kernels.common.chunk_fields import chunk_fields, tile_of_program
from rosebatch_kernels.common.chunks import TILE_ROWS, PackedChunks
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.whole_numbers import cdiv


def convolve_chunks(
    x: Tensor,
    inputs: Tensor,
    packed: PackedChunks,
    conv: Tensor,
    conv_bias: Tensor | None,
    block: int,
    *,
    device: Device,
) -> Tensor:
    """Chunks of tokens, packed one after the other.

    Args:
        x: ``[T, C]``, rows at any stride.
        inputs: ``[slots, taps, C]``, updated in place. A chunk whose first position is 0 begins with zeros.
        packed: the chunks, no slot twice.
        conv: ``[C, taps]``; the last factor is that of the token itself.
        conv_bias: ``[C]`` or None.
        block: channels of a program.

    Returns:
        ``[T, C]``; rows that no chunk covers are undefined.
    """
    channels = x.shape[1]
    mixed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _causal_conv[(cdiv(channels, block), len(packed.tiles))](
        mixed=mixed,
        x=x,
        inputs=inputs,
        chunks=packed.chunks,
        tiles=packed.tiles,
        conv=conv,
        conv_bias=conv_bias,
        x_stride=x.stride(0),
        CHANNELS=channels,
        BLOCK=block,
        TAPS=inputs.shape[1],
        ROWS=TILE_ROWS,
        **launch_options(device),
    )
    return mixed


@triton.jit
def _causal_conv(
    mixed,
    x,
    inputs,
    chunks,
    tiles,
    conv,
    conv_bias,
    x_stride,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    chunk, start = tile_of_program(tiles)
    if chunk >= 0:
        slot, first, position, count = chunk_fields(chunks, chunk)
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = column < CHANNELS
        row = start + tl.arange(0, ROWS)[:, None]
        present = (row < count) & inside[None, :]
        rows = x + first * x_stride + column[None, :]
        kept = inputs + slot * (TAPS * CHANNELS) + column[None, :]
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for back in tl.static_range(TAPS):
            source = row - back
            factor = tl.load(conv + column * TAPS + (TAPS - 1 - back), inside, other=0.0).to(tl.float32)[None, :]
            value = tl.load(rows + source.to(tl.int64) * x_stride, present & (source >= 0), other=0.0)
            total += value.to(tl.float32) * factor
            if start == 0:
                place = position + source
                earlier = present & (source < 0) & (place >= 0)
                value = tl.load(kept + (place + TAPS) % TAPS * CHANNELS, earlier, other=0.0)
                total += value.to(tl.float32) * factor
        if conv_bias is not None:
            total += tl.load(conv_bias + column, inside, other=0.0).to(tl.float32)[None, :]
        out = activate(total, "silu").to(mixed.dtype.element_ty)
        tl.store(mixed + (first + row) * CHANNELS + column[None, :], out, present)
        if start == 0:
            # The chunk's last inputs take the places of those that this program has read.
            tl.debug_barrier()
            last = count - 1 - tl.arange(0, ROWS)[:, None]
            keeps = (last > count - 1 - TAPS) & (last >= 0) & inside[None, :]
            value = tl.load(rows + last.to(tl.int64) * x_stride, keeps, other=0.0)
            tl.store(kept + (position + last) % TAPS * CHANNELS, value, keeps)


@triton.jit
def convolve_token(
    x,
    kept,
    channel,
    index,
    size,
    keep,
    position,
    conv,
    conv_bias,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):
    """SiLU of the convolution, rounded, at ``channel`` where ``index < size``.

    The token's input goes to the ring where ``index < keep``.
    """
    inside = index < size
    own = tl.load(x + channel, inside, other=0.0)
    total = own.to(tl.float32) * tl.load(conv + channel * TAPS + (TAPS - 1), inside, other=0.0).to(tl.float32)
    for back in tl.static_range(1, TAPS):
        place = (position + TAPS - back) % TAPS
        known = tl.where(position >= back, size, 0)
        value = tl.load(kept + place * CHANNELS + channel, index < known, other=0.0)
        factor = tl.load(conv + channel * TAPS + (TAPS - 1 - back), inside, other=0.0)
        total += value.to(tl.float32) * factor.to(tl.float32)
    if conv_bias is not None:
        total += tl.load(conv_bias + channel, inside, other=0.0).to(tl.float32)
    tl.store(kept + (position % TAPS) * CHANNELS + channel, own, index < keep)
    return activate(total, "silu").to(x.dtype.element_ty).to(tl.float32)
