"""Triton kernels of the KV cache writes: K and V of all heads, or of all layers, in one launch."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.kv_tiles import Pages, store
from rosebatch_kernels.common.sizes import table
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2


@dataclass(frozen=True)
class Sizes:
    """Sizes of a program, the measured ones on an H100 80GB HBM3.

    Attributes:
        append: elements that ``append`` copies: 16 bytes for each thread in 16-bit types.
        copy_blocks: elements that ``copy_blocks`` copies.
        warps: of either.
    """

    append: int = 1024
    copy_blocks: int = 4096
    warps: int = 4


SIZES = table(Sizes())


def append(cache: Tensor, k: Tensor, v: Tensor, rows: Tensor, scales: Tensor | None = None, *, sizes: Sizes) -> None:
    """Write the K and V of new tokens to their slots (source: article S2).

    Args:
        cache: ``[2, blocks, kv_heads, block_size, D]``, written in place.
        k, v: ``[T, kv_heads, D]``, tokens and heads at any stride.
        rows: ``[T, kv_heads]`` int64: the row of each token and head in ``[blocks · kv_heads · block_size, D]``, which
            is ``(block · kv_heads + head) · block_size + offset``.
        scales: ``[2, blocks, kv_heads, block_size, 1]`` fp32, written in place, if the cache holds bytes of e4m3.
    """
    tokens, heads, size = k.shape
    assert k.stride(-1) == v.stride(-1) == 1 and cache[0].is_contiguous() and rows.is_contiguous()
    width = next_power_of_2(size)
    tile_rows = max(1, sizes.append // width)
    _append[(cdiv(tokens * heads, tile_rows),)](
        cache=cache,
        k=k,
        v=v,
        rows=rows,
        scales=scales,
        count=tokens * heads,
        plane=cache.stride(0),
        k_token=k.stride(0),
        k_head=k.stride(1),
        v_token=v.stride(0),
        v_head=v.stride(1),
        HEADS=heads,
        SIZE=size,
        WIDTH=width,
        TILE_ROWS=tile_rows,
        num_warps=sizes.warps,
    )


def copy_blocks(cache: Tensor, sources: Tensor, destinations: Tensor, *, sizes: Sizes) -> None:
    """Copy whole blocks of all layers.

    Args:
        cache: ``[layers, planes, blocks, heads, block_size, width]``, contiguous, written in place.
        sources, destinations: ``[C]`` int64 block ids at any stride; no block is in both.
    """
    assert cache.is_contiguous()
    layers, planes, blocks, *block = cache.shape
    elements = math.prod(block)
    _copy_blocks[(cdiv(elements, sizes.copy_blocks), layers * planes, len(sources))](
        cache=cache,
        sources=sources,
        destinations=destinations,
        plane=blocks * elements,
        source_stride=sources.stride(0),
        destination_stride=destinations.stride(0),
        ELEMENTS=elements,
        TILE=sizes.copy_blocks,
        num_warps=sizes.warps,
    )


@triton.jit(do_not_specialize=["count"])
def _append(
    cache,
    k,
    v,
    rows,
    scales,
    count,
    plane,
    k_token,
    k_head,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    index = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    # Load before the broadcast over the columns: once for each row instead of once for each element.
    row = tl.load(rows + index, index < count)[:, None]
    index = index[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (index < count) & (column < SIZE)
    token, head = (index // HEADS).to(tl.int64), index % HEADS
    key = tl.load(k + token * k_token + head * k_head + column, inside)
    value = tl.load(v + token * v_token + head * v_head + column, inside)
    store(Pages(cache, 0, plane, None, scales), row * SIZE, key, value, inside, SIZE)


# One array holds both, so destinations begin anywhere.
@triton.jit(do_not_specialize_on_alignment=["sources", "destinations"])
def _copy_blocks(
    cache,
    sources,
    destinations,
    plane,
    source_stride,
    destination_stride,
    ELEMENTS: tl.constexpr,
    TILE: tl.constexpr,
):
    pair = tl.program_id(2)
    source = tl.load(sources + pair * source_stride)
    destination = tl.load(destinations + pair * destination_stride)
    offset = tl.program_id(0) * TILE + tl.arange(0, TILE)
    here = cache + tl.program_id(1).to(tl.int64) * plane + offset
    values = tl.load(here + source * ELEMENTS, offset < ELEMENTS)
    tl.store(here + destination * ELEMENTS, values, offset < ELEMENTS)
