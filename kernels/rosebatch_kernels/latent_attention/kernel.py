"""Latent attention in Triton: what rotates and appends, decode and prefill; the formula is in ``reference``.

All heads read the same row of a token, as key and, but for its last channels, as value. So a program has several heads
as the rows of one product, and loads a tile of keys once for both of its products. Decode divides keys among programs
by the batch size alone, as ``rosebatch_kernels.paged_attention.decode`` does, and a second kernel merges the parts.
Prefill has a fixed order of sums for each row, wherever its chunk begins: keys go in tiles from the first one, and the
mask is applied in all of them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import math
from functools import cache as once
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.chunks import TILE_ROWS
from rosebatch_kernels.common.device import HOPPER, INTERPRETER, Device, can_describe
from rosebatch_kernels.common.launch import launch_options, wait, wait_before_return
from rosebatch_kernels.common.tiles import tile_of_program
from rosebatch_kernels.common.whole_numbers import next_power_of_2
from rosebatch_kernels.latent_attention.latents import attend_latents, widths
from rosebatch_kernels.latent_attention.sizes import SIZES as SIZES
from rosebatch_kernels.latent_attention.sizes import Sizes, num_splits

# Heads of a program that rotates q.
_MAX_HEADS = 16


def prepare(
    q: Tensor,
    latents: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    *,
    norm: Tensor,
    eps: float,
    rotary: tuple[Tensor, Tensor] | None,
    rotary_rows: Tensor | None = None,
    appended: Tensor | None = None,
    sizes: Sizes,
    device: Device,
) -> None:
    """See ``reference.prepare``."""
    assert q.stride(2) == latents.stride(1) == 1, "the last axis is contiguous"
    shape = widths(q.shape[1], cache, len(norm))
    heads = min(_MAX_HEADS, next_power_of_2(shape.HEADS))
    # The first program of a token appends, the others have heads to rotate.
    turning, (cos, sin) = (0, (None, None)) if rotary is None else (-(-shape.HEADS // heads), rotary)
    _prepare_latents[(1 + turning, len(q))](
        q=q,
        latents=latents,
        cache=cache,
        block_table=block_table,
        rows=rows,
        positions=positions,
        norm=norm,
        cos=cos,
        sin=sin,
        rotary_rows=rotary_rows,
        appended=appended,
        eps=eps,
        q_stride=q.stride(0),
        head_stride=q.stride(1),
        latents_stride=latents.stride(0),
        table_stride=block_table.stride(0),
        position_stride=positions.stride(0),
        FIRST=q.shape[2] - shape.ROTATED,
        WIDE_NORM=norm.dtype != q.dtype,
        SHAPE=shape,
        OWN=heads,
        num_warps=4,
        **launch_options(device),
    )


def decode(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    limits: Tensor,
    *,
    rank: int,
    scale: float,
    queries: int = 1,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """See ``reference.decode``."""
    assert q.is_contiguous(), "rows of heads lie together"
    batch, heads, _ = q.shape
    program, splits = sizes.decode_of(heads, q.dtype), num_splits(batch, heads, q.dtype, sizes=sizes)
    hopper = _hopper_kernel() if _fits_hopper(q, cache, rank=rank, device=device) else None
    keys = program.keys if hopper is None else hopper.KEYS
    out = q.new_empty(batch, heads, rank)
    sums = stats = None
    if splits > 1:
        sums = torch.empty(batch, splits, heads, rank, dtype=torch.float32, device=q.device)
        stats = torch.empty(batch, splits, heads, 2, dtype=torch.float32, device=q.device)
    common: dict[str, Any] = {
        "out": out,
        "sums": sums,
        "stats": stats,
        "positions": positions,
        "limits": limits,
        "state_stride": positions.stride(0),
        "min_tiles": max(1, sizes.min_keys // keys),
        "SHAPE": widths(heads, cache, rank),
        "SPLITS": splits,
        **launch_options(device),
    }
    options: dict[str, Any] = {
        "block_table": block_table,
        "scale": scale * math.log2(math.e),
        "table_stride": block_table.stride(0),
        "QUERIES": queries,
        "ROWS": program.rows,
        **common,
    }
    grid = -(-heads // program.rows), batch, splits
    if hopper is not None:
        hopper.decode_hopper(q, cache, grid, options)
    else:
        _decode_latents[grid](q=q, cache=cache, KEYS=keys, STAGES=program.stages, num_warps=program.warps, **options)
    if splits > 1:
        _merge_latents[(heads, batch)](KEYS=keys, **common, num_warps=4)
    return out


def prefill(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    *,
    rank: int,
    scale: float,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """See ``reference.prefill``."""
    assert q.is_contiguous(), "rows of heads lie together"
    heads, program = q.shape[1], sizes.prefill_of(q.dtype)
    out = q.new_empty(*q.shape[:2], rank)
    # So many heads of successive tokens: a power of two that divides them, so that no row is left over.
    together = min(heads & -heads, program.rows)
    tokens = min(program.rows // together, TILE_ROWS)
    parts = (heads // together) * (TILE_ROWS // tokens)
    _prefill_latents[(parts, len(tiles))](
        out=out,
        q=q,
        cache=cache,
        block_table=block_table,
        tiles=tiles,
        scale=scale * math.log2(math.e),
        table_stride=block_table.stride(0),
        SHAPE=widths(heads, cache, rank),
        TOGETHER=together,
        TOKENS=tokens,
        ROWS=program.rows,
        KEYS=program.keys,
        STAGES=program.stages,
        num_warps=program.warps,
        **launch_options(device),
    )
    return out


def _fits_hopper(q: Tensor, cache: Tensor, *, rank: int, device: Device) -> bool:
    """Whether a call of ``decode`` is for Hopper's own kernel: 16 bits, whole tiles in a block, parts in a latent.

    TMA wants addresses and strides that are multiples of 16 bytes.
    """
    if device.arch != HOPPER or device == INTERPRETER or q.dtype.itemsize != 2 or q.dtype != cache.dtype:
        return False
    is_aligned = cache.is_contiguous() and can_describe(cache.shape[-1], cache.dtype) and cache.data_ptr() % 16 == 0
    return is_aligned and cache.shape[3] % 64 == 0 and rank % 64 == 0


@once
def _hopper_kernel() -> ModuleType | None:
    """Hopper's own kernel; see ``rosebatch_kernels.paged_attention.prefill``."""
    try:
        from rosebatch_kernels.latent_attention import decode_hopper
    except (ImportError, AttributeError):
        return None
    return decode_hopper


