"""Prefill attention over the paged cache in Triton: packed chunks of many sequences, each over its prefix and itself.

One program serves a tile of successive query tokens of one sequence and one query head. It walks over that sequence's
keys with an online softmax (FlashAttention, arXiv 2205.14135). The chunk's own K and V are in the cache already, so it
reads a prefix from an earlier step, or from another sequence, like the rest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.scores import score_factors, sink_weights
from rosebatch_kernels.common.tiles import TILE_ROWS as TILE_ROWS
from rosebatch_kernels.common.tiles import tile_of_program
from rosebatch_kernels.paged_attention.prefill_softmax import attend, keys_of_tile
from rosebatch_kernels.paged_attention.sizes import SIZES, PrefillSizes


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
    sizes: PrefillSizes = SIZES.measured.prefill,
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
        soft_cap, sinks: see ``rosebatch_kernels.paged_attention.decode``.
        sizes: of programs.

    Returns:
        ``[T, heads · D]``.
    """
    _, blocks, kv_heads, block_size, size = cache.shape
    out = torch.empty(len(q), num_heads * size, dtype=q.dtype, device=q.device)
    width = max(16, triton.next_power_of_2(size))
    scale, cap = score_factors(scale, soft_cap)
    program = sizes.narrow if q.dtype.itemsize == 2 else sizes.fp32
    _prefill[(num_heads, len(tiles))](
        out=out,
        q=q,
        cache=cache,
        block_table=block_table,
        tiles=tiles,
        scale=scale,
        num_blocks=blocks,
        q_stride=q.stride(0),
        table_stride=block_table.stride(0),
        window=window,
        cap=cap,
        sinks=q if sinks is None else sinks,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        D=size,
        WIDTH=width,
        BLOCK=block_size,
        ROWS=TILE_ROWS,
        KEYS=program.keys,
        WINDOW=window > 0,
        CAPPED=soft_cap > 0,
        SINKS=sinks is not None,
        STAGES=program.stages,
        num_warps=program.warps,
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["num_blocks"])
def _prefill(
    out,
    q,
    cache,
    block_table,
    tiles,
    scale,
    num_blocks,
    q_stride,
    table_stride,
    window,
    cap,
    sinks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    sequence, first_row, position, count = tile_of_program(tiles)
    head = tl.program_id(0)
    kv_head = head // (HEADS // KV_HEADS)
    table = block_table + sequence * table_stride
    v_distance = num_blocks.to(tl.int64) * (KV_HEADS * BLOCK * D)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)[None, :]
    rows = (first_row + r).to(tl.int64)[:, None]
    mine = (r < count)[:, None] & (d < D)
    if SINKS:
        sink = tl.load(sinks + head)
    query = tl.load(q + rows * q_stride + head * D + d, mask=mine, other=0.0)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    own = position + r
    end = position + count
    # Every row of the tile sees the keys from `full` up to `whole`: only the others need a mask.
    first = 0
    start = 0
    full = 0
    whole = (position + 1) // KEYS * KEYS
    if WINDOW:
        first = tl.maximum(position + 1 - window, 0)
        start = first // KEYS * KEYS
        whole = tl.maximum(whole, start)
        full = tl.minimum(tl.cdiv(tl.maximum(end - window, 0), KEYS) * KEYS, whole)
    # A tile of padding may have no row of the table.
    block = tl.load(table + start // BLOCK, mask=count > 0, other=0)
    if WINDOW:
        for n in tl.range(start, full, KEYS, num_stages=STAGES):
            k, v, block = keys_of_tile(
                cache, table, block, n, first, end, kv_head, v_distance, KV_HEADS, D, WIDTH, BLOCK, KEYS, True, True
            )
            seen = _seen(n, own, window, KEYS, True)
            row_max, total, acc = attend(query, k, v, seen, row_max, total, acc, scale, cap, True, CAPPED)
    for n in tl.range(full, whole, KEYS, num_stages=STAGES):
        k, v, block = keys_of_tile(
            cache, table, block, n, first, end, kv_head, v_distance, KV_HEADS, D, WIDTH, BLOCK, KEYS, False, WINDOW
        )
        row_max, total, acc = attend(query, k, v, None, row_max, total, acc, scale, cap, False, CAPPED)
    for n in tl.range(whole, end, KEYS, num_stages=STAGES):
        k, v, block = keys_of_tile(
            cache, table, block, n, first, end, kv_head, v_distance, KV_HEADS, D, WIDTH, BLOCK, KEYS, True, WINDOW
        )
        seen = _seen(n, own, window, KEYS, WINDOW)
        row_max, total, acc = attend(query, k, v, seen, row_max, total, acc, scale, cap, True, CAPPED)
    if SINKS:
        total += sink_weights(sink, row_max)
    # Rows past the tile's count may have seen no key.
    result = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + rows * (HEADS * D) + head * D + d, result.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _seen(start, own, window, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys from ``start`` on the rows at positions ``own [ROWS]`` see."""
    key = start + tl.arange(0, KEYS)[None, :]
    seen = key <= own[:, None]
    if WINDOW:
        seen = seen & (key > own[:, None] - window)
    return seen
