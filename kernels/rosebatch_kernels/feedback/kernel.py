"""The token feedback in one Triton kernel: a CUDA graph of decode steps can then follow itself without a pause."""

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.tokens import NO_TOKEN, NOT_FINITE
from rosebatch_kernels.common.whole_numbers import next_power_of_2
from rosebatch_kernels.feedback import layout

# Of the one program, on an H100 80GB HBM3.
_WARPS = 4
# One compiled form serves all numbers of rows, and smaller engines have it in common.
_MIN_WIDTH = 256

_NO_TOKEN = tl.constexpr(NO_TOKEN)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_TOKEN = tl.constexpr(layout.TOKEN)
_POSITION = tl.constexpr(layout.POSITION)
_NEXT = tl.constexpr(layout.NEXT)
_LIMIT = tl.constexpr(layout.LIMIT)
_STOPS = tl.constexpr(layout.STOPS)


def advance(
    tokens: Tensor,
    fields: Tensor,
    slots: Tensor | None,
    history: Tensor,
    step: Tensor | None,
    end_tokens: Tensor,
    *,
    device: Device,
) -> None:
    """See ``rosebatch_kernels.feedback.reference``; one program serves all rows, so that ``step`` is one number."""
    _advance[(1,)](
        tokens=tokens,
        fields=fields,
        slots=tokens if slots is None else slots,
        history=history,
        step=tokens if step is None else step,
        end_tokens=end_tokens,
        count=len(tokens),
        field_stride=fields.stride(0),
        history_stride=history.stride(0),
        WIDTH=max(_MIN_WIDTH, next_power_of_2(fields.shape[1])),
        WINDOW=len(history),
        SLOTS=slots is not None,
        STEP=step is not None,
        ENDS=len(end_tokens),
        num_warps=_WARPS,
        **launch_options(device),
    )


@triton.jit(do_not_specialize=["count"])
def _advance(
    tokens,
    fields,
    slots,
    history,
    step,
    end_tokens,
    count,
    field_stride,
    history_stride,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    SLOTS: tl.constexpr,
    STEP: tl.constexpr,
    ENDS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row = tl.arange(0, WIDTH)
    real = row < count
    column = tl.load(slots + row, mask=real, other=0) if SLOTS else row
    token = tl.load(tokens + row, mask=real, other=0).to(tl.int32)
    position = tl.load(fields + _POSITION * field_stride + column, mask=real, other=0)
    limit = tl.load(fields + _LIMIT * field_stride + column, mask=real, other=0)
    live = real & (position < limit)
    shown = tl.where(live, token, _NO_TOKEN)
    if STEP:
        now = tl.load(step)
        tl.store(history + (now % WINDOW) * history_stride + column, shown, mask=real)
    else:
        tl.store(history + row, shown, mask=real)
    failed = token == _NOT_FINITE
    # Later steps of the window compute the row too, so its token must be one of the vocabulary.
    tl.store(fields + _TOKEN * field_stride + column, tl.where(failed, 0, token), mask=live)
    tl.store(fields + _POSITION * field_stride + column, position + 1, mask=live)
    tl.store(fields + _NEXT * field_stride + column, position + 2, mask=live)
    tl.store(fields + _LIMIT * field_stride + column, 0, mask=live & failed)
    if ENDS > 0:
        ended = row < 0
        for i in tl.static_range(ENDS):
            ended = ended | (token == tl.load(end_tokens + i))
        stops = tl.load(fields + _STOPS * field_stride + column, mask=live, other=0)
        tl.store(fields + _LIMIT * field_stride + column, 0, mask=live & ended & (stops != 0))
    if STEP:
        tl.debug_barrier()
        tl.store(step, now + 1)
