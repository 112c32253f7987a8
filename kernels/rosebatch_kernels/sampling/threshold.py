"""Device functions of the sampling kernels: weights, the filters' threshold, and the pick above it.

A source is a row of logits, or the compacted list of those that the filters can keep: ``size`` numbers from ``base``
on, an address aligned to ``group`` numbers. ``top`` is the row's largest logit, and a logit's weight is
``2 ** ((logit - top) * scale)``.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs

import triton
import triton.language as tl

from rosebatch_kernels.common.wide_rows import load


@triton.jit
def uniform(low_word, high_word, position):
    """The fp64 number of ``philox.uniform``, from the seed's two 32-bit words."""
    seed = (high_word.to(tl.uint64) << 32) | low_word.to(tl.uint64)
    return (tl.randint(seed, position).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)


@triton.jit
def weight(x, top, scale):
    """Weights of logits: at most 1; -inf has 0."""
    # The maximum keeps top finite: in a segment of nothing but -inf, the difference would be NaN.
    return tl.exp2((x - tl.maximum(top, -3e38)) * scale)


@triton.jit
def crossing(weights, target, index):
    """The place where the running sum of ``weights [N]`` passes ``target``, and the sum before it.

    The place always has weight. If rounding keeps the sum from passing, it is the last such place. ``index`` is 0 to
    N - 1.
    """
    passed = tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0, index, 0))
    at = tl.min(tl.where((passed > target) & (weights > 0), index, last))
    return at, tl.sum(tl.where(index == at, passed - weights, 0.0))


@triton.jit
def pick_kept(
    base,
    size,
    bound,
    least,
    top,
    scale,
    k,
    p,
    whole,
    number,
    GROUP: tl.constexpr,
    BLANK_BITS: tl.constexpr,
    TILE: tl.constexpr,
    FITS: tl.constexpr,
):
    """Offset of the token that ``number`` picks among the tokens of a source that all filters keep.

    Args:
        base, size, GROUP: the source, which holds all logits >= bound.
        bound: at most the threshold of top-k; without top-k, at most that of top-p.
        least: the threshold of min-p.
        top, scale: of the weights.
        k: 0 keeps all.
        p: 1 keeps all.
        whole: sum of the weights of the whole row; used for top-p without top-k.
        number: in (0, 1).
        BLANK_BITS: number of lowest bits of the logits' fp32 form that are always 0.
        TILE: elements that are read at a time.
        FITS: whether one tile holds the source, which is then read once.
    """
    index = tl.arange(0, TILE)
    held = load(base, index, size, GROUP)
    threshold = bound
    # Top-k and top-p take turns in one loop: written twice, they would take twice as long to compile.
    for turn in tl.range(tl.where(k > 0, 0, 1), tl.where(p < 1, 2, 1)):
        by_weight = turn == 1
        goal = k.to(tl.float32)
        if by_weight:
            if k > 0:
                whole = _mass(held, base, size, threshold, top, scale, True, GROUP, TILE, FITS, 1)
            goal = p * whole
        threshold = _threshold(held, base, size, threshold, top, scale, goal, by_weight, GROUP, BLANK_BITS, TILE, FITS)
    return _pick(held, base, size, tl.maximum(threshold, least), top, scale, number, GROUP, TILE, FITS)


@triton.jit
def _mass(
    held,
    base,
    size,
    threshold,
    top,
    scale,
    by_weight,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    FITS: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Sum of the weights of the logits >= threshold, or their number; ``held`` is the source's first tile."""
    if FITS:
        return tl.sum(_share(held, threshold, top, scale, by_weight))
    total = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, size, TILE, loop_unroll_factor=UNROLLED):
        x = load(base, start + tl.arange(0, TILE), size, GROUP)
        total += _share(x, threshold, top, scale, by_weight)
    return tl.sum(total)


@triton.jit
def _share(x, threshold, top, scale, by_weight):
    """What each logit adds to the mass: its weight or 1, and 0 below the threshold."""
    return tl.where(x >= threshold, tl.where(by_weight, weight(x, top, scale), 1.0), 0.0)


@triton.jit
def _threshold(
    held,
    base,
    size,
    bound,
    top,
    scale,
    goal,
    by_weight,
    GROUP: tl.constexpr,
    BLANK_BITS: tl.constexpr,
    TILE: tl.constexpr,
    FITS: tl.constexpr,
):
    """The largest threshold from ``bound`` to ``top`` at which the mass reaches ``goal``; ``bound`` if none does.

    For top-k the mass is a count, and the result is the k-th largest logit. For top-p the mass is weight: the result is
    the lowest logit whose likelier ones sum to less than the goal.
    """
    low, high = _key(bound, BLANK_BITS), _key(top, BLANK_BITS)
    while low < high:
        middle = low + (high - low + 1) // 2
        pivot = _number(middle, BLANK_BITS)
        # Several tiles of a long source are in flight at a time. Elsewhere that is not worth the time to compile it.
        mass = _mass(held, base, size, pivot, top, scale, by_weight, GROUP, TILE, FITS, 4)
        bound = tl.where(mass >= goal, pivot, bound)
        low = tl.where(mass >= goal, middle, low)
        # With the same mass, a larger threshold would keep the same tokens: stop there.
        high = tl.where(mass > goal, high, tl.where(mass == goal, middle, middle - 1))
    return bound


@triton.jit
def _pick(held, base, size, threshold, top, scale, number, GROUP: tl.constexpr, TILE: tl.constexpr, FITS: tl.constexpr):
    """Offset where the running sum of the weights >= threshold passes ``number`` times its end."""
    target = (number * _mass(held, base, size, threshold, top, scale, True, GROUP, TILE, FITS, 1)).to(tl.float32)
    index = tl.arange(0, TILE)
    before = 0.0
    crossed = 0
    if not FITS:
        passed = 0.0
        for start in tl.range(0, size, TILE):
            x = load(base, start + index, size, GROUP)
            part = tl.sum(_share(x, threshold, top, scale, True))
            # The last tile with weight that begins at or below the target: there is one, however sums are rounded.
            crosses = (passed <= target) & (part > 0)
            crossed = tl.where(crosses, start, crossed)
            before = tl.where(crosses, passed, before)
            passed += part
        held = load(base, crossed + index, size, GROUP)
    at, _ = crossing(_share(held, threshold, top, scale, True), target - before, index)
    return crossed + at


@triton.jit
def lower_bound(maximum, total, whole, top, scale, k, p, vocab, index, segments, SEGMENT: tl.constexpr):
    """A lower bound of the smallest logit that top-k keeps or, without top-k, that top-p keeps.

    Args:
        maximum, total: ``[block]``: each segment's largest logit and sum of weights; ``segments`` of them exist.
        whole: sum of all weights.
        top, scale: of the weights.
        k: 0 keeps all.
        p: 1 keeps all.
        vocab: number of logits in the row.
        index: ``[block]``, 0 and up.
        SEGMENT: number of logits in a segment.
    """
    bound = top + float("-inf")
    # The weight that may be dropped, with a margin for the rounding of the sums.
    spare = (1.0 - p - 1e-5) * whole
    if k > 0:
        if k <= segments:
            bound = tl.min(tl.where(index < segments, maximum, top))
    elif spare > 0:
        # Even if every logit had the bound's weight, all of them together would fit into the spare weight.
        bound = top + tl.log2(spare / vocab) / scale
    low, high = _key(bound, 16), _key(top, 16)
    if (k <= 0) & (spare <= 0):
        high = low
    largest = weight(maximum, top, scale)
    while low < high:
        middle = low + (high - low + 1) // 2
        pivot = _number(middle, 16)
        above = maximum >= pivot
        if k > 0:
            holds = tl.sum(above.to(tl.int32)) >= k
        else:
            rest = tl.minimum(total - largest, (SEGMENT - 1) * weight(pivot, top, scale))
            holds = tl.sum(tl.where(above, rest, total)) <= spare
        bound = tl.where(holds, pivot, bound)
        low = tl.where(holds, middle, low)
        high = tl.where(holds, high, middle - 1)
    return bound


@triton.jit
def _key(x, BLANK_BITS: tl.constexpr):
    """An integer with the order of the numbers, without their lowest bits."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> BLANK_BITS).to(tl.int64)


@triton.jit
def _number(key, BLANK_BITS: tl.constexpr):
    """The smallest number of a key."""
    bits = (key << BLANK_BITS).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
