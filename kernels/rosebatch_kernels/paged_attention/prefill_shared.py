"""Prefill attention of short chunks over a beginning that they share: tokens of several chunks fill a tile.

Chunks of a few tokens after a long prefix would leave most of their tiles empty. Each would read the prefix once. Here
all rows of a tile walk over the shared keys together; then each chunk's rows over its own keys, the other rows masked.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.kv_tiles import load_tile, pages_of
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.scores import score_factors
from rosebatch_kernels.common.tiles import load_queries, prefill_arguments, rows_of_tile, store_result
from rosebatch_kernels.paged_attention.online_softmax import attend, load_sink, no_key, queries, values
from rosebatch_kernels.paged_attention.sizes import Sizes, prefill_program_of


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
    scales: Tensor | None = None,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """Attention of chunks of tokens, packed one after the other, without a window.

    Args:
        q: ``[T, at least heads · D]``, rows at any stride: q stands first in each.
        cache: ``[2, blocks, kv_heads, block_size, D]``, the chunks' own K and V included.
        block_table: ``[S, M]`` int32 block ids, rows at any stride.
        tiles: ``[N, 5]`` int32: first row in q, number of rows (at most ``TILE_ROWS``, 0 for padding), keys that all
            pieces share, whole blocks, first piece, and number of pieces. The result is undefined in rows of q that no
            tile covers.
        pieces: ``[P, 4]`` int32, parts of chunks, those of a tile one after the other: row of the block table, first
            row in the tile, number of rows, and position of the first of them.
        num_heads: query heads, a multiple of kv_heads.
        scale: factor on q·k.
        soft_cap, sinks, scales: see ``rosebatch_kernels.paged_attention.decode``.
        sizes: of programs.

    Returns:
        ``[T, heads · D]``.
    """
    out, arguments = prefill_arguments(q, cache, block_table, tiles, num_heads=num_heads)
    program = prefill_program_of(cache.shape[-1], q.dtype, e4m3=scales is not None, shares=True, sizes=sizes)
    _prefill_shared[(num_heads, len(tiles))](
        **arguments,
        pieces=pieces,
        scales=scales,
        scores=score_factors(scale, soft_cap),
        sinks=sinks,
        KEYS=program.keys,
        STAGES=program.stages,
        num_warps=program.warps,
        **launch_options(device),
    )
    return out


# Pieces begin where the tiles end, on 16 bytes or not: without this, Triton would compile for each.
@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["pieces"])
def _prefill_shared(
    out,
    q,
    cache,
    scales,
    block_table,
    tiles,
    pieces,
    scores,
    sinks,
    num_blocks,
    q_stride,
    table_stride,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
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
    r = tl.arange(0, ROWS)
    offset = tl.arange(0, KEYS)[None, :]
    rows, mine = rows_of_tile(first_row, count, ROWS, SHAPE)
    sink = load_sink(sinks, head)
    query = load_queries(q, q_stride, head, rows, mine, SHAPE)
    sums = no_key(ROWS, SHAPE.WIDTH)
    table = block_table + tl.load(piece, mask=count > 0, other=0) * table_stride
    pages = pages_of(cache, scales, num_blocks, table, head // SHAPE.GROUP, SHAPE)
    query = queries(query, scores, pages)
    block = tl.load(table, mask=shared > 0, other=0)
    # Tiles of keys end with the shared blocks, or the last of them needs a mask.
    masked: tl.constexpr = SHAPE.BLOCK % KEYS != 0
    for n in tl.range(0, shared, KEYS, num_stages=STAGES):
        keys, block = load_tile(pages, block, n, 0, shared, SHAPE, KEYS, masked, False)
        seen = None
        if masked:
            seen = (n + offset < shared) & (r < count)[:, None]
        sums = attend(query, keys, seen, sums, scores, masked)
    start = shared // KEYS * KEYS
    for _ in range(num_pieces):
        table = block_table + tl.load(piece) * table_stride
        pages = pages_of(cache, scales, num_blocks, table, head // SHAPE.GROUP, SHAPE)
        begin = tl.load(piece + 1)
        length = tl.load(piece + 2)
        position = tl.load(piece + 3)
        own = position + r - begin
        of_piece = ((r >= begin) & (r < begin + length))[:, None]
        end = position + length
        block = tl.load(table + start // SHAPE.BLOCK)
        for n in tl.range(start, end, KEYS, num_stages=STAGES):
            keys, block = load_tile(pages, block, n, 0, end, SHAPE, KEYS, True, False)
            key = n + offset
            seen = (key <= own[:, None]) & (key >= shared) & of_piece
            sums = attend(query, keys, seen, sums, scores, True)
        piece += 4
    store_result(out, head, rows, mine, values(sums, sink), SHAPE)
