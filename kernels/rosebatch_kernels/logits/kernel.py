"""Triton kernels that change logits: memory is read once and written once, and nothing waits for the host.

They round after every step, as the reference does, so that both give the same bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.activations import tanh
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.sizes import table
from rosebatch_kernels.common.whole_numbers import cdiv
from rosebatch_kernels.logits import layout

_COUNT = tl.constexpr(layout.COUNT)
_IN_PROMPT = tl.constexpr(layout.IN_PROMPT)
_ENDS = tl.constexpr(layout.ENDS)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a program, measured on an H200.

    Attributes:
        columns: of ``adjust``, ``mask_`` and ``scale_and_cap_``: 16 for each thread.
        counted: tokens that a program of ``count_`` counts.
        warps: of a program.
    """

    columns: int = 2048
    counted: int = 128
    warps: int = 4


SIZES = table(Sizes())


def adjust(
    logits: Tensor,
    marks: Tensor,
    bias: Tensor | None,
    slots: Tensor | None,
    *,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    positions: Tensor,
    min_positions: Tensor,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """See ``rosebatch_kernels.logits.reference``; the five parameters are contiguous."""
    assert logits.stride(-1) == marks.stride(-1) == 1, "the last axis is contiguous"
    assert bias is None or bias.stride(-1) == 1, "the last axis is contiguous"
    rows, size = logits.shape
    # Rows begin on 16 bytes, for the sampling kernel.
    out = torch.empty(rows, cdiv(size, 4) * 4, dtype=torch.float32, device=logits.device)[:, :size]
    _adjust[(rows, cdiv(size, sizes.columns))](
        logits=logits,
        marks=marks,
        bias=bias,
        slots=slots,
        presence=presence,
        frequency=frequency,
        repetition=repetition,
        positions=positions,
        min_positions=min_positions,
        out=out,
        size=size,
        logits_stride=logits.stride(0),
        marks_stride=marks.stride(0),
        bias_stride=0 if bias is None else bias.stride(0),
        out_stride=out.stride(0),
        COLUMNS=sizes.columns,
        EVEN=size % 16 == 0,
        num_warps=sizes.warps,
        # A fused product and difference would be rounded once, not twice.
        enable_fp_fusion=False,
        **launch_options(device),
    )
    return out


def count_(marks: Tensor, tokens: Tensor, slots: Tensor | None, *, sizes: Sizes, device: Device) -> None:
    """See ``rosebatch_kernels.logits.reference``; tokens and slots are contiguous."""
    assert marks.stride(-1) == 1, "the last axis is contiguous"
    rows = len(tokens)
    _count[(cdiv(rows, sizes.counted),)](
        marks=marks,
        tokens=tokens,
        slots=slots,
        rows=rows,
        size=marks.shape[1],
        stride=marks.stride(0),
        TILE=sizes.counted,
        num_warps=sizes.warps,
        **launch_options(device),
    )


def mask_(logits: Tensor, masks: Tensor, rows: Tensor, *, sizes: Sizes, device: Device) -> None:
    """See ``rosebatch_kernels.logits.reference``; rows are contiguous. Allowed logits are neither read nor written."""
    assert logits.stride(-1) == masks.stride(-1) == 1, "the last axis is contiguous"
    size = logits.shape[1]
    _mask[(len(rows), cdiv(size, sizes.columns))](
        logits=logits,
        masks=masks,
        rows=rows,
        size=size,
        logits_stride=logits.stride(0),
        masks_stride=masks.stride(0),
        WORDS=sizes.columns // 32,
        num_warps=sizes.warps,
        **launch_options(device),
    )


def scale_and_cap_(logits: Tensor, scale: float, cap: float, *, sizes: Sizes, device: Device) -> Tensor:
    """See ``rosebatch_kernels.logits.reference``."""
    assert logits.stride(-1) == 1, "the last axis is contiguous"
    rows, size = logits.shape
    _scale_and_cap[(rows, cdiv(size, sizes.columns))](
        logits=logits,
        scale=float(scale),
        cap=float(cap),
        size=size,
        stride=logits.stride(0),
        COLUMNS=sizes.columns,
        CAPPED=cap > 0,
        num_warps=sizes.warps,
        **launch_options(device),
    )
    return logits


# The addresses of the parameters change with the number of rows: without this, Triton would compile for each.
_PARAMETERS = ["slots", "presence", "frequency", "repetition", "positions", "min_positions"]


@triton.jit(do_not_specialize=_PARAMETERS)
def _adjust(
    logits,
    marks,
    bias,
    slots,
    presence,
    frequency,
    repetition,
    positions,
    min_positions,
    out,
    size,
    logits_stride,
    marks_stride,
    bias_stride,
    out_stride,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row = tl.program_id(0).to(tl.int64)
    slot = row
    if slots is not None:
        slot = tl.load(slots + row).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if not EVEN:
        # The mask splits what a thread would load at once, so it loads number by number. A thread then takes every 32nd
        # column instead of successive ones, so that a warp reads one piece of memory.
        column = tl.max_contiguous(column, 1)
    inside = column < size
    x = tl.load(logits + row * logits_stride + column, inside, other=0.0).to(tl.float32)
    mark = tl.load(marks + slot * marks_stride + column, inside, other=0)
    if bias is not None:
        x += tl.load(bias + slot * bias_stride + column, inside, other=0.0)
    penalty = tl.load(repetition + row)
    count = mark & _COUNT
    generated = count > 0
    seen = generated | (mark & _IN_PROMPT > 0)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, penalty), x * penalty), x)
    x -= tl.load(frequency + row) * count.to(tl.float32)
    x -= tl.where(generated, tl.load(presence + row), 0.0)
    too_early = (tl.load(positions + row) < tl.load(min_positions + row)) & (mark & _ENDS > 0)
    tl.store(out + row * out_stride + column, tl.where(too_early, float("-inf"), x), inside)


@triton.jit(do_not_specialize=["tokens", "slots", "rows"])
def _count(marks, tokens, slots, rows, size, stride, TILE: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        wait()
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    real = row < rows
    token = tl.load(tokens + row, real, other=-1)
    slot = row
    if slots is not None:
        slot = tl.load(slots + row, real, other=0)
    inside = (token >= 0) & (token < size)
    place = marks + slot.to(tl.int64) * stride + token
    # No atomic addition is needed: every slot occurs once.
    tl.store(place, tl.load(place, inside, other=0) + 1, inside)


@triton.jit(do_not_specialize=["rows"])
def _mask(logits, masks, rows, size, logits_stride, masks_stride, WORDS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        wait()
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number).to(tl.int64)
    index = tl.program_id(1) * WORDS + tl.arange(0, WORDS)[:, None]
    word = tl.load(masks + number * masks_stride + index, index * 32 < size, other=0)
    bit = tl.arange(0, 32)[None, :]
    # As in _adjust: each logit is stored or left alone by itself.
    column = tl.max_contiguous(index * 32 + bit, [1, 1])
    barred = ((word >> bit) & 1) == 0
    tl.store(logits + row * logits_stride + column, float("-inf"), barred & (column < size))


@triton.jit
def _scale_and_cap(logits, scale, cap, size, stride, COLUMNS: tl.constexpr, CAPPED: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        wait()
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = logits + tl.program_id(0).to(tl.int64) * stride + column
    value = tl.load(place, column < size, other=0.0).to(tl.float32) * scale
    if CAPPED:
        value = cap * tanh(value / cap)
    tl.store(place, value.to(logits.dtype.element_ty), column < size)
