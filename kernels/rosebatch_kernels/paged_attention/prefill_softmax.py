"""Device functions of prefill attention: a tile of queries over keys, tile by tile, with an online softmax."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from rosebatch_kernels.common.scores import scaled


@triton.jit
def keys_of_tile(
    cache,
    table,
    block,
    start,
    first,
    end,
    head,
    v_distance,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """K and V ``[KEYS, WIDTH]`` of the positions from ``start`` on, and the block of the keys after them.

    The first of them lie in ``block``, which holds a key from ``first`` on: with WINDOW, blocks in front of that one
    may belong to others. With MASKED the keys from ``end`` on are zeros. The next block's number is loaded an iteration
    ahead. Loaded with the keys, it would be a link of their software pipeline, which would then wait for all of its
    loads before every tile.
    """
    offset = tl.arange(0, KEYS)
    d = tl.arange(0, WIDTH)[None, :]
    n = start + offset
    present = n < end
    if BLOCK % KEYS == 0:
        rows = cache + (block.to(tl.int64) * KV_HEADS + head) * (BLOCK * D) + (start % BLOCK) * D + offset[:, None] * D
        block = tl.load(table + tl.minimum(start + KEYS, end - 1) // BLOCK)
    else:
        if WINDOW:
            present &= n >= first
        blocks = tl.load(table + n // BLOCK, mask=present, other=0).to(tl.int64)
        rows = cache + ((blocks * KV_HEADS + head) * (BLOCK * D) + (n % BLOCK) * D)[:, None]
    if MASKED or D < WIDTH:
        wanted = present[:, None] & (d < D)
        k = tl.load(rows + d, mask=wanted, other=0.0)
        v = tl.load(rows + v_distance + d, mask=wanted, other=0.0)
    else:
        k = tl.load(rows + d)
        v = tl.load(rows + v_distance + d)
    return k, v, block


@triton.jit
def attend(q, k, v, seen, row_max, total, acc, scale, cap, MASKED: tl.constexpr, CAPPED: tl.constexpr):
    """One tile's step of the online softmax: largest score, sum of weights, weighted sum of values."""
    scores = scaled(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, cap, CAPPED)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(row_max, tl.max(scores, 1))
    if MASKED:
        # A row may see no key of a tile: keep its exponents finite.
        higher = tl.maximum(higher, -1e30)
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(row_max - higher)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc
