"""Triton kernels of sampling: two launches for every mode; only the first reads the whole vocabulary, once.

1. ``_summarise`` reads the logits in segments of 128 ids. It keeps each segment's maximum and, unless the row is
   greedy, its sum of weights ``exp((logit - maximum) / temperature)``. Its programs are independent, so a few rows
   already fill the GPU.
2. ``_choose``, one program for each row, works on these summaries, a hundredth of the logits:

   - Greedy: it takes the first segment that holds the row's maximum, then the first such id in it.
   - Temperature alone: it takes the segment where the running sum passes the random number, then the id in it.
   - Filters: the summaries give a lower bound of every logit that the filters can keep. With top-k the bound is the
     k-th largest segment maximum, because k segments hold a logit at least as large. With top-p it is the largest
     threshold for which the dropped weight certainly fits into 1 - p. A segment below the threshold drops its whole
     sum. Another one drops at most all but its maximum, and at most 127 times the threshold's weight. The kernel reads
     the few segments that reach the bound again. It compacts the logits that reach it (usually tens to hundreds), in
     the order of their ids. On these it finds the filters' exact thresholds by bisection over the bits of the logit.
     Then it finds the token as above. The list may have too little room: for flat distributions, or a k above the
     number of segments. The same code then runs over the row itself and reads it once for each bisection step.

For every input the thresholds are exact, except for the rounding of fp32 sums. No row depends on another, and sums run
in a fixed order. Two ideas are those of FlashInfer's sampling kernels (arXiv 2501.01005): the inverse transform by a
prefix sum in the order of ids, and thresholds in place of a sort. Selection by the largest of each group follows
"Approximate top-k" (arXiv 2206.14286); here it only gives a bound.
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
from rosebatch_kernels.common.tokens import NOT_FINITE
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2
from rosebatch_kernels.common.wide_rows import group_of, load
from rosebatch_kernels.sampling.distribution import COLDEST, HOTTEST
from rosebatch_kernels.sampling.threshold import crossing, lower_bound, pick_kept, uniform, weight


@dataclass(frozen=True)
class Sizes:
    """Sizes of both kernels, the measured ones on an H100 80GB HBM3.

    Attributes:
        segment: ids that share one maximum and one sum.
        summarised: segments of a program of ``_summarise``.
        gathered: segments that ``_choose`` compacts at a time.
        room: logits that fit into the compacted list of a row.
        many: logits of a list or a row that are read at a time.
        few: the same for lists that one tile of this size holds.
        warps: of a program of either.
    """

    segment: int = 128
    summarised: int = 32
    gathered: int = 16
    room: int = 8192
    many: int = 2048
    few: int = 1024
    warps: int = 8


SIZES = table(Sizes())

_NOT_FINITE = tl.constexpr(NOT_FINITE)

# Lowest bits of a logit's fp32 form that are always 0: bisection need not decide them.
_BLANK_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """See ``rosebatch_kernels.sampling.reference``; V is at most 2^20.

    How logits are read: ``group_of``. The other arguments may have any stride.
    """
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return tokens
    group = group_of(logits)
    segments = cdiv(vocab, sizes.segment)
    # Two tensors, which both begin on 16 bytes: else Triton would compile the kernels for both cases.
    maxima, sums = (torch.empty(rows, segments, dtype=torch.float32, device=logits.device) for _ in range(2))
    reached = torch.empty(rows, segments, dtype=torch.int32, device=logits.device)
    values = torch.empty(rows, sizes.room, dtype=logits.dtype, device=logits.device)
    ids = torch.empty(rows, sizes.room, dtype=torch.int32, device=logits.device)
    _summarise[(cdiv(segments, sizes.summarised), rows)](
        logits=logits,
        group_stride=logits.stride(0) // group,
        vocab=vocab,
        segments=segments,
        temperature=temperature,
        temperature_stride=temperature.stride(0),
        maxima=maxima,
        sums=sums,
        GROUP=group,
        SEGMENT=sizes.segment,
        BLOCK=sizes.summarised,
        COLDEST=COLDEST,
        HOTTEST=HOTTEST,
        num_warps=sizes.warps,
        **launch_options(device),
    )
    _choose[(rows,)](
        logits=logits,
        group_stride=logits.stride(0) // group,
        vocab=vocab,
        segments=segments,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        positions=positions,
        temperature_stride=temperature.stride(0),
        top_k_stride=top_k.stride(0),
        top_p_stride=top_p.stride(0),
        min_p_stride=min_p.stride(0),
        seed_stride=seeds.stride(0),
        word_stride=seeds.stride(1),
        position_stride=positions.stride(0),
        maxima=maxima,
        sums=sums,
        reached=reached,
        values=values,
        ids=ids,
        tokens=tokens,
        GROUP=group,
        SEGMENT=sizes.segment,
        BLOCK=max(next_power_of_2(segments), 32),
        ROOM=sizes.room,
        MANY=sizes.many,
        FEW=sizes.few,
        GATHERED=sizes.gathered,
        BLANK_BITS=_BLANK_BITS[logits.dtype],
        COLDEST=COLDEST,
        HOTTEST=HOTTEST,
        num_warps=sizes.warps,
        **launch_options(device),
    )
    return tokens


@triton.jit
def _scale(temperature, COLDEST: tl.constexpr, HOTTEST: tl.constexpr):
    return 1.4426950408889634 / tl.minimum(tl.maximum(temperature, COLDEST), HOTTEST)


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
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    COLDEST: tl.constexpr,
    HOTTEST: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    row = tl.program_id(1).to(tl.int64)
    heat = tl.load(temperature + row * temperature_stride)
    base = logits + row * group_stride * GROUP
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = load(base, index[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :], vocab, GROUP)
    # A maximum alone would skip a NaN.
    maximum = tl.max(tl.where(x == x, x, float("inf")), 1)
    tl.store(maxima + row * segments + index, maximum, mask=index < segments)
    if heat > 0:
        total = tl.sum(weight(x, maximum[:, None], _scale(heat, COLDEST, HOTTEST)), 1)
        tl.store(sums + row * segments + index, total, mask=index < segments)


# The addresses of the parameters change with the number of rows: without this, Triton would compile for each.
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
    GROUP: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    MANY: tl.constexpr,
    FEW: tl.constexpr,
    GATHERED: tl.constexpr,
    BLANK_BITS: tl.constexpr,
    COLDEST: tl.constexpr,
    HOTTEST: tl.constexpr,
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
    base = logits + row * group_stride * GROUP
    index = tl.arange(0, BLOCK)
    lane = tl.arange(0, SEGMENT)
    maximum = tl.load(maxima + row * segments + index, mask=index < segments, other=float("-inf"))
    top = tl.max(maximum)
    finite = (top > float("-inf")) & (top < float("inf"))
    # Without a finite maximum there are no weights.
    if (heat == 0) | (finite == 0):
        token = _first_of_largest(base, vocab, maximum, top, index, lane, segments, GROUP)
    else:
        scale = _scale(heat, COLDEST, HOTTEST)
        number = uniform(low_word, high_word, position)
        total = tl.load(sums + row * segments + index, mask=index < segments, other=0.0)
        total *= weight(maximum, top, scale)
        whole = tl.sum(total)
        k = tl.where(k >= vocab, 0, k)
        if (k <= 0) & (p >= 1) & (share <= 0):
            token = _pick_from_all(base, vocab, total, number * whole, top, scale, index, lane, GROUP)
        else:
            # Min-p's threshold on the logit. The likeliest token stays.
            least = top + float("-inf")
            if share > 0:
                least = tl.minimum(top + tl.log2(share) / scale, top)
            bound = lower_bound(maximum, total, whole, top, scale, k, p, vocab, index, segments, SEGMENT)
            if (k <= 0) | (p >= 1):
                # Top-p after top-k counts the weight of tokens that min-p drops: then the bound must not drop them.
                bound = tl.maximum(bound, least)
            reaches = (maximum >= bound) & (index < segments)
            found = _compact(
                base, row, vocab, bound, reaches, index, lane, segments, reached, values, ids, GROUP, ROOM, GATHERED
            )
            # The list, or the row itself if the list has no room.
            source, size = values + row * ROOM, found
            if found > ROOM:
                source, size = base, vocab
            if found <= FEW:
                at = pick_kept(
                    source, size, bound, least, top, scale, k, p, whole, number, GROUP, BLANK_BITS, FEW, True
                )
            else:
                at = pick_kept(
                    source, size, bound, least, top, scale, k, p, whole, number, GROUP, BLANK_BITS, MANY, False
                )
            token = at
            if found <= ROOM:
                token = tl.load(ids + row * ROOM + at)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    tl.store(tokens + row, tl.where(finite, token, _NOT_FINITE))


@triton.jit
def _first_of_largest(base, vocab, maximum, top, index, lane, segments, GROUP: tl.constexpr):
    """The lowest id of the largest logit; ``lane [segment]`` is 0 and up."""
    segment: tl.constexpr = lane.shape[0]
    offset = tl.min(tl.where(maximum == top, index, segments - 1)) * segment
    x = load(base, offset + lane, vocab, GROUP)
    return offset + tl.min(tl.where(x == top, lane, segment - 1))


@triton.jit
def _pick_from_all(base, vocab, total, target, top, scale, index, lane, GROUP: tl.constexpr):
    """The id where the running sum of all weights passes ``target``; ``total [block]`` are the segments' sums."""
    target = target.to(tl.float32)
    crossed, before = crossing(total, target, index)
    offset = crossed * lane.shape[0]
    weights = weight(load(base, offset + lane, vocab, GROUP), top, scale)
    crossed, before = crossing(weights, target - before, lane)
    return offset + crossed


@triton.jit
def _compact(
    base,
    row,
    vocab,
    bound,
    reaches,
    index,
    lane,
    segments,
    reached,
    values,
    ids,
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    GATHERED: tl.constexpr,
):
    """Write the row's logits >= bound and their ids to its lists in ``values`` and ``ids``, in the order of the ids.

    Returns their number, or a number above ``room`` if the lists have no room for them.

    Args:
        reaches: ``[block]``, which of the ``segments`` segments hold such a logit.
        index, lane: ``[block]`` and ``[segment]``, 0 and up.
        reached: scratch memory, ``segments`` int32 for each row.
    """
    segment: tl.constexpr = lane.shape[0]
    count = tl.sum(reaches.to(tl.int32))
    found = ROOM + 1
    if count <= ROOM:
        tl.store(reached + row * segments + tl.cumsum(reaches.to(tl.int32), 0) - 1, index, mask=reaches)
        tl.debug_barrier()
        found = 0
        start = 0
        while (start < count) & (found <= ROOM):
            which = start + tl.arange(0, GATHERED)
            which = tl.load(reached + row * segments + which, mask=which < count, other=segments)
            offsets = which[:, None] * segment + lane[None, :]
            x = load(base, offsets, vocab, GROUP)
            # -inf has no weight; places outside of the row are -inf too.
            kept = ((x >= bound) & (x > float("-inf"))).to(tl.int32)
            counts = tl.sum(kept, 1)
            slot = found + (tl.cumsum(counts, 0) - counts)[:, None] + tl.cumsum(kept, 1) - 1
            fits = (kept > 0) & (slot < ROOM)
            tl.store(values + row * ROOM + slot, x.to(values.dtype.element_ty), mask=fits)
            tl.store(ids + row * ROOM + slot, offsets, mask=fits)
            found += tl.sum(counts)
            start += GATHERED
        tl.debug_barrier()
    return found
