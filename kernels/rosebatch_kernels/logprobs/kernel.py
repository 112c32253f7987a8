"""Triton kernels of log-probabilities: two launches, and only the first reads the whole vocabulary, once.

1. ``_sum_segments`` reads the logits in segments of 128 ids. It keeps each segment's largest logit and its sum of
   exponentials, and counts the logits above the token's. Its programs are independent, so a few rows fill the GPU.
2. ``_report``, one program for each row, adds these up. Then it takes one likeliest token after the other: of the
   segments with the largest maximum the first, and in it the first such logit. It reads this segment again, for what is
   its maximum without the tokens that were taken. These are the ones before the last in the order of the result, so
   nothing needs to be kept of them.

No row depends on another, and sums run in a fixed order.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.sizes import table
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2
from rosebatch_kernels.common.wide_rows import group_of, load
from rosebatch_kernels.logprobs import layout


@dataclass(frozen=True)
class Sizes:
    """Sizes of both kernels, measured on an H200 with 256 rows of 151,936 logits in bf16.

    Attributes:
        segment: ids that share one maximum and one sum.
        summed: segments of a program of ``_sum_segments``.
        summing_warps: of such a program.
        reporting_warps: of a program of ``_report``.
    """

    segment: int = 128
    summed: int = 64
    summing_warps: int = 4
    reporting_warps: int = 4


SIZES = table(Sizes())

_LOGPROB, _RANK, _IDS = tl.constexpr(layout.LOGPROB), tl.constexpr(layout.RANK), tl.constexpr(layout.IDS)
# Below the key of every logit.
_NOTHING = tl.constexpr(-(2**31))


def logprob_rows(logits: Tensor, tokens: Tensor, limit: int, room: int, *, sizes: Sizes, device: Device) -> Tensor:
    """See ``rosebatch_kernels.logprobs.reference``; tokens are contiguous."""
    rows, vocab = logits.shape
    assert limit <= room
    out = torch.empty(rows, layout.width(room), dtype=torch.int32, device=logits.device)
    if rows == 0:
        return out
    group = group_of(logits)
    segments = cdiv(vocab, sizes.segment)
    parts = cdiv(segments, sizes.summed)
    keys = torch.empty(rows, segments, dtype=torch.int32, device=logits.device)
    sums = torch.empty(rows, segments, dtype=torch.float32, device=logits.device)
    above = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    _sum_segments[(parts, rows)](
        logits=logits,
        group_stride=logits.stride(0) // group,
        vocab=vocab,
        tokens=tokens,
        segments=segments,
        keys=keys,
        sums=sums,
        above=above,
        GROUP=group,
        SEGMENT=sizes.segment,
        BLOCK=sizes.summed,
        num_warps=sizes.summing_warps,
        **launch_options(device),
    )
    _report[(rows,)](
        logits=logits,
        group_stride=logits.stride(0) // group,
        vocab=vocab,
        tokens=tokens,
        segments=segments,
        keys=keys,
        sums=sums,
        above=above,
        parts=parts,
        limit=min(limit, vocab),
        out=out,
        GROUP=group,
        SEGMENT=sizes.segment,
        BLOCK=next_power_of_2(segments),
        PARTS=next_power_of_2(parts),
        ROOM=room,
        PLACES=next_power_of_2(max(room, 1)),
        num_warps=sizes.reporting_warps,
        **launch_options(device),
    )
    return out


@triton.jit
def _key(x):
    """An integer with the order of the logits; a NaN is above all."""
    bits = tl.where(x == 0, 0, x.to(tl.int32, bitcast=True))
    bits = tl.where(x == x, bits, 0x7FC00000)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(key):
    """The logit of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _below(x, top):
    """Differences to the largest logit; where that is -inf, -inf in place of a NaN."""
    return x - tl.maximum(top, -3e38)


@triton.jit(do_not_specialize=["tokens"])
def _sum_segments(
    logits,
    group_stride,
    vocab,
    tokens,
    segments,
    keys,
    sums,
    above,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row = tl.program_id(1).to(tl.int64)
    base = logits + row * group_stride * GROUP
    chosen = tl.load(base + tl.maximum(tl.load(tokens + row), 0)).to(tl.float32)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = load(base, index[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :], vocab, GROUP)
    # Past the end of the row it is -inf: the maximum of a segment only if a token of it has that too.
    key = tl.max(_key(x), 1)
    tl.store(keys + row * segments + index, key, mask=index < segments)
    total = tl.sum(tl.exp(_below(x, _logit(key)[:, None])), 1)
    tl.store(sums + row * segments + index, total, mask=index < segments)
    tl.store(above + row * tl.num_programs(0) + tl.program_id(0), tl.sum((x > chosen).to(tl.int32)))


@triton.jit(do_not_specialize=["tokens", "limit"])
def _report(
    logits,
    group_stride,
    vocab,
    tokens,
    segments,
    keys,
    sums,
    above,
    parts,
    limit,
    out,
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    ROOM: tl.constexpr,
    PLACES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * group_stride * GROUP
    chosen = tl.load(base + tl.maximum(tl.load(tokens + row), 0)).to(tl.float32)
    index = tl.arange(0, BLOCK)
    key = tl.load(keys + row * segments + index, mask=index < segments, other=_NOTHING)
    total = tl.load(sums + row * segments + index, mask=index < segments, other=0.0)
    largest = tl.max(key)
    top = _logit(largest)
    share = tl.where(index < segments, tl.exp(_below(_logit(key), top)), 0.0)
    log_total = tl.log(tl.sum(total * share))
    place = tl.arange(0, PARTS)
    rank = 1 + tl.sum(tl.load(above + row * parts + place, mask=place < parts, other=0))
    out += row * (_IDS + 2 * ROOM)
    tl.store(out + _LOGPROB, (chosen - top - log_total).to(tl.int32, bitcast=True))
    tl.store(out + _RANK, rank)
    if ROOM > 0:
        place = tl.arange(0, PLACES)
        lane = tl.arange(0, SEGMENT)
        ids = tl.zeros([PLACES], tl.int32)
        likeliest = tl.zeros([PLACES], tl.int32)
        last_key = largest
        last = -1
        for number in tl.range(limit):
            best = tl.max(key)
            segment = tl.min(tl.where(key == best, index, BLOCK))
            offset = segment * SEGMENT + lane
            candidate = tl.where(offset < vocab, _key(load(base, offset, vocab, GROUP)), _NOTHING)
            # Of logits equal to the last one, those up to its id are taken.
            remains = (candidate == best) & ((best < last_key) | (offset > last))
            last_key = best
            last = tl.min(tl.where(remains, offset, vocab - 1))
            remains = (candidate < best) | ((candidate == best) & (offset > last))
            key = tl.where(index == segment, tl.max(tl.where(remains, candidate, _NOTHING)), key)
            ids = tl.where(place == number, last, ids)
            logprob = _logit(best) - top - log_total
            likeliest = tl.where(place == number, logprob.to(tl.int32, bitcast=True), likeliest)
        tl.store(out + _IDS + place, ids, mask=place < ROOM)
        tl.store(out + _IDS + ROOM + place, likeliest, mask=place < ROOM)
