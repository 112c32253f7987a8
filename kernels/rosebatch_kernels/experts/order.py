"""Tokens sorted by expert, on the device: a stable counting sort, and the list of tiles of the products.

All launches follow from T and k alone, so a CUDA graph can hold them. Integer sums are exact: the result is always the
same.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2

# Chunks whose counts are added up at a time.
_CHUNKS = 16
# Tiles that one program lists at a time.
_TILES = tl.constexpr(16)


class Order(NamedTuple):
    """The pairs (token, slot) by expert.

    Attributes:
        pairs: ``[T · k]`` int32, pair numbers ``token · k + slot``, by expert, then by number.
        first: ``[E]`` int32, each expert's first place in ``pairs``.
        tiles: ``[N, 3]`` int32: expert, first place, and places; 0 places where there is nothing to do.
    """

    pairs: Tensor
    first: Tensor
    tiles: Tensor


def sort_by_expert(ids: Tensor, num_experts: int, tile_rows: int, chunk: int, *, device: Device) -> Order:
    """Sort ``ids [T, k]`` int32, contiguous, ``chunk`` pairs to a program; at most ``tile_rows`` places to a tile."""
    number = ids.numel()
    chunks = cdiv(number, chunk)
    # Every expert that has pairs may leave one tile partly empty.
    max_tiles = number // tile_rows + min(num_experts, number)
    counts = torch.empty(chunks, num_experts, dtype=torch.int32, device=ids.device)
    ends = torch.empty(2, num_experts, dtype=torch.int32, device=ids.device)
    pairs = torch.empty(number, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(max_tiles, 3, dtype=torch.int32, device=ids.device)
    options = launch_options(device)
    sizes = {"E": num_experts, "BINS": next_power_of_2(num_experts + 1)}
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
        pairs=pairs,
        tiles=tiles,
        number=number,
        max_tiles=max_tiles,
        ROWS=tile_rows,
        CHUNK=chunk,
        num_warps=4,
        **sizes,
        **options,
    )
    return Order(pairs, ends[0], tiles)


@triton.jit(do_not_specialize=["number"])
def _count_chunk(ids, counts, number, E: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        wait()
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + pair, mask=pair < number, other=E)
    bin = tl.arange(0, BINS)
    tl.store(counts + tl.program_id(0) * E + bin, tl.histogram(expert, BINS), mask=bin < E)


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
    """Counts become places within the expert; ``ends`` gets each expert's first place, and its last tile's end."""
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
    pairs,
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
        pair = start + tl.arange(0, CHUNK)
        expert = tl.load(ids + pair, mask=pair < number, other=0)
        other = start + tl.arange(0, CHUNK)
        other_expert = tl.load(ids + other, mask=other < number, other=E)
        before = (other[None, :] < pair[:, None]) & (other_expert[None, :] == expert[:, None])
        place = tl.load(ends + expert) + tl.load(counts + program * E + expert) + tl.sum(before.to(tl.int32), 1)
        tl.store(pairs + place, pair, mask=pair < number)
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
