"""A gated convolution over a few tokens, of packed chunks and of decode steps, in Triton.

Each token has three numbers a channel, ``before``, ``after`` and ``own``. The convolution is of ``before · own``, over
the token and those before it, each channel by itself; the result is ``after`` times that. Source: LFM2 (Liquid AI,
2025).

A slot of the state keeps ``before · own`` of a sequence's last tokens: at position p in row ``p mod taps``. That is a
row more than is read: programs write a new token's number while they read the past ones.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.chunk_fields import chunk_fields, tile_of_program
from rosebatch_kernels.common.chunks import TILE_ROWS, PackedChunks
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.sizes import table
from rosebatch_kernels.common.whole_numbers import cdiv


@dataclass(frozen=True)
class Sizes:
    """Channels of a program, for chunks and for decode steps."""

    channels: int = 64
    decode_channels: int = 256


SIZES = table(Sizes())


def prefill(x: Tensor, state: Tensor, packed: PackedChunks, weight: Tensor, *, sizes: Sizes, device: Device) -> Tensor:
    """Chunks of tokens, packed one after the other.

    ``before · own`` is rounded to the input's dtype, as is the convolution, whose sum is fp32.

    Args:
        x: ``[T, 3 · C]``: before, after and own of all channels, rows at any stride.
        state: ``[slots, taps, C]`` of the same dtype, updated in place. A chunk whose first position is 0 begins with
            zeros, others continue from their slots.
        packed: the chunks, no slot twice. Its tiles fix the size of the launch, so that a graph can hold it.
        weight: ``[C, taps]``, of each channel; the last factor is that of the token itself.

    Returns:
        ``[T, C]``; rows that no chunk covers are undefined.
    """
    channels, taps = weight.shape
    out = x.new_empty(len(x), channels)
    _convolve_chunks[(cdiv(channels, sizes.channels), len(packed.tiles))](
        out=out,
        x=x,
        state=state,
        chunks=packed.chunks,
        tiles=packed.tiles,
        weight=weight,
        x_stride=x.stride(0),
        CHANNELS=channels,
        BLOCK=sizes.channels,
        TAPS=taps,
        ROWS=TILE_ROWS,
        **launch_options(device),
    )
    return out


def decode(
    x: Tensor,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
    limits: Tensor,
    weight: Tensor,
    *,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """One new token for each sequence.

    Args:
        x: ``[B, 3 · C]``, see ``prefill``.
        state: see ``prefill``; taken as zero where the position is 0.
        slots: ``[B]`` int32 at any stride, each row's place in the state.
        positions: ``[B]`` int32 at any stride, of the new token.
        limits: ``[B]`` int32 at the same stride; a row with ``position >= limit`` is skipped: its state stays, its
            output is undefined.
        weight: see ``prefill``.

    Returns:
        ``[B, C]``.
    """
    channels, taps = weight.shape
    out = x.new_empty(len(x), channels)
    _convolve_tokens[(cdiv(channels, sizes.decode_channels), len(x))](
        out=out,
        x=x,
        state=state,
        slots=slots,
        positions=positions,
        limits=limits,
        weight=weight,
        x_stride=x.stride(0),
        slots_stride=slots.stride(0),
        positions_stride=positions.stride(0),
        CHANNELS=channels,
        BLOCK=sizes.decode_channels,
        TAPS=taps,
        **launch_options(device),
    )
    return out


@triton.jit
def _convolve_chunks(
    out,
    x,
    state,
    chunks,
    tiles,
    weight,
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
        cells = x + first * x_stride + column[None, :]
        kept = state + slot * (TAPS * CHANNELS) + column[None, :]
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for back in tl.static_range(TAPS):
            source = row - back
            factor = tl.load(weight + column * TAPS + (TAPS - 1 - back), inside, other=0.0).to(tl.float32)[None, :]
            value = _gated(cells + source.to(tl.int64) * x_stride, present & (source >= 0), CHANNELS)
            total += value.to(tl.float32) * factor
            if start == 0:
                place = position + source
                earlier = present & (source < 0) & (place >= 0)
                value = tl.load(kept + (place + TAPS) % TAPS * CHANNELS, earlier, other=0.0)
                total += value.to(tl.float32) * factor
        dtype = out.dtype.element_ty
        after = tl.load(cells + row.to(tl.int64) * x_stride + CHANNELS, present, other=0.0).to(tl.float32)
        result = (after * total.to(dtype).to(tl.float32)).to(dtype)
        tl.store(out + (first + row) * CHANNELS + column[None, :], result, present)
        if start == 0:
            # The chunk's last numbers take the places of those that this program has read.
            tl.debug_barrier()
            last = count - 1 - tl.arange(0, ROWS)[:, None]
            keeps = (last > count - 1 - TAPS) & (last >= 0) & inside[None, :]
            value = _gated(cells + last.to(tl.int64) * x_stride, keeps, CHANNELS)
            tl.store(kept + (position + last) % TAPS * CHANNELS, value, keeps)


@triton.jit
def _convolve_tokens(
    out,
    x,
    state,
    slots,
    positions,
    limits,
    weight,
    x_stride,
    slots_stride,
    positions_stride,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row = tl.program_id(1).to(tl.int64)
    position = tl.load(positions + row * positions_stride)
    if position < tl.load(limits + row * positions_stride):
        slot = tl.load(slots + row * slots_stride).to(tl.int64)
        column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = column < CHANNELS
        cells = x + row * x_stride + column
        kept = state + slot * (TAPS * CHANNELS) + column
        new = _gated(cells, inside, CHANNELS)
        # Of two bare products, the compiler may round either one: a sum from zero on leaves it no choice.
        total = tl.zeros([BLOCK], tl.float32)
        for back in tl.static_range(TAPS):
            value = new
            if back > 0:
                known = inside & (position >= back)
                value = tl.load(kept + (position + TAPS - back) % TAPS * CHANNELS, known, other=0.0)
            factor = tl.load(weight + column * TAPS + (TAPS - 1 - back), inside, other=0.0)
            total += value.to(tl.float32) * factor.to(tl.float32)
        tl.store(kept + (position % TAPS) * CHANNELS, new, inside)
        dtype = out.dtype.element_ty
        after = tl.load(cells + CHANNELS, inside, other=0.0).to(tl.float32)
        tl.store(out + row * CHANNELS + column, (after * total.to(dtype).to(tl.float32)).to(dtype), inside)


@triton.jit
def _gated(cells, mask, CHANNELS: tl.constexpr):
    """``before · own``, rounded, of the tokens whose first channel lies at ``cells``."""
    before = tl.load(cells, mask, other=0.0).to(tl.float32)
    own = tl.load(cells + 2 * CHANNELS, mask, other=0.0).to(tl.float32)
    return (before * own).to(cells.dtype.element_ty)