@triton.jit
def _rotated(place, c, s, mask, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """Both halves at the pointers ``place [R, 1]`` after rotation, rounded where PyTorch rounds."""
    d = tl.arange(0, WIDTH)[None, :]
    first = tl.load(place + d, mask=mask, other=0.0)
    second = tl.load(place + HALF + d, mask=mask, other=0.0)
    dtype = first.dtype
    low = (first.to(tl.float32) * c).to(dtype).to(tl.float32) - second.to(tl.float32) * s
    high = (second.to(tl.float32) * c).to(dtype).to(tl.float32) + first.to(tl.float32) * s
    return low.to(dtype), high.to(dtype)


@triton.jit
def _prepare_latents(
    q,
    latents,
    cache,
    block_table,
    rows,
    positions,
    norm,
    cos,
    sin,
    rotary_rows,
    appended,
    eps,
    q_stride,
    head_stride,
    latents_stride,
    table_stride,
    position_stride,
    FIRST: tl.constexpr,
    WIDE_NORM: tl.constexpr,
    SHAPE: tl.constexpr,
    OWN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    part = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    sequence = tl.load(rows + token)
    if sequence < 0:
        return
    position = tl.load(positions + token * position_stride)
    place = position.to(tl.int64)
    if rotary_rows is not None:
        place = tl.load(rotary_rows + token).to(tl.int64)
    half: tl.constexpr = SHAPE.ROTATED // 2
    width: tl.constexpr = SHAPE.ROTATED_WIDTH
    d = tl.arange(0, width)[None, :]
    if cos is not None:
        c = tl.load(cos + place * SHAPE.ROTATED + d, mask=d < half, other=0.0).to(tl.float32)
        s = tl.load(sin + place * SHAPE.ROTATED + half + d, mask=d < half, other=0.0).to(tl.float32)
        if part > 0:
            h = (part - 1) * OWN + tl.arange(0, OWN)[:, None]
            mask = (h < SHAPE.HEADS) & (d < half)
            row = q + token * q_stride + h * head_stride + FIRST
            low, high = _rotated(row, c, s, mask, half, width)
            tl.store(row + d, low, mask=mask)
            tl.store(row + half + d, high, mask=mask)
            return
    n = tl.arange(0, SHAPE.RANK_WIDTH)
    own = latents + token * latents_stride
    x = tl.load(own + n, mask=n < SHAPE.RANK, other=0.0)
    weight = tl.load(norm + n, mask=n < SHAPE.RANK, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SHAPE.RANK + eps)
    if not WIDE_NORM:
        normed = normed.to(x.dtype).to(tl.float32)
    block = tl.load(block_table + sequence * table_stride + position // SHAPE.BLOCK).to(tl.int64)
    to = cache + (block * SHAPE.BLOCK + position % SHAPE.BLOCK) * (SHAPE.RANK + SHAPE.ROTATED)
    latent = (normed * weight).to(x.dtype)
    tl.store(to + n, latent, mask=n < SHAPE.RANK)
    one = tl.zeros([1, 1], tl.int32)
    if cos is None:
        low = tl.load(own + SHAPE.RANK + one + d, mask=d < half)
        high = tl.load(own + SHAPE.RANK + half + one + d, mask=d < half)
    else:
        low, high = _rotated(own + SHAPE.RANK + one, c, s, d < half, half, width)
    tl.store(to + SHAPE.RANK + d, low, mask=d < half)
    tl.store(to + SHAPE.RANK + half + d, high, mask=d < half)
    if appended is not None:
        to = appended + token * (SHAPE.RANK + SHAPE.ROTATED)
        tl.store(to + n, latent, mask=n < SHAPE.RANK)
        tl.store(to + SHAPE.RANK + d, low, mask=d < half)
        tl.store(to + SHAPE.RANK + half + d, high, mask=d < half)


@triton.jit
def _queries(rows, mine, SHAPE: tl.constexpr):
    """Both parts of the rows of q at the pointers ``rows [ROWS, 1]``."""
    n = tl.arange(0, SHAPE.RANK_WIDTH)[None, :]
    d = tl.arange(0, SHAPE.ROTATED_WIDTH)[None, :]
    q = tl.load(rows + n, mask=mine & (n < SHAPE.RANK), other=0.0)
    return q, tl.load(rows + SHAPE.RANK + d, mask=mine & (d < SHAPE.ROTATED), other=0.0)


@triton.jit
def _share(position, min_tiles, KEYS: tl.constexpr, SPLITS: tl.constexpr):
    """Tiles of a split, and how many splits there are, of a row at a position."""
    tiles = position // KEYS + 1
    share = tl.maximum(tl.cdiv(tiles, SPLITS), min_tiles)
    return share, tl.cdiv(tiles, share)


@triton.jit(do_not_specialize=["min_tiles"])
def _decode_latents(
    out,
    sums,
    stats,
    q,
    cache,
    block_table,
    positions,
    limits,
    scale,
    table_stride,
    state_stride,
    min_tiles,
    SHAPE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    # The slowest axis: splits that short sequences do not need start last.
    split = tl.program_id(2)
    # Written by the previous step's feedback, which is older than this kernel's predecessor.
    position = tl.load(positions + row * state_stride)
    if position >= tl.load(limits + row * state_stride):
        wait_before_return(split == 0, PDL)
        return
    share, used = _share(position, min_tiles, KEYS, SPLITS)
    if split >= used:
        return
    if PDL:
        wait()
    h = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mine = (h < SHAPE.HEADS)[:, None]
    line = (row * SHAPE.HEADS + h)[:, None]
    queries = _queries(q + line * (SHAPE.RANK + SHAPE.ROTATED), mine, SHAPE)
    start = split * share * KEYS
    stop = tl.minimum(start + share * KEYS, position + 1)
    last = tl.zeros([ROWS], tl.int32) + position
    table = block_table + row // QUERIES * table_stride
    row_max, total, acc = attend_latents(queries, cache, table, start, stop, last, scale, SHAPE, KEYS, STAGES)
    n = tl.arange(0, SHAPE.RANK_WIDTH)[None, :]
    wanted = mine & (n < SHAPE.RANK)
    if SPLITS > 1:  # noqa: SIM102 (a compile-time condition)
        if used > 1:
            part = ((row * SPLITS + split) * SHAPE.HEADS + h)[:, None]
            tl.store(sums + part * SHAPE.RANK + n, acc, mask=wanted)
            tl.store(stats + part * 2, row_max[:, None], mask=mine)
            tl.store(stats + part * 2 + 1, total[:, None], mask=mine)
            return
    tl.store(out + line * SHAPE.RANK + n, (acc / total[:, None]).to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["min_tiles"])
def _merge_latents(
    out,
    sums,
    stats,
    positions,
    limits,
    state_stride,
    min_tiles,
    SHAPE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the parts of a head by log-sum-exp, where there are several."""
    if PDL:
        wait()
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    position = tl.load(positions + row * state_stride)
    if position >= tl.load(limits + row * state_stride):
        return
    _, used = _share(position, min_tiles, KEYS, SPLITS)
    if used == 1:
        return
    split = tl.arange(0, SPLITS)
    part = (row * SPLITS + split) * SHAPE.HEADS + head
    row_max = tl.load(stats + part * 2, mask=split < used, other=float("-inf"))
    total = tl.load(stats + part * 2 + 1, mask=split < used, other=0.0)
    factors = tl.exp2(row_max - tl.max(row_max, 0))
    n = tl.arange(0, SHAPE.RANK_WIDTH)[None, :]
    there = (split < used)[:, None] & (n < SHAPE.RANK)
    each = tl.load(sums + part[:, None] * SHAPE.RANK + n, mask=there, other=0.0)
    result = tl.sum(each * factors[:, None], 0, keep_dims=True) / tl.sum(total * factors, 0)
    to = out + (row * SHAPE.HEADS + head) * SHAPE.RANK + n
    tl.store(to, result.to(out.dtype.element_ty), mask=n < SHAPE.RANK)


@triton.jit
def _prefill_latents(
    out,
    q,
    cache,
    block_table,
    tiles,
    scale,
    table_stride,
    SHAPE: tl.constexpr,
    TOGETHER: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    sequence, first_row, position, count = tile_of_program(tiles)
    parts: tl.constexpr = SHAPE.HEADS // TOGETHER
    first = tl.program_id(0) // parts * TOKENS
    if first >= count:
        return
    r = tl.arange(0, ROWS)
    token = first + r // TOGETHER
    head = tl.program_id(0) % parts * TOGETHER + r % TOGETHER
    mine = ((token < count) & (r < TOKENS * TOGETHER))[:, None]
    line = ((first_row + token).to(tl.int64) * SHAPE.HEADS + head)[:, None]
    queries = _queries(q + line * (SHAPE.RANK + SHAPE.ROTATED), mine, SHAPE)
    stop = position + tl.minimum(first + TOKENS, count)
    table = block_table + sequence * table_stride
    last = position + token
    _, total, acc = attend_latents(queries, cache, table, 0, stop, last, scale, SHAPE, KEYS, STAGES)
    n = tl.arange(0, SHAPE.RANK_WIDTH)[None, :]
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + line * SHAPE.RANK + n, result, mask=mine & (n < SHAPE.RANK))
