"""Triton kernels of sampling: every mode in two launches, of which one reads the vocabulary, once.

1. ``_summarise`` reads the logits in segments of 128 ids and keeps the maximum of each and, unless the row is greedy,
   its sum of weights ``exp((logit - maximum) / temperature)``. Its programs are independent, so a few rows already
   fill the GPU.
2. ``_choose``, one program per row, works on these summaries, a hundredth of the logits:

   - Greedy: the first segment that holds the row's maximum, then the first id in it.
   - Temperature alone: the segment in which the running sum passes the random number, then the id in it.
   - Filters: the summaries give a lower bound of every logit that can be kept. With top-k it is the k-th largest
     segment maximum, as so many segments hold a logit at least as large. With top-p it is the largest threshold for
     which what is dropped is certain to fit into 1 - p: in a segment below the threshold that is its whole sum, and in
     another one at most all but its maximum, and at most 127 times the threshold's weight. The few segments that
     reach the bound are read again, and the logits that do (usually tens to hundreds) are compacted in the order of
     their ids. On these the filters' thresholds are found exactly, by bisection over the bits of the logit, and then
     the token as above. Where more logits reach the bound than the list has room for (flat distributions, a k above
     the number of segments), the same runs over the row itself, at one read of it for each step of the bisection.

Whatever the input, the thresholds are exact but for the rounding of fp32 sums. Nothing depends on other rows, and sums
run in a fixed order. Inverse transform with a prefix sum in the order of ids, and thresholds in place of a sort, are
the ideas of FlashInfer's sampling kernels (arXiv 2501.01005); selection by the largest of each group follows
"Approximate top-k" (arXiv 2206.14286), here only as a bound.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.dependent_launch import launch_options, wait
from rosebatch_kernels.sampling.reference import COLDEST, HOTTEST
from rosebatch_kernels.sampling.threshold import crossing, load, lower_bound, pick_kept, uniform, weight

# Ids that share one maximum and one sum.
_SEGMENT = 128
# Segments of a program of the first kernel.
_SUMMARISED = 32
# Segments that are compacted at a time.
_GATHERED = 16
# Logits that the compacted list of a row has room for.
_ROOM = 8192
# Logits at a time of a list or a row. So few of a list are held by one small tile.
_MANY = 2048
_FEW = 1024
# Bits of the fp32 form of a logit that are always 0, so that bisection need not decide them.
_BLANK_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """See ``rosebatch_kernels.sampling.reference``; V is at most 2^20, a row of nothing but -inf gives 0.

    Rows of logits that all begin on 16 bytes are read 16 bytes at a time, to the end of the last 16 where these are
    still the tensor's memory; others number by number. The other arguments may have any stride.
    """
    assert logits.stride(-1) == 1, "the last axis is contiguous"
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return tokens
    group = 16 // logits.element_size()
    end = logits.storage_offset() + (rows - 1) * logits.stride(0) + triton.cdiv(vocab, group) * group
    room = end * logits.element_size() <= logits.untyped_storage().nbytes()
    if logits.data_ptr() % 16 or logits.stride(0) % group or not room:
        group = 1
    segments = triton.cdiv(vocab, _SEGMENT)
    maxima, sums = torch.empty(2, rows, segments, dtype=torch.float32, device=logits.device)
    reached = torch.empty(rows, segments, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, _ROOM, dtype=logits.dtype, device=logits.device)
    ids = torch.empty(rows, _ROOM, dtype=torch.int32, device=logits.device)
    shape = (logits, logits.stride(0) // group, vocab, segments)
    _summarise[(triton.cdiv(segments, _SUMMARISED), rows)](
        *shape,
        temperature,
        temperature.stride(0),
        maxima,
        sums,
        group=group,
        segment=_SEGMENT,
        block=_SUMMARISED,
        coldest=COLDEST,
        hottest=HOTTEST,
        num_warps=8,
        **launch_options(),
    )
    _choose[(rows,)](
        *shape,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        temperature.stride(0),
        top_k.stride(0),
        top_p.stride(0),
        min_p.stride(0),
        seeds.stride(0),
        seeds.stride(1),
        positions.stride(0),
        maxima,
        sums,
        reached,
        values,
        ids,
        tokens,
        group=group,
        segment=_SEGMENT,
        block=max(triton.next_power_of_2(segments), 32),
        room=_ROOM,
        many=_MANY,
        few=_FEW,
        gathered=_GATHERED,
        blank_bits=_BLANK_BITS[logits.dtype],
        coldest=COLDEST,
        hottest=HOTTEST,
        num_warps=8,
        **launch_options(),
    )
    return tokens


@triton.jit
def _scale(temperature, coldest: tl.constexpr, hottest: tl.constexpr):
    return 1.4426950408889634 / tl.minimum(tl.maximum(temperature, coldest), hottest)


@triton.jit(do_not_specialize=["temperature", "temperature_stride"])
def _summarise(
    logits,
    group_stride,
    vocab,
    segments,
    temperature,
    temperature_stride,
    maxima,
    sums,
    group: tl.constexpr,
    segment: tl.constexpr,
    block: tl.constexpr,
    coldest: tl.constexpr,
    hottest: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row = tl.program_id(1).to(tl.int64)
    heat = tl.load(temperature + row * temperature_stride)
    base = logits + row * group_stride * group
    index = tl.program_id(0) * block + tl.arange(0, block)
    x = load(base, index[:, None] * segment + tl.arange(0, segment)[None, :], vocab, group)
    maximum = tl.max(x, 1)
    tl.store(maxima + row * segments + index, maximum, mask=index < segments)
    if heat > 0:
        total = tl.sum(weight(x, maximum[:, None], _scale(heat, coldest, hottest)), 1)
        tl.store(sums + row * segments + index, total, mask=index < segments)


# Where the parameters stand changes with the number of rows, and is no reason to compile anew.
_PARAMETERS = ["temperature", "top_k", "top_p", "min_p", "seeds", "positions"]
_STRIDES = ["temperature_stride", "top_k_stride", "top_p_stride", "min_p_stride"]
_STRIDES += ["seed_stride", "word_stride", "position_stride"]


@triton.jit(do_not_specialize=_PARAMETERS + _STRIDES)
def _choose(
    logits,
    group_stride,
    vocab,
    segments,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    seed_stride,
    word_stride,
    position_stride,
    maxima,
    sums,
    reached,
    values,
    ids,
    tokens,
    group: tl.constexpr,
    segment: tl.constexpr,
    block: tl.constexpr,
    room: tl.constexpr,
    many: tl.constexpr,
    few: tl.constexpr,
    gathered: tl.constexpr,
    blank_bits: tl.constexpr,
    coldest: tl.constexpr,
    hottest: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row * temperature_stride)
    k = tl.load(top_k + row * top_k_stride)
    p = tl.load(top_p + row * top_p_stride)
    share = tl.load(min_p + row * min_p_stride)
    low_word = tl.load(seeds + row * seed_stride).to(tl.uint32, bitcast=True)
    high_word = tl.load(seeds + row * seed_stride + word_stride).to(tl.uint32, bitcast=True)
    position = tl.load(positions + row * position_stride).to(tl.uint32, bitcast=True)
    base = logits + row * group_stride * group
    index = tl.arange(0, block)
    lane = tl.arange(0, segment)
    maximum = tl.load(maxima + row * segments + index, mask=index < segments, other=float("-inf"))
    top = tl.max(maximum)
    # A row of nothing but -inf has no weights.
    if (heat == 0) | (top == float("-inf")):
        offset = tl.min(tl.where(maximum == top, index, segments - 1)) * segment
        x = load(base, offset + lane, vocab, group)
        token = offset + tl.min(tl.where(x == top, lane, segment - 1))
    else:
        scale = _scale(heat, coldest, hottest)
        number = uniform(low_word, high_word, position)
        total = tl.load(sums + row * segments + index, mask=index < segments, other=0.0)
        total *= weight(maximum, top, scale)
        whole = tl.sum(total)
        k = tl.where(k >= vocab, 0, k)
        if (k <= 0) & (p >= 1) & (share <= 0):
            target = (number * whole).to(tl.float32)
            crossed, before = crossing(total, target, index)
            offset = crossed * segment
            weights = weight(load(base, offset + lane, vocab, group), top, scale)
            crossed, before = crossing(weights, target - before, lane)
            token = offset + crossed
        else:
            # Min-p's threshold on the logit. The likeliest token stays.
            least = top + float("-inf")
            if share > 0:
                least = tl.minimum(top + tl.log2(share) / scale, top)
            bound = lower_bound(maximum, total, whole, top, scale, k, p, vocab, index, segments, segment)
            if (k <= 0) | (p >= 1):
                # Top-p after top-k is of a sum to which what min-p drops belongs.
                bound = tl.maximum(bound, least)
            # The segments that reach the bound, then the logits in them that do, both in the order of ids.
            reaches = (maximum >= bound) & (index < segments)
            count = tl.sum(reaches.to(tl.int32))
            found = room + 1
            if count <= room:
                tl.store(reached + row * segments + tl.cumsum(reaches.to(tl.int32), 0) - 1, index, mask=reaches)
                tl.debug_barrier()
                found = 0
                start = 0
                while (start < count) & (found <= room):
                    which = start + tl.arange(0, gathered)
                    which = tl.load(reached + row * segments + which, mask=which < count, other=segments)
                    offsets = which[:, None] * segment + lane[None, :]
                    x = load(base, offsets, vocab, group)
                    # Those of -inf have no weight; all that is outside is -inf too.
                    kept = ((x >= bound) & (x > float("-inf"))).to(tl.int32)
                    counts = tl.sum(kept, 1)
                    slot = found + (tl.cumsum(counts, 0) - counts)[:, None] + tl.cumsum(kept, 1) - 1
                    fits = (kept > 0) & (slot < room)
                    tl.store(values + row * room + slot, x.to(values.dtype.element_ty), mask=fits)
                    tl.store(ids + row * room + slot, offsets, mask=fits)
                    found += tl.sum(counts)
                    start += gathered
                tl.debug_barrier()
            # The list, or the row itself if it has no room.
            source, size = values + row * room, found
            if found > room:
                source, size = base, vocab
            if found <= few:
                at = pick_kept(source, size, bound, least, top, scale, k, p, whole, number, group, blank_bits, few)
            else:
                at = pick_kept(source, size, bound, least, top, scale, k, p, whole, number, group, blank_bits, many)
            token = at
            if found <= room:
                token = tl.load(ids + row * room + at)
    tl.store(tokens + row, tl.minimum(tl.maximum(token, 0), vocab - 1))
