"""Drafts in two Triton kernels, so that a CUDA graph can hold decode steps that find and verify them."""

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.shared_keys import Pieces
from rosebatch_kernels.common.tokens import NO_TOKEN, NOT_FINITE, WRONG_DRAFT
from rosebatch_kernels.common.whole_numbers import next_power_of_2
from rosebatch_kernels.drafts.reference import ALIKE, LONGEST, LOOKED_AT, SHORTEST
from rosebatch_kernels.feedback import layout

# Places that a program looks at together, and its warps: not measured.
_PLACES, _WARPS = 1024, 4
# Sequences of the one program that verifies, at least: one compiled form serves all numbers.
_MIN_WIDTH = 256
# Bits of a place among tokens.
_PLACE_BITS = 20

_NO_TOKEN = tl.constexpr(NO_TOKEN)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_WRONG_DRAFT = tl.constexpr(WRONG_DRAFT)
_LONGEST = tl.constexpr(LONGEST)
_SHORTEST = tl.constexpr(SHORTEST)
_LOOKED_AT = tl.constexpr(LOOKED_AT)
_ALIKE = tl.constexpr(ALIKE)
_BITS = tl.constexpr(_PLACE_BITS)
_PLACE_MASK = tl.constexpr((1 << _PLACE_BITS) - 1)
_FIELDS = tl.constexpr(layout.NUM_FIELDS)
_TOKEN = tl.constexpr(layout.TOKEN)
_POSITION = tl.constexpr(layout.POSITION)
_NEXT = tl.constexpr(layout.NEXT)
_LIMIT = tl.constexpr(layout.LIMIT)
_STOPS = tl.constexpr(layout.STOPS)


def propose(
    fields: Tensor,
    tokens: Tensor,
    firsts: Tensor,
    answers: Tensor,
    distances: Tensor,
    drafted: Tensor,
    windows: Tensor,
    pieces: Pieces | None = None,
    *,
    device: Device,
) -> None:
    """See ``rosebatch_kernels.drafts.reference``; one program looks at all tokens of a sequence.

    Args:
        device: of the tensors. ``Q`` is a power of two, as keys and most of pieces are, and ``W + N`` is below 2^20.
    """
    batch, width = tokens.shape
    assert width + len(answers) < 1 << _PLACE_BITS, "a place and a length fit one number"
    _propose[(batch,)](
        fields=fields,
        tokens=tokens,
        firsts=firsts,
        answers=answers,
        distances=distances,
        drafted=drafted,
        windows=windows,
        width=width,
        field_stride=fields.stride(0),
        token_stride=tokens.stride(0),
        drafted_stride=drafted.stride(0),
        QUERIES=drafted.shape[1] // batch,
        WINDOWS=len(windows) if pieces else 0,
        PIECE=pieces.keys if pieces else 0,
        MOST_PIECES=pieces.most if pieces else 0,
        PLACES=_PLACES,
        num_warps=_WARPS,
        **launch_options(device),
    )


