"""Decode attention over latents for Hopper, in Gluon: tiles of keys are copied ahead (TMA), and turned products.

The same work as ``kernel.decode``, in 16 bits. Latents are the first operand of both products, heads the columns:
Hopper's instruction has 64 rows, but takes any multiple of 8 columns. A tile of 64 keys lies in shared memory in parts
of 64 channels. While one is computed, the next one is copied.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

# Keys of a tile, and channels of a part.
KEYS = 64
PART = 64
_KEYS, _PART = gl.constexpr(KEYS), gl.constexpr(PART)
# Tiles in shared memory.
_STAGES = gl.constexpr(2)
_COPIED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Their names up to Triton 3.6.
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier


def decode_hopper(q: Tensor, cache: Tensor, grid: tuple[int, int, int], options: dict[str, Any]) -> None:
    """Launch what ``kernel.decode`` launches, with the same results.

    Args:
        q: ``[B, heads, W]``.
        cache: ``[1, blocks, 1, block_size, W]``, contiguous; a block has whole tiles, a latent whole parts.
        grid: parts of the heads, sequences, splits.
        options: the kernel's other arguments. ROWS, heads of a program, are 16 or 32.
    """
    width = cache.shape[-1]
    latents = TensorDescriptor(cache, [cache.numel() // width, width], [width, 1], [KEYS, PART], _COPIED)
    _decode_latents_hopper[grid](q=q, latents=latents, num_warps=4, **options)


@gluon.jit(do_not_specialize=["min_tiles"])
def _decode_latents_hopper(
    out,
    sums,
    stats,
    q,
    latents,
    block_table,
    positions,
    limits,
    scale,
    table_stride,
    state_stride,
    min_tiles,
    SHAPE: gl.constexpr,
    QUERIES: gl.constexpr,
    ROWS: gl.constexpr,
    SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):
    row = gl.program_id(1).to(gl.int64)
    # The slowest axis: splits that short sequences do not need start last.
    split = gl.program_id(2)
    # Written by the previous step's feedback, which is older than this kernel's predecessor.
    position = gl.load(positions + row * state_stride)
    there = position < gl.load(limits + row * state_stride)
    tiles = gl.where(there, position // _KEYS + 1, 0)
    share = gl.maximum(gl.cdiv(tiles, SPLITS), min_tiles)
    start = split * share
    stop = gl.minimum(start + share, tiles)
    if PDL:  # noqa: SIM102 (a compile-time condition)
        if start < stop or split == 0:
            cuda.gdc_wait()
            cuda.gdc_launch_dependents()
    if start < stop:
        used = gl.cdiv(tiles, share)
        table = block_table + row // QUERIES * table_stride
        line = row * SHAPE.HEADS + gl.program_id(0) * ROWS
        ends = (start, stop, position)
        _attend(out, sums, stats, q, latents, table, line, split, used, ends, scale, SHAPE, ROWS, SPLITS)


@gluon.jit
def _attend(
    out,
    sums,
    stats,
    q,
    latents,
    table,
    line,
    split,
    used,
    ends,
    scale,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    SPLITS: gl.constexpr,
):
    """Heads of a sequence, the first of them in ``line`` of q, over tiles of its keys, ``ends``: see the kernel."""
    start, stop, position = ends
    rank: gl.constexpr = SHAPE.RANK
    # Of a row, and of its latent: these are the values.
    parts: gl.constexpr = (rank + SHAPE.ROTATED + _PART - 1) // _PART
    of_latent: gl.constexpr = rank // _PART
    # Keys, or channels, by heads.
    turned: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ROWS, element_bitwidth=16, rank=2)
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ring = gl.allocate_shared_memory(latents.dtype, [_STAGES * parts, _KEYS, _PART], wide)
    queries = gl.allocate_shared_memory(latents.dtype, [parts, ROWS, _PART], wide)
    operand = gl.allocate_shared_memory(latents.dtype, [_KEYS, ROWS], narrow)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for first in gl.static_range(_STAGES):
        mbarrier.init(full.index(first), count=1)
    fence_async_shared()
    _barrier()
    for first in gl.static_range(_STAGES):
        place = _place(table, gl.minimum(start + first, stop - 1), SHAPE)
        _copy(latents, ring, full.index(first), first, place, start + first < stop, parts)
    _load_queries(q, queries, line, SHAPE, ROWS, parts)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, turned))
    total = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(0, turned))
    acc = ()
    for _part in gl.static_range(of_latent):
        acc += (gl.full([_PART, ROWS], 0.0, gl.float32, turned),)
    # Loaded a tile ahead.
    following = _place(table, gl.minimum(start + _STAGES, stop - 1), SHAPE)
    key = gl.arange(0, _KEYS, gl.SliceLayout(1, turned))
    for tile in range(start, stop):
        step = tile - start
        stage = step % _STAGES
        mbarrier.wait(full.index(stage), step // _STAGES & 1)
        if (tile + 1) * _KEYS > position + 1:
            _clear(ring, stage, position + 1 - tile * _KEYS, parts)
        s = gl.full([_KEYS, ROWS], 0.0, gl.float32, turned)
        for part in gl.static_range(parts):
            keys = ring.index(stage * parts + part)
            s = warpgroup_mma(keys, queries.index(part).permute((1, 0)), s, use_acc=part > 0, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        s = gl.where((tile * _KEYS + key <= position)[:, None], s * scale, float("-inf"))
        higher = gl.maximum(row_max, gl.max(s, 0))
        weights = gl.exp2(s - higher[None, :])
        shrink = gl.exp2(row_max - higher)
        total = total * shrink + gl.sum(weights, 0)
        row_max = higher
        operand.store(weights.to(latents.dtype))
        fence_async_shared()
        _barrier()
        summed = ()
        for part in gl.static_range(of_latent):
            values = ring.index(stage * parts + part).permute((1, 0))
            summed += (warpgroup_mma(values, operand, acc[part] * shrink[None, :], is_async=True),)
        acc = warpgroup_mma_wait(0, deps=summed)
        # All warps have read the tile.
        _barrier()
        _copy(latents, ring, full.index(stage), stage, following, tile + _STAGES < stop, parts)
        following = _place(table, gl.minimum(tile + _STAGES + 1, stop - 1), SHAPE)
    _write(out, sums, stats, line, split, used, (row_max, total, acc), SHAPE, ROWS, SPLITS)


@gluon.jit
def _place(table, tile, SHAPE: gl.constexpr):
    """The row of the cache where a tile begins."""
    key = tile * _KEYS
    return gl.load(table + key // SHAPE.BLOCK) * SHAPE.BLOCK + key % SHAPE.BLOCK


@gluon.jit
def _copy(latents, ring, full, stage, place, there, PARTS: gl.constexpr):
    """Start to copy a tile if it is ``there``. Channels behind the last one are zeros."""
    mbarrier.expect(full, PARTS * _KEYS * _PART * 2, pred=there)
    for part in gl.static_range(PARTS):
        _load(latents, [place, part * _PART], full, ring.index(stage * PARTS + part), pred=there)


@gluon.jit
def _clear(ring, stage, count, PARTS: gl.constexpr):
    """Zeros instead of the keys of a tile from ``count`` on: nobody wrote them, and they may be no numbers."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    written = (gl.arange(0, _KEYS, gl.SliceLayout(1, layout)) < count)[:, None]
    for part in gl.static_range(PARTS):
        tile = ring.index(stage * PARTS + part)
        keys = tile.load(layout)
        tile.store(gl.where(written, keys, gl.zeros_like(keys)))
    fence_async_shared()
    _barrier()


