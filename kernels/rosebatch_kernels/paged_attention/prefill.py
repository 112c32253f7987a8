"""Prefill attention over the paged cache in Triton: packed chunks of many sequences, each over its prefix and itself.

One program serves a tile of successive query tokens of one sequence and one query head. It walks over that sequence's
keys with an online softmax (FlashAttention, arXiv 2205.14135). The chunk's own K and V are in the cache already. So it
reads a prefix from an earlier step, or from another sequence, like the rest.

Hopper has a kernel of its own for most calls, see ``prefill_hopper``.
"""

from collections.abc import Callable
from functools import cache as once

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.device import HOPPER, INTERPRETER, Device, can_describe
from rosebatch_kernels.common.kv_tiles import load_tile, pages_of
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.scores import score_factors
from rosebatch_kernels.common.sizes import value_at
from rosebatch_kernels.common.tiles import TILE_ROWS as TILE_ROWS
from rosebatch_kernels.common.tiles import (
    load_queries,
    prefill_arguments,
    rows_of_tile,
    store_result,
    tile_of_program,
)
from rosebatch_kernels.paged_attention.online_softmax import attend, load_sink, no_key, queries, values
from rosebatch_kernels.paged_attention.sizes import HopperProgram, Sizes, prefill_program_of

# Channels of a head that the registers of Hopper's own kernel hold.
_MAX_SIZE_ON_HOPPER = 256
# Its copies have a multiple of so many tokens: shared memory has them in an order that recurs.
_COPIED_TOKENS = 8