@triton.jit
def _propose(
    fields,
    tokens,
    firsts,
    answers,
    distances,
    drafted,
    windows,
    width,
    field_stride,
    token_stride,
    drafted_stride,
    QUERIES: tl.constexpr,
    WINDOWS: tl.constexpr,
    PIECE: tl.constexpr,
    MOST_PIECES: tl.constexpr,
    PLACES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row = tl.program_id(0)
    position = tl.load(fields + _POSITION * field_stride + row)
    limit = tl.load(fields + _LIMIT * field_stride + row)
    own = tokens + row.to(tl.int64) * token_stride
    count = tl.load(answers)
    # Places count through the answers first. The longest ending and, of equal ones, the last place: both in one number.
    best = 0
    there_is_room = (position < limit) & (position + tl.load(firsts + row) < width)
    last = tl.where(there_is_room, position + tl.load(firsts + row), 0)
    for start in tl.range(0, tl.where(last > 0, count, 0), PLACES):
        best = tl.maximum(best, _longest_ending(own, last, answers + 1, start, count, 0, PLACES))
    for start in tl.range(0, last, PLACES):
        best = tl.maximum(best, _longest_ending(own, last, own, start, last, count, PLACES))
    j = tl.arange(0, QUERIES)
    distance = tl.load(distances + row)
    newest = count + last - tl.arange(0, _LOOKED_AT)
    copied = (distance > 0) & (newest >= distance) & (newest >= count)
    alike = _token_at(own, answers + 1, count, newest, copied) == _token_at(
        own, answers + 1, count, newest - distance, copied
    )
    distance = tl.where(tl.sum((copied & alike).to(tl.int32), 0) >= _ALIKE, distance, 0)
    distance = tl.where(best > 0, count + last - (best & _PLACE_MASK), distance)
    if last > 0:
        tl.store(distances + row, distance)
    source = count + last - distance + 1 + (j - 1) % tl.maximum(distance, 1)
    is_draft = (j > 0) & (distance > 0) & (position + j < limit)
    for number in tl.static_range(WINDOWS):
        is_draft = is_draft & _same_cut(position, position + j, tl.load(windows + number), PIECE, MOST_PIECES)
    draft = _token_at(own, answers + 1, count, source, is_draft)
    # Nothing follows the end of an answer.
    is_draft = is_draft & (j < tl.min(tl.where(is_draft & (draft < 0), j, QUERIES), 0))
    there = drafted + row * QUERIES + j
    for field in tl.static_range(_FIELDS):
        value = tl.load(fields + field * field_stride + row) + tl.zeros([QUERIES], tl.int32)
        if field == _TOKEN:
            value = tl.where(j == 0, value, tl.where(is_draft, draft, 0))
        if (field == _POSITION) | (field == _NEXT):
            # Others have a place that there is.
            value += tl.where(is_draft, j, 0)
        if field == _LIMIT:
            value = tl.where((j == 0) | is_draft, value, 0)
        tl.store(there + field * drafted_stride, value)


@triton.jit
def _longest_ending(own, last, tokens, start, end, before, PLACES: tl.constexpr):
    """The longest of the endings at places of some tokens, and the last such place; 0 if none is long enough.

    ``before`` is added to places.
    """
    place = start + tl.arange(0, PLACES)
    same = place < end
    length = tl.zeros([PLACES], tl.int32)
    for back in tl.static_range(_LONGEST):
        wanted = tl.load(own + tl.maximum(last - back, 0))
        same = same & (place >= back) & (last >= back)
        same = same & (tl.load(tokens + place - back, mask=same, other=-1) == wanted)
        length += same.to(tl.int32)
    return tl.max(tl.where(length >= _SHORTEST, (length << _BITS) | (before + place), 0), 0)


@triton.jit
def _token_at(own, answers, count, place, mask):
    """The tokens at places that count through the answers first."""
    shared = tl.load(answers + place, mask=mask & (place < count), other=0)
    return tl.where(place < count, shared, tl.load(own + place - count, mask=mask & (place >= count), other=0))


@triton.jit
def _same_cut(one, others, window, PIECE: tl.constexpr, MOST: tl.constexpr):
    """Whether decode attention cuts the keys of other positions at the places of those of one before them."""
    origin = tl.where(window > 0, tl.maximum(one + 1 - window, 0), 0) // PIECE * PIECE
    theirs = tl.where(window > 0, tl.maximum(others + 1 - window, 0), 0) // PIECE * PIECE
    # Pieces are longer behind powers of two. A number with a higher bit differs by more than the other one.
    first, last = tl.maximum(one - origin - 1, 0), others - origin - 1
    return (theirs == origin) & ((last < PIECE * MOST) | ((first ^ last) <= first))


def verify(
    sampled: Tensor,
    drafted: Tensor,
    fields: Tensor,
    tokens: Tensor,
    firsts: Tensor,
    history: Tensor,
    step: Tensor,
    end_tokens: Tensor,
    *,
    device: Device,
) -> None:
    """See ``rosebatch_kernels.drafts.reference``; one program serves all rows, so that ``step`` is one number."""
    batch, width = tokens.shape
    _verify[(1,)](
        sampled=sampled,
        drafted=drafted,
        fields=fields,
        tokens=tokens,
        firsts=firsts,
        history=history,
        step=step,
        end_tokens=end_tokens,
        count=batch,
        width=width,
        field_stride=fields.stride(0),
        token_stride=tokens.stride(0),
        drafted_stride=drafted.stride(0),
        history_stride=history.stride(0),
        QUERIES=drafted.shape[1] // batch,
        WIDTH=max(_MIN_WIDTH, next_power_of_2(batch)),
        WINDOW=len(history),
        ENDS=len(end_tokens),
        num_warps=_WARPS,
        **launch_options(device),
    )


@triton.jit(do_not_specialize=["count"])
def _verify(
    sampled,
    drafted,
    fields,
    tokens,
    firsts,
    history,
    step,
    end_tokens,
    count,
    width,
    field_stride,
    token_stride,
    drafted_stride,
    history_stride,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    ENDS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row = tl.arange(0, WIDTH)
    real = row < count
    position = tl.load(fields + _POSITION * field_stride + row, mask=real, other=0)
    limit = tl.load(fields + _LIMIT * field_stride + row, mask=real, other=0)
    stops = tl.load(fields + _STOPS * field_stride + row, mask=real, other=0) != 0
    own = tokens + row.to(tl.int64) * token_stride
    first = tl.load(firsts + row, mask=real, other=0)
    live = real & (position < limit)
    now = tl.load(step)
    shown_at = history + (now % WINDOW) * history_stride
    going = live
    ended = row < 0
    kept = tl.zeros([WIDTH], tl.int32)
    before = tl.zeros([WIDTH], tl.int32)
    for j in tl.static_range(QUERIES):
        place = row * QUERIES + j
        token = tl.load(sampled + place, mask=real, other=0).to(tl.int32)
        here = live & (position + j < tl.load(drafted + _LIMIT * drafted_stride + place, mask=real, other=0))
        going = going & here
        if j > 0:
            going = going & (tl.load(drafted + _TOKEN * drafted_stride + place, mask=real, other=0) == before)
        tl.store(shown_at + place, tl.where(going, token, tl.where(here, _WRONG_DRAFT, _NO_TOKEN)), mask=real)
        kept += going.to(tl.int32)
        failed = token == _NOT_FINITE
        # Later steps of the window compute the row too, so its token must be one of the vocabulary.
        known = tl.where(failed, 0, token)
        tl.store(own + first + position + kept, known, mask=going & (first + position + kept < width))
        tl.store(fields + _TOKEN * field_stride + row, known, mask=going)
        stopped = failed
        if ENDS > 0:
            ending = row < 0
            for i in tl.static_range(ENDS):
                ending = ending | (token == tl.load(end_tokens + i))
            stopped = stopped | (ending & stops)
        ended = ended | (going & stopped)
        going = going & (stopped == 0)
        before = token
    tl.store(fields + _POSITION * field_stride + row, position + kept, mask=live)
    tl.store(fields + _NEXT * field_stride + row, position + kept + 1, mask=live)
    tl.store(fields + _LIMIT * field_stride + row, 0, mask=ended)
    tl.debug_barrier()
    tl.store(step, now + 1)
