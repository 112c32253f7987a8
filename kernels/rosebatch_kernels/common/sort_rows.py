"""Rows sorted by the weight that they meet, on the device: a stable counting sort, and the tiles of the products.

All launches follow from the number of rows alone, so a CUDA graph can hold them. Integer sums are exact: the result is
always the same.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.order import Order
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2

# Chunks whose counts are added up at a time.
_CHUNKS = 16
# Tiles that one program lists at a time.
_TILES = tl.constexpr(16)


def sort_by_group(ids: Tensor, num_groups: int, tile_rows: int, chunk: int, *, device: Device) -> Order:
    """Sort rows whose groups are ``ids``, int32, contiguous, in any shape.

    Args:
        ids: below ``num_groups``.
        tile_rows: places of a tile at most.
        chunk: rows that a program places.
    """
    number = ids.numel()
    chunks = cdiv(number, chunk)
    # Every group that has rows may leave one tile partly empty.
    max_tiles = number // tile_rows + min(num_groups, number)
    counts = torch.empty(chunks, num_groups, dtype=torch.int32, device=ids.device)
    ends = torch.empty(2, num_groups, dtype=torch.int32, device=ids.device)
    rows = torch.empty(number, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(max_tiles, 3, dtype=torch.int32, device=ids.device)
    options = launch_options(device)
    sizes = {"E": num_groups, "BINS": next_power_of_2(num_groups + 1)}
    _count_chunk[(chunks,)](ids=ids, counts=counts, number=number, CHUNK=chunk, num_warps=4, **sizes, **options)
    _add_chunks[(1,)](
        counts=counts,
        ends=ends,
        chunks=chunks,
        number=number,
        ROWS=tile_rows,
        CHUNKS=_CHUNKS,
        num_warps=8,
        **sizes,
        **options,
    )
    grid = (max(chunks, cdiv(max_tiles, _TILES.value)),)
    _place_chunk[grid](
        ids=ids,
        counts=counts,
        ends=ends,
        rows=rows,
        tiles=tiles,
        number=number,
        max_tiles=max_tiles,
        ROWS=tile_rows,
        CHUNK=chunk,
        num_warps=4,
        **sizes,
        **options,
    )
    return Order(rows, ends[0], tiles, ends[1])


@triton.jit(do_not_specialize=["number"])
def _count_chunk(ids, counts, number, E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        wait()
    row = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    group = tl.load(ids + row, mask=row < number, other=E)
    bin = tl.arange(0, BINS)
    tl.store(counts + tl.program_id(0) * E + bin, tl.histogram(group, BINS), mask=bin < E)


@triton.jit(do_not_specialize=["chunks", "number"])
def _add_chunks(
    counts,
    ends,
    chunks,
    number,
    E: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Counts become places within the group; ``ends`` gets each group's first place, and its last tile's end."""
    if PDL:
        wait()
    bin = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for start in range(0, chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)
        inside = (chunk < chunks)[:, None] & (bin < E)[None, :]
        place = counts + chunk[:, None] * E + bin[None, :]
        count = tl.load(place, mask=inside, other=0)
        tl.store(place, total[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        total += tl.sum(count, 0)
    tl.store(ends + bin, tl.cumsum(total, 0) - total, mask=bin < E)
    tl.store(ends + E + bin, tl.cumsum((total + ROWS - 1) // ROWS, 0), mask=bin < E)


@triton.jit(do_not_specialize=["number", "max_tiles"])
def _place_chunk(
    ids,
    counts,
    ends,
    rows,
    tiles,
    number,
    max_tiles,
    E: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    program = tl.program_id(0)
    start = program * CHUNK
    if start < number:
        row = start + tl.arange(0, CHUNK)
        group = tl.load(ids + row, mask=row < number, other=0)
        other = start + tl.arange(0, CHUNK)
        other_group = tl.load(ids + other, mask=other < number, other=E)
        before = (other[None, :] < row[:, None]) & (other_group[None, :] == group[:, None])
        place = tl.load(ends + group) + tl.load(counts + program * E + group) + tl.sum(before.to(tl.int32), 1)
        tl.store(rows + place, row, mask=row < number)
    tile = program * _TILES + tl.arange(0, _TILES)
    if program * _TILES < max_tiles:
        bin = tl.arange(0, BINS)
        tile_end = tl.load(ends + E + bin, mask=bin < E, other=2147483647)
        owner = tl.sum((tile_end[None, :] <= tile[:, None]).to(tl.int32), 1)
        known = (owner < E) & (tile < max_tiles)
        previous = tl.load(ends + E + owner - 1, mask=known & (owner > 0), other=0)
        first = tl.load(ends + owner, mask=known, other=0)
        last = tl.load(ends + owner + 1, mask=known & (owner + 1 < E), other=0)
        last = tl.where(owner + 1 < E, last, number)
        begin = first + (tile - previous) * ROWS
        tl.store(tiles + tile * 3, tl.where(known, owner, 0), mask=tile < max_tiles)
        tl.store(tiles + tile * 3 + 1, tl.where(known, begin, 0), mask=tile < max_tiles)
        tl.store(tiles + tile * 3 + 2, tl.where(known, tl.minimum(last - begin, ROWS), 0), mask=tile < max_tiles)
