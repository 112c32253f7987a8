"""Prefill attention of short chunks over a beginning that they share: tokens of several chunks fill a tile.

Chunks of a few tokens behind a long prefix would leave most of their tiles empty, and read the prefix once each. Here
all rows of a tile walk over the shared keys together; then each chunk's rows over its own keys, the other rows masked.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.scores import score_factors, sink_weights
from rosebatch_kernels.common.tiles import TILE_ROWS
from rosebatch_kernels.paged_attention.prefill_softmax import attend, keys_of_tile
from rosebatch_kernels.paged_attention.sizes import SIZES, PrefillSizes


def prefill_shared(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    pieces: Tensor,
    *,
    num_heads: int,
    scale: float,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    sizes: PrefillSizes = SIZES.measured.prefill,
) -> Tensor:
    """Attention of chunks of tokens, packed one after the other, without a window.

    Args:
        q: ``[T, at least heads · D]``, rows at any stride: q stands first in each.
        cache: ``[2, blocks, kv_heads, block_size, D]``, the chunks' own K and V included.
        block_table: ``[S, M]`` int32 block ids, rows at any stride.
        tiles: ``[N, 5]`` int32: first row in q, number of rows (at most ``TILE_ROWS``, 0 for padding), keys that all
            pieces share, whole blocks, first piece, and number of pieces. The result is undefined in rows of q that no
            tile covers.
        pieces: ``[P, 4]`` int32, parts of chunks, those of a tile one behind the other: row of the block table, first
            row in the tile, number of rows, and position of the first of them.
        num_heads: query heads, a multiple of kv_heads.
        scale: factor on q·k.
        soft_cap, sinks: see ``rosebatch_kernels.paged_attention.decode``.
        sizes: of programs.

    Returns:
        ``[T, heads · D]``.
    """
    _, blocks, kv_heads, block_size, size = cache.shape
    out = torch.empty(len(q), num_heads * size, dtype=q.dtype, device=q.device)
    scale, cap = score_factors(scale, soft_cap)
    program = sizes.fp32 if q.dtype.itemsize == 4 else sizes.shared
    _prefill_shared[(num_heads, len(tiles))](
        out=out,
        q=q,
        cache=cache,
        block_table=block_table,
        tiles=tiles,
        pieces=pieces,
        scale=scale,
        num_blocks=blocks,
        q_stride=q.stride(0),
        table_stride=block_table.stride(0),
        cap=cap,
        sinks=q if sinks is None else sinks,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        D=size,
        WIDTH=max(16, triton.next_power_of_2(size)),
        BLOCK=block_size,
        ROWS=TILE_ROWS,
        KEYS=program.keys,
        CAPPED=soft_cap > 0,
        SINKS=sinks is not None,
        STAGES=program.stages,
        num_warps=program.warps,
        **launch_options(),
    )
    return out


# Pieces begin where the tiles end, on 16 bytes or not: without this, Triton would compile for each.
@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["pieces"])
def _prefill_shared(
    out,
    q,
    cache,
    block_table,
    tiles,
    pieces,
    scale,
    num_blocks,
    q_stride,
    table_stride,
    cap,
    sinks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 5
    first_row = tl.load(tile)
    count = tl.load(tile + 1)
    shared = tl.load(tile + 2)
    piece = pieces + tl.load(tile + 3) * 4
    num_pieces = tl.load(tile + 4)
    kv_head = head // (HEADS // KV_HEADS)
    v_distance = num_blocks.to(tl.int64) * (KV_HEADS * BLOCK * D)
    r = tl.arange(0, ROWS)
    offset = tl.arange(0, KEYS)[None, :]
    d = tl.arange(0, WIDTH)[None, :]
    rows = (first_row + r).to(tl.int64)[:, None]
    mine = (r < count)[:, None] & (d < D)
    if SINKS:
        sink = tl.load(sinks + head)
    query = tl.load(q + rows * q_stride + head * D + d, mask=mine, other=0.0)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    table = block_table + tl.load(piece, mask=count > 0, other=0) * table_stride
    block = tl.load(table, mask=shared > 0, other=0)
    # Tiles of keys end with the shared blocks, or the last of them needs a mask.
    masked: tl.constexpr = BLOCK % KEYS != 0
    for n in tl.range(0, shared, KEYS, num_stages=STAGES):
        k, v, block = keys_of_tile(
            cache, table, block, n, 0, shared, kv_head, v_distance, KV_HEADS, D, WIDTH, BLOCK, KEYS, masked, False
        )
        seen = (n + offset < shared) & (r < count)[:, None]
        row_max, total, acc = attend(query, k, v, seen, row_max, total, acc, scale, cap, masked, CAPPED)
    start = shared // KEYS * KEYS
    for _ in range(num_pieces):
        table = block_table + tl.load(piece) * table_stride
        begin = tl.load(piece + 1)
        length = tl.load(piece + 2)
        position = tl.load(piece + 3)
        own = position + r - begin
        of_piece = ((r >= begin) & (r < begin + length))[:, None]
        end = position + length
        block = tl.load(table + start // BLOCK)
        for n in tl.range(start, end, KEYS, num_stages=STAGES):
            k, v, block = keys_of_tile(
                cache, table, block, n, 0, end, kv_head, v_distance, KV_HEADS, D, WIDTH, BLOCK, KEYS, True, False
            )
            key = n + offset
            seen = (key <= own[:, None]) & (key >= shared) & of_piece
            row_max, total, acc = attend(query, k, v, seen, row_max, total, acc, scale, cap, True, CAPPED)
        piece += 4
    if SINKS:
        total += sink_weights(sink, row_max)
    # Rows past the tile's count may have seen no key.
    result = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + rows * (HEADS * D) + head * D + d, result.to(out.dtype.element_ty), mask=mine)