@gluon.jit
def _load_queries(q, queries, line, SHAPE: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    width: gl.constexpr = SHAPE.RANK + SHAPE.ROTATED
    head = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    channel = gl.arange(0, _PART, gl.SliceLayout(0, layout))[None, :]
    own = (gl.program_id(0) * ROWS + head < SHAPE.HEADS)[:, None]
    rows = q + (line + head)[:, None] * width + channel
    for part in gl.static_range(PARTS):
        mask = own & (part * _PART + channel < width)
        queries.index(part).store(gl.load(rows + part * _PART, mask=mask, other=0.0))


@gluon.jit
def _write(out, sums, stats, line, split, used, result, SHAPE: gl.constexpr, ROWS: gl.constexpr, SPLITS: gl.constexpr):
    """The results of heads, or parts of them that ``_merge_latents`` merges."""
    layout: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    row_max, total, acc = result
    head = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    channel = gl.arange(0, _PART, gl.SliceLayout(1, layout))[:, None]
    mine = gl.program_id(0) * ROWS + head < SHAPE.HEADS
    row_max = gl.convert_layout(row_max, gl.SliceLayout(0, layout))
    total = gl.convert_layout(total, gl.SliceLayout(0, layout))
    whole = line + head
    if SPLITS > 1:
        # Of a row, its splits lie one after the other, each with all heads.
        first = gl.program_id(0) * ROWS
        lines = (line - first) * SPLITS + split * SHAPE.HEADS + first + head
        divided = mine & (used > 1)
        gl.store(stats + lines * 2, row_max, mask=divided)
        gl.store(stats + lines * 2 + 1, total, mask=divided)
    for part in gl.static_range(SHAPE.RANK // _PART):
        each = gl.convert_layout(acc[part], layout)
        at = part * _PART + channel
        if SPLITS > 1:
            gl.store(sums + ((lines * SHAPE.RANK)[None, :] + at), each, mask=divided[None, :])
        result = (each / total[None, :]).to(out.dtype.element_ty)
        gl.store(out + ((whole * SHAPE.RANK)[None, :] + at), result, mask=(mine & (used == 1))[None, :])
