"""Device functions of softmax over keys, tile by tile: an online softmax (FlashAttention, arXiv 2205.14135).

Its sums are fp32: the largest score ``[ROWS]``, the sum of weights ``[ROWS]``, and the weighted sum of values
``[ROWS, WIDTH]``. Threads of a row add up its weights, in an order that goes by the tile's rows and warps. Where it
may not, the tensor cores add them up, like values, in ``[ROWS, COPIES]`` equal columns.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.common.kv_tiles import floats_of, load_tile
from rosebatch_kernels.common.scores import capped, sink_weights

# Weights of keys in a cache of e4m3 are multiplied by the value's scale and then fp16: times 2^12, small ones keep
# their digits there. They reach 2^12 because the largest score counts as that much less.
LIFT = tl.constexpr(12)
# Of values, so that such a product stays below fp16's 65504.
_LARGEST_SCALE = tl.constexpr(15.984375)
# Columns of a matrix product at least.
_COPIES = tl.constexpr(16)


@triton.jit
def no_key(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The sums over no key."""
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    return row_max, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def no_key_in_order(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The same, for weights that the tensor cores add up: all tiles of so many keys give a row the same bits."""
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    return row_max, tl.zeros([ROWS, _COPIES], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def one_column(sums):
    """Sums from ``no_key_in_order`` on, as all others are."""
    row_max, total, acc = sums
    return row_max, tl.max(total, 1), acc


@triton.jit
def queries(q, scores, pages):
    """Queries as ``attend`` takes them: for e4m3 scaled, then fp16, where unscaled ones may overflow."""
    if pages.cache.dtype.element_ty == tl.uint8:
        product = q.to(tl.float32) * scores.scale
        q = product if q.dtype == tl.float32 else product.to(tl.float16)
    return q


@triton.jit
def attend(q, tile, seen, sums, scores, EMPTY: tl.constexpr):
    """One tile's step.

    Args:
        q: ``[ROWS, WIDTH]``, from ``queries``.
        tile: ``KeyTile``.
        seen: mask of keys, which broadcasts to ``[ROWS, KEYS]``; None if all rows see all keys.
        sums: of the tiles before.
        scores: factors.
        EMPTY: whether a row may see no key of the tile.
    """
    row_max, total, acc = sums
    e4m3: tl.constexpr = tile.k.dtype == tl.uint8
    k = tile.k
    v = tile.v
    if e4m3:
        k, v = floats_of(k).to(q.dtype), floats_of(v).to(q.dtype)
    products = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[None, :] if q.shape[0] == 1 else dot(q, tl.trans(k))
    products = capped(products * (tile.k_scales[None, :] if e4m3 else scores.scale), scores)
    if seen is not None:
        products = tl.where(seen, products, float("-inf"))
    top = tl.max(products, 1)
    if e4m3:
        top = top - LIFT
    higher = tl.maximum(row_max, top)
    if EMPTY:
        # Exponents stay finite.
        higher = tl.maximum(higher, -1e30)
    weights = tl.exp2(products - higher[:, None])
    shrink = tl.exp2(row_max - higher)
    if len(total.shape) == 2:
        ones = tl.full([v.shape[0], _COPIES], 1.0, v.dtype)
        total = dot(weights.to(v.dtype), ones, total * shrink[:, None])
    else:
        total = total * shrink + tl.sum(weights, 1)
    if e4m3:
        v_scales = tile.v_scales
        if q.dtype == tl.float16:
            v_scales = tl.minimum(v_scales, _LARGEST_SCALE)
        weights = weights * v_scales[None, :]
    if q.shape[0] == 1:
        acc = acc * shrink[:, None] + tl.sum(tl.trans(weights) * v.to(tl.float32), 0)[None, :]
    else:
        acc = dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return higher, total, acc


@triton.jit
def seen_by(n, bounds):
    """Which keys ``n [KEYS]`` rows see: from the first one to before the end, of all rows or of each ``[ROWS]``."""
    first, end = bounds
    if len(end.shape) == 1:
        seen = (n[None, :] < end[:, None]) & (n[None, :] >= first[:, None])
    else:
        seen = ((n < end) & (n >= first))[None, :]
    return seen


@triton.jit
def attend_tiles(
    q,
    pages,
    keys,
    bounds,
    sums,
    scores,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    EMPTY: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The sums of decode attention with those over some tiles of keys.

    Args:
        q: from ``queries``.
        pages: of the keys.
        keys: the first key and the one after the last, the first tile and the one after the last, and the first
            tile's block.
        bounds: see ``seen_by``.
        sums: so far.
        scores: factors.
        EMPTY: whether a row of ``q [ROWS, WIDTH]`` may see no key of a tile.
    """
    first, end, start_tile, stop_tile, block = keys
    for tile in tl.range(start_tile, stop_tile, num_stages=STAGES):
        n = tile * TILE + tl.arange(0, TILE)
        keys_of_tile, block = load_tile(pages, block, tile * TILE, first, end, SHAPE, TILE, True, True)
        sums = attend(q, keys_of_tile, seen_by(n, bounds), sums, scores, EMPTY)
    return sums


@triton.jit
def leave(partials, line, sums, wanted, real, d, SHAPE: tl.constexpr):
    """Leave partial results of each row, those that are ``real``, in ``line [ROWS]``, for the program that merges."""
    row_max, total, acc = sums
    tl.store(partials.sums + line.to(tl.int64)[:, None] * SHAPE.D + d, acc, mask=wanted)
    tl.store(partials.stats + line * 2, row_max, mask=real)
    tl.store(partials.stats + line * 2 + 1, total, mask=real)


@triton.jit
def left(partials, line, wanted, real, d, SHAPE: tl.constexpr):
    """What ``leave`` left in these lines; rows that are not real stay finite."""
    row_max = tl.load(partials.stats + line * 2, mask=real, other=0.0, cache_modifier=".cg")
    total = tl.load(partials.stats + line * 2 + 1, mask=real, other=1.0, cache_modifier=".cg")
    place = partials.sums + line.to(tl.int64)[:, None] * SHAPE.D + d
    return row_max, total, tl.load(place, mask=wanted, other=0.0, cache_modifier=".cg")


@triton.jit
def fold(sums, part):
    """The sums over two lots of keys. The roundings are written out: no compiler chooses them for each kernel."""
    row_max, total, acc = sums
    top, weights, values = part
    higher = tl.maximum(row_max, top)
    shrink = tl.exp2(row_max - higher)
    factor = tl.exp2(top - higher)
    total = tl.fma(total, shrink, weights * factor)
    acc = tl.fma(acc, tl.broadcast_to(shrink[:, None], acc.shape), values * factor[:, None])
    return higher, total, acc


@triton.jit
def load_sink(sinks, head):
    """A query head's sink; None where there are none."""
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + head)
    return sink


@triton.jit
def values(sums, sink):
    """The result of rows, some of which may have seen no key: the weighted mean of values ``[ROWS, WIDTH]``."""
    row_max, total, acc = sums
    if sink is not None:
        total += sink_weights(sink, row_max)
    return acc / tl.maximum(total, 1e-30)[:, None]