def prefill(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
    key_ends: Tensor | None = None,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """Attention of chunks of tokens, packed one after the other.

    Args:
        q: ``[T, at least heads · D]``, rows at any stride: q stands first in each.
        cache: ``[2, blocks, kv_heads, block_size, D]``, the chunks' own K and V included.
        block_table: ``[S, M]`` int32 block ids, rows at any stride.
        tiles: ``[N, 4]`` int32: row of the block table, first row in q, position of that row, number of rows (at
            most ``TILE_ROWS``, 0 for padding). The result is undefined in rows of q that no tile covers.
        num_heads: query heads, a multiple of kv_heads.
        scale: factor on q·k.
        window: keys that a token sees, its own included; 0 for all. Blocks without a key that a tile sees are not read.
        soft_cap, sinks, scales: see ``rosebatch_kernels.paged_attention.decode``.
        key_ends: ``[T]`` int32, the place after the last key that each row of q sees, its own place plus one at least;
            None where it is that.
        sizes: of programs.

    Returns:
        ``[T, heads · D]``.
    """
    on_hopper = hopper_program(q, cache, num_heads=num_heads, scale=scale, sizes=sizes, device=device)
    kernel = _hopper_kernel() if on_hopper and key_ends is None else None
    if kernel is not None:
        options = {"window": window, "soft_cap": soft_cap, "sinks": sinks, "program": on_hopper, "device": device}
        return kernel(q, cache, block_table, tiles, num_heads=num_heads, scale=scale, **options)
    out, arguments = prefill_arguments(q, cache, block_table, tiles, num_heads=num_heads)
    program = prefill_program_of(cache.shape[-1], q.dtype, e4m3=scales is not None, sizes=sizes)
    _prefill[(num_heads, len(tiles))](
        **arguments,
        scales=scales,
        scores=score_factors(scale, soft_cap),
        sinks=sinks,
        key_ends=key_ends,
        window=window or None,
        KEYS=program.keys,
        STAGES=program.stages,
        num_warps=program.warps,
        **({} if sizes.prefill.fuses else {"enable_fp_fusion": False}),
        **launch_options(device),
    )
    return out


def hopper_program(
    q: Tensor, cache: Tensor, *, num_heads: int, scale: float, sizes: Sizes, device: Device
) -> HopperProgram | None:
    """Sizes of Hopper's own kernel for a call of ``prefill``; None if the call is not for it.

    It takes tensors of 16 bits alone, whose addresses and strides are multiples of 16 bytes: TMA wants that. Pairs of
    query heads share a K/V head: of three, one would leave half of a program idle. Scores are compared before they are
    scaled, so the scale is positive.
    """
    _, _, kv_heads, block_size, size = cache.shape
    group = num_heads // kv_heads
    if not sizes.prefill.hopper or device.arch != HOPPER or device == INTERPRETER:
        return None
    is_narrow = q.dtype == cache.dtype and q.dtype.itemsize == 2
    has_strides = can_describe(size, q.dtype) and can_describe(q.stride(0), q.dtype) and cache.is_contiguous()
    is_aligned = has_strides and not any(x.data_ptr() % 16 for x in (q, cache))
    in_pieces = block_size % _COPIED_TOKENS == 0 and size <= _MAX_SIZE_ON_HOPPER
    if not (is_narrow and is_aligned and in_pieces and group not in (1, 3) and scale > 0):
        return None
    return value_at(sizes.prefill.hopper, size)


@once
def _hopper_kernel() -> Callable[..., Tensor] | None:
    """Hopper's own kernel; None if this Triton's Gluon, which is experimental, lacks what it is written with.

    Imported here: Gluon takes 0.1 s, which other runs need not spend.
    """
    try:
        from rosebatch_kernels.paged_attention.prefill_hopper import prefill_hopper
    except (ImportError, AttributeError):
        return None
    return prefill_hopper


@triton.jit(do_not_specialize=["num_blocks"])
def _prefill(
    out,
    q,
    cache,
    scales,
    block_table,
    tiles,
    scores,
    sinks,
    key_ends,
    num_blocks,
    q_stride,
    table_stride,
    window,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    sequence, first_row, position, count = tile_of_program(tiles)
    head = tl.program_id(0)
    table = block_table + sequence * table_stride
    pages = pages_of(cache, scales, num_blocks, table, head // SHAPE.GROUP, SHAPE)
    rows, mine = rows_of_tile(first_row, count, ROWS, SHAPE)
    sink = load_sink(sinks, head)
    query = queries(load_queries(q, q_stride, head, rows, mine, SHAPE), scores, pages)
    sums = no_key(ROWS, SHAPE.WIDTH)
    own = position + tl.arange(0, ROWS)
    last = own
    end = position + count
    stop = end
    if key_ends is not None:
        r = tl.arange(0, ROWS)
        last = tl.maximum(tl.load(key_ends + first_row + r, mask=r < count, other=0) - 1, own)
        stop = tl.maximum(tl.max(tl.where(r < count, last, 0)) + 1, end)
    # Every row of the tile sees the keys from `full` up to `whole`: only the others need a mask.
    first = 0
    start = 0
    full = 0
    whole = (position + 1) // KEYS * KEYS
    if window is not None:
        first = tl.maximum(position + 1 - window, 0)
        start = first // KEYS * KEYS
        whole = tl.maximum(whole, start)
        full = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS, whole)
    # A tile of padding may have no row of the table.
    block = tl.load(table + start // SHAPE.BLOCK, mask=count > 0, other=0)
    if window is not None:
        for n in tl.range(start, full, KEYS, num_stages=STAGES):
            tile, block = load_tile(pages, block, n, first, stop, SHAPE, KEYS, True, True)
            sums = attend(query, tile, _seen(n, own, last, window, KEYS), sums, scores, True)
    for n in tl.range(full, whole, KEYS, num_stages=STAGES):
        tile, block = load_tile(pages, block, n, first, stop, SHAPE, KEYS, False, window is not None)
        sums = attend(query, tile, None, sums, scores, False)
    for n in tl.range(whole, stop, KEYS, num_stages=STAGES):
        tile, block = load_tile(pages, block, n, first, stop, SHAPE, KEYS, True, window is not None)
        sums = attend(query, tile, _seen(n, own, last, window, KEYS), sums, scores, True)
    store_result(out, head, rows, mine, values(sums, sink), SHAPE)


@triton.jit
def _seen(start, own, last, window, KEYS: tl.constexpr):
    """Which keys from ``start`` on the rows at positions ``own [ROWS]`` see, up to those at ``last [ROWS]``."""
    key = start + tl.arange(0, KEYS)[None, :]
    seen = key <= last[:, None]
    if window is not None:
        seen = seen & (key > own[:, None] - window)
    return seen
