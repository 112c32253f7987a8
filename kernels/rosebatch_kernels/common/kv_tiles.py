"""Where K and V of a paged cache are, and how kernels load and store them: nothing else computes an address in it.

A layer's cache is ``[2, blocks, KV_HEADS, BLOCK, D]``, K before V, see ``rosebatch_kernels.common.heads.Shape``. It may
hold bytes of e4m3. Then scales ``[2, blocks, KV_HEADS, BLOCK, 1]`` belong to it, see ``rosebatch_kernels.common.e4m3``.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rosebatch_kernels.common.e4m3 import LARGEST, MIN_HEAD_SCALE

_LARGEST = tl.constexpr(LARGEST)
_MIN_SCALE = tl.constexpr(MIN_HEAD_SCALE)


class Pages(NamedTuple):
    """K and V of one head of a sequence, inside of a kernel.

    Attributes:
        cache: pointer to the cache.
        head: K/V head, or several ``[R, 1]``.
        v_distance: elements from a key to its value, int64.
        table: pointer to the sequence's row of the block table.
        scales: pointer to the scales of a cache of e4m3, which is one of bytes; of no use for one of floats.
    """

    cache: Any
    head: Any
    v_distance: Any
    table: Any
    scales: Any


class KeyTile(NamedTuple):
    """Successive keys and their values, inside of a kernel.

    Attributes:
        k, v: ``[KEYS, WIDTH]``, as they are stored.
        k_scales, v_scales: ``[KEYS]`` fp32 factors on numbers of e4m3; of no use for floats.
    """

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any


@triton.jit
def pages_of(cache, scales, num_blocks, table, head, SHAPE: tl.constexpr):
    """The pages of K/V head ``head`` of the sequence with this row of the block table."""
    v_distance = num_blocks.to(tl.int64) * (SHAPE.KV_HEADS * SHAPE.BLOCK * SHAPE.D)
    # Triton 3.6 cannot return a tuple with None.
    if scales is None:
        scales = cache
    return Pages(cache, head, v_distance, table, scales)


@triton.jit
def pages_of_own(cache, num_blocks, table, head, SHAPE: tl.constexpr):
    """The same with the head in the pointer: an addition less where each thread computes places of its own."""
    return pages_of(cache + head * (SHAPE.BLOCK * SHAPE.D), None, num_blocks, table, 0, SHAPE)


@triton.jit
def place_in(pages, block, n, SHAPE: tl.constexpr):
    """Offsets from ``Pages.cache`` of the keys ``n``, which are in ``block``."""
    return (block.to(tl.int64) * SHAPE.KV_HEADS + pages.head) * (SHAPE.BLOCK * SHAPE.D) + n % SHAPE.BLOCK * SHAPE.D


@triton.jit
def place_of(pages, n, SHAPE: tl.constexpr):
    """Offsets from ``Pages.cache`` of the keys ``n``."""
    return place_in(pages, tl.load(pages.table + n // SHAPE.BLOCK), n, SHAPE)


@triton.jit
def store(pages, place, k, v, mask, SIZE: tl.constexpr):
    """Write K and V ``[R, WIDTH]`` at the offsets ``place``, of one key or of keys ``[R, 1]``.

    Returns:
        K and V as they are read again.
    """
    rows = pages.cache + place + tl.arange(0, k.shape[1])[None, :]
    if pages.cache.dtype.element_ty == tl.uint8:
        scales = pages.scales + place // SIZE + tl.zeros([k.shape[0], 1], tl.int64)
        there = tl.max(mask.to(tl.int32), 1, keep_dims=True) > 0
        codes, scale = _quantized(tl.where(mask, k, 0.0))
        tl.store(rows, codes, mask=mask)
        tl.store(scales, scale, mask=there)
        k = floats_of(codes).to(tl.float32) * scale
        codes, scale = _quantized(tl.where(mask, v, 0.0))
        tl.store(rows + pages.v_distance, codes, mask=mask)
        tl.store(scales + pages.v_distance // SIZE, scale, mask=there)
        v = floats_of(codes).to(tl.float32) * scale
    else:
        tl.store(rows, k, mask=mask)
        tl.store(rows + pages.v_distance, v, mask=mask)
    return k, v


@triton.jit
def stored(pages, place, mask, SIZE: tl.constexpr):
    """K and V ``[1, WIDTH]`` of one key at the offset ``place``, as ``store`` returned them."""
    row = pages.cache + place + tl.arange(0, mask.shape[1])[None, :]
    k = tl.load(row, mask=mask, other=0)
    v = tl.load(row + pages.v_distance, mask=mask, other=0)
    if pages.cache.dtype.element_ty == tl.uint8:
        scale = pages.scales + place // SIZE
        k = floats_of(k).to(tl.float32) * tl.load(scale)
        v = floats_of(v).to(tl.float32) * tl.load(scale + pages.v_distance // SIZE)
    return k, v


@triton.jit
def _quantized(x):
    """Bytes of e4m3 of rows ``[R, WIDTH]``, and a scale of each row ``[R, 1]``: ``quantized`` of the reference."""
    x = x.to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1, keep_dims=True), _LARGEST), _MIN_SCALE)
    x = tl.div_rn(x, scale)
    # By integers: Triton's interpreter rounds otherwise. Below 2^-6, numbers are multiples of 2^-9, as in [2^14, 2^15).
    bits = x.to(tl.int32, bitcast=True)
    # A GPU writes NaN with all bits: the smallest NaN keeps the sum below from overflowing.
    size = tl.minimum(bits & 0x7FFFFFFF, 0x7FC00000)
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    large = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    code = tl.minimum(tl.where(tl.abs(x) < 0.015625, small, large), 127)
    return (code | ((bits >> 24) & 128)).to(tl.uint8), scale


@triton.jit
def floats_of(codes):
    """fp16 of bytes of e4m3: the one type that the hardware makes of them."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def load_tile(
    pages,
    block,
    start,
    first,
    end,
    SHAPE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The ``KeyTile`` of the keys from ``start`` on, and the block of the keys after them.

    The first of them are in ``block``, which holds a key from ``first`` on: with WINDOW, blocks before that one may
    belong to others. With MASKED the keys from ``end`` on are zeros. The next block's number is loaded an iteration
    ahead. Loaded with the keys, it would be a link of their software pipeline. That would then wait for all of its
    loads before every tile. The smaller key is divided, not the block: prefill is 4 % slower on an H100 otherwise.
    ptxas then loads the number before the products, and puts the exponentials before the multiplications.
    """
    offset = tl.arange(0, KEYS)
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    n = start + offset
    present = n < end
    e4m3: tl.constexpr = pages.cache.dtype.element_ty == tl.uint8
    k_scales = present
    v_scales = present
    if SHAPE.BLOCK % KEYS == 0:
        if e4m3:
            k_scales, v_scales = _load_scales(
                pages, _row_in(pages, block, start, SHAPE) + offset, present, SHAPE, MASKED
            )
        rows = pages.cache + place_in(pages, block, start, SHAPE) + offset[:, None] * SHAPE.D
        block = tl.load(pages.table + tl.minimum(start + KEYS, end - 1) // SHAPE.BLOCK)
    else:
        if WINDOW:
            present &= n >= first
        blocks = tl.load(pages.table + n // SHAPE.BLOCK, mask=present, other=0)
        rows = pages.cache + place_in(pages, blocks, n, SHAPE)[:, None]
        if e4m3:
            k_scales, v_scales = _load_scales(pages, _row_in(pages, blocks, n, SHAPE), present, SHAPE, MASKED)
    if MASKED or SHAPE.D < SHAPE.WIDTH:
        wanted = present[:, None] & (d < SHAPE.D)
        k = tl.load(rows + d, mask=wanted, other=0.0)
        v = tl.load(rows + pages.v_distance + d, mask=wanted, other=0.0)
    else:
        k = tl.load(rows + d)
        v = tl.load(rows + pages.v_distance + d)
    return KeyTile(k, v, k_scales, v_scales), block


@triton.jit
def _row_in(pages, block, n, SHAPE: tl.constexpr):
    """Offsets from ``Pages.scales`` of the keys ``n``, which are in ``block``."""
    return (block.to(tl.int64) * SHAPE.KV_HEADS + pages.head) * SHAPE.BLOCK + n % SHAPE.BLOCK


@triton.jit
def _load_scales(pages, rows, present, SHAPE: tl.constexpr, MASKED: tl.constexpr):
    """The scales ``[KEYS]`` of K and of V at the offsets ``rows [KEYS]``."""
    scales = pages.scales + rows
    v_distance = pages.v_distance // SHAPE.D
    if MASKED:
        return tl.load(scales, present, other=0.0), tl.load(scales + v_distance, present, other=0.0)
    return tl.load(scales), tl.load(scales + v_distance)


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
