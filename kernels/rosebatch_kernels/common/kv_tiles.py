"""Where K and V of a paged cache are, and how kernels load and store them: nothing else computes an address in it.

A layer's cache is ``[2, blocks, KV_HEADS, BLOCK, D]``, K before V, see ``rosebatch_kernels.common.heads.Shape``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Pages(NamedTuple):
    """K and V of one head of a sequence, inside of a kernel.

    Attributes:
        cache: pointer to the cache.
        head: K/V head, or several ``[R, 1]``.
        v_distance: elements from a key to its value, int64.
        table: pointer to the sequence's row of the block table.
    """

    cache: Any
    head: Any
    v_distance: Any
    table: Any


@triton.jit
def pages_of(cache, num_blocks, table, head, SHAPE: tl.constexpr):
    """The pages of K/V head ``head`` of the sequence with this row of the block table."""
    v_distance = num_blocks.to(tl.int64) * (SHAPE.KV_HEADS * SHAPE.BLOCK * SHAPE.D)
    return Pages(cache, head, v_distance, table)


@triton.jit
def pages_of_own(cache, num_blocks, table, head, SHAPE: tl.constexpr):
    """The same with the head in the pointer: an addition less where each thread computes places of its own."""
    return pages_of(cache + head * (SHAPE.BLOCK * SHAPE.D), num_blocks, table, 0, SHAPE)


@triton.jit
def place_in(pages, block, n, SHAPE: tl.constexpr):
    """Offsets from ``Pages.cache`` of the keys ``n``, which are in ``block``."""
    return (block.to(tl.int64) * SHAPE.KV_HEADS + pages.head) * (SHAPE.BLOCK * SHAPE.D) + n % SHAPE.BLOCK * SHAPE.D


@triton.jit
def place_of(pages, n, SHAPE: tl.constexpr):
    """Offsets from ``Pages.cache`` of the keys ``n``."""
    return place_in(pages, tl.load(pages.table + n // SHAPE.BLOCK), n, SHAPE)


@triton.jit
def store(pages, place, k, v, mask):
    """Write K and V ``[R, WIDTH]`` at the offsets ``place``, of one key or of keys ``[R, 1]``."""
    rows = pages.cache + place + tl.arange(0, k.shape[1])[None, :]
    tl.store(rows, k, mask=mask)
    tl.store(rows + pages.v_distance, v, mask=mask)


@triton.jit
def load_tile(
    pages,
    block,
    last_block,
    start,
    first,
    end,
    SHAPE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """K and V ``[KEYS, WIDTH]`` of the keys from ``start`` on, and the block of the keys after them.

    The first of them are in ``block``, which holds a key from ``first`` on: with WINDOW, blocks before that one may
    belong to others. With MASKED the keys from ``end`` on are zeros. The next block's number is loaded an iteration
    ahead. Loaded with the keys, it would be a link of their software pipeline. That would then wait for all of its
    loads before every tile.
    """
    offset = tl.arange(0, KEYS)
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    n = start + offset
    present = n < end
    if SHAPE.BLOCK % KEYS == 0:
        rows = pages.cache + place_in(pages, block, start, SHAPE) + offset[:, None] * SHAPE.D
        block = tl.load(pages.table + tl.minimum((start + KEYS) // SHAPE.BLOCK, last_block))
    else:
        if WINDOW:
            present &= n >= first
        blocks = tl.load(pages.table + n // SHAPE.BLOCK, mask=present, other=0)
        rows = pages.cache + place_in(pages, blocks, n, SHAPE)[:, None]
    if MASKED or SHAPE.D < SHAPE.WIDTH:
        wanted = present[:, None] & (d < SHAPE.D)
        k = tl.load(rows + d, mask=wanted, other=0.0)
        v = tl.load(rows + pages.v_distance + d, mask=wanted, other=0.0)
    else:
        k = tl.load(rows + d)
        v = tl.load(rows + pages.v_distance + d)
    return k, v, block


@triton.jit
def nearest(n, last):
    """The keys ``n``, or the nearest existing ones: those loads must be valid, though their values are not used."""
    return tl.minimum(tl.maximum(n, 0), last)


@triton.jit
def two_blocks(pages, n, last, SHAPE: tl.constexpr):
    """For the keys ``n [N]``: the index of their block, its offset, and the distance to the next block, ``[N]`` each.

    A piece of a run as long as a block is in these two. So the loop over it loads no block numbers, which would be a
    link of its software pipeline.
    """
    index = nearest(n, last) // SHAPE.BLOCK
    this = place_in(pages, tl.load(pages.table + index), 0, SHAPE)
    following = place_in(pages, tl.load(pages.table + tl.minimum(index + 1, last // SHAPE.BLOCK)), 0, SHAPE)
    return index, this, following - this


@triton.jit
def place_in_two(n, blocks, SHAPE: tl.constexpr):
    """Offsets ``[N, 1]`` from ``Pages.cache`` of keys that are in ``two_blocks``."""
    index, start, step = blocks
    # Not tl.where: the compiler would no longer see multiples of D, and would load the elements one by one.
    return (start + (n // SHAPE.BLOCK - index) * step + (n % SHAPE.BLOCK) * SHAPE.D)[:, None]


@triton.jit
def load_once(rows, mask):
    """Rows of K or V. No program reads them again before the next step, so they are the first to leave the caches."""
    return tl.load(rows, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def load_rows(rows, SHAPE: tl.constexpr):
    """Rows ``[N, WIDTH]`` of K or V at the pointers ``rows [N, 1]``, unmasked where a row is as wide as a tile."""
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    if SHAPE.D < SHAPE.WIDTH:
        return tl.load(rows + d, mask=d < SHAPE.D, other=0.0)
    return tl.load(rows + d)
