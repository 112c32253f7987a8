"""Device functions of softmax over the keys of decode attention, tile by tile: an online softmax."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from rosebatch_kernels.common.scores import scaled


@triton.jit
def no_key(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The online softmax's sums over no key: largest score, sum of weights, weighted sum of values."""
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    return row_max, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)


@triton.jit
def keys_of_tile(
    cache,
    table_row,
    block,
    last_block,
    tile,
    n,
    first,
    end,
    v_distance,
    head,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """K and V ``[TILE, WIDTH]`` of the keys ``n`` of a tile, zeros from ``end`` on, and the next tile's block.

    The tile begins in ``block``, which holds a key from ``first`` on if any does: blocks in front of that one may
    belong to others. The next block's number is loaded an iteration ahead. Loaded with the keys, it would
    be a link of their software pipeline, which would then wait for all of its loads before every tile.
    """
    d = tl.arange(0, WIDTH)[None, :]
    page = BLOCK * D
    seen = n < end
    if BLOCK % TILE == 0:
        rows = (
            cache
            + (block.to(tl.int64) * KV_HEADS + head) * page
            + ((tile * TILE) % BLOCK) * D
            + tl.arange(0, TILE)[:, None] * D
        )
        block = tl.load(table_row + tl.minimum(((tile + 1) * TILE) // BLOCK, last_block))
    else:
        seen &= n >= first
        blocks = tl.load(table_row + n // BLOCK, mask=seen, other=0).to(tl.int64)
        rows = cache + ((blocks * KV_HEADS + head) * page + (n % BLOCK) * D)[:, None]
    present = seen[:, None] & (d < D)
    k = tl.load(rows + d, mask=present, other=0.0)
    v = tl.load(rows + v_distance + d, mask=present, other=0.0)
    return k, v, block


@triton.jit
def attend(q, k, v, counts, row_max, total, acc, scale, cap, ROWS: tl.constexpr, CAPPED: tl.constexpr):
    """One tile's step of the online softmax."""
    if ROWS == 1:
        scores = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[None, :]
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scores = scaled(scores, scale, cap, CAPPED)
    scores = tl.where(counts[None, :], scores, float("-inf"))
    higher = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(row_max - higher)
    total = total * shrink + tl.sum(weights, 1)
    if ROWS == 1:
        acc = acc * shrink[:, None] + tl.sum(tl.trans(weights) * v.to(tl.float32), 0)[None, :]
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc
