"""Prefill attention over latents that are expanded to keys and values, in Triton, for chunks of many tokens.

A score of expanded keys takes fewer products than one of latents: 256 channels instead of 576 for GLM-4.7-Flash, and a
value 256 instead of 512. So the tokens of a step see each other through keys and values, ``attend_fresh``. Latents that
were there before are read as they lie: ``attend_prefix_`` adds them to the result, by log-sum-exp (FlashAttention-2,
arXiv 2307.08691), with queries that it takes to the space of latents itself. A chunk's bits then depend on where it
begins.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.chunk_fields import chunk_fields, tile_of_program
from rosebatch_kernels.common.chunks import TILE_ROWS, PackedChunks
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.whole_numbers import next_power_of_2
from rosebatch_kernels.latent_attention.latents import attend_latents, widths
from rosebatch_kernels.latent_attention.sizes import SIZES as SIZES
from rosebatch_kernels.latent_attention.sizes import Sizes

# Channels of a head that are multiplied at once: with keys, and with the matrices that make these of latents.
_KEY_PIECE, _MATRIX_PIECE = tl.constexpr(64), 32


class Heads(NamedTuple):
    """Constants of a head: channels of its keys that are not rotated, and of its values."""

    NOPE: int
    VALUES: int


def attend_fresh(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotated: Tensor,
    chunks: PackedChunks,
    *,
    scale: float,
    sizes: Sizes,
    device: Device,
) -> tuple[Tensor, Tensor]:
    """See ``reference.attend_fresh``."""
    _, heads, values = v.shape
    program = sizes.fresh_of(values)
    assert q.stride(2) == k.stride(2) == v.stride(2) == rotated.stride(1) == 1, "the last axis is contiguous"
    out = q.new_empty(len(q), heads, values)
    norms = torch.empty(len(q), heads, dtype=torch.float32, device=q.device)
    _attend_fresh[(heads, len(chunks.tiles))](
        out=out,
        norms=norms,
        q=q,
        k=k,
        v=v,
        rotated=rotated,
        chunks=chunks.chunks,
        tiles=chunks.tiles,
        scale=scale * math.log2(math.e),
        q_strides=(q.stride(0), q.stride(1)),
        k_strides=(k.stride(0), k.stride(1)),
        v_strides=(v.stride(0), v.stride(1)),
        rotated_stride=rotated.stride(0),
        ROTATED=rotated.shape[1],
        ROTATED_WIDTH=max(16, next_power_of_2(rotated.shape[1])),
        VALUES_WIDTH=max(16, next_power_of_2(values)),
        HEADS=heads,
        SHAPE=Heads(k.shape[2], values),
        ROWS=TILE_ROWS,
        KEYS=program.keys,
        STAGES=program.stages,
        num_warps=program.warps,
        **launch_options(device),
    )
    return out, norms


def attend_prefix_(
    out: Tensor,
    norms: Tensor,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    chunks: PackedChunks,
    *,
    of_keys: Tensor,
    of_values: Tensor,
    scale: float,
    sizes: Sizes,
    device: Device,
) -> None:
    """See ``reference.attend_prefix_``."""
    heads, rank, nope = of_keys.shape
    program = sizes.prefix
    assert q.stride(2) == 1, "the last axis is contiguous"
    assert out.is_contiguous(), "rows of heads lie together"
    assert of_keys.is_contiguous(), "so they are read"
    assert of_values.is_contiguous(), "so they are read"
    _attend_prefix[(heads, len(chunks.tiles))](
        out=out,
        norms=norms,
        q=q,
        cache=cache,
        block_table=block_table,
        rows=rows,
        chunks=chunks.chunks,
        tiles=chunks.tiles,
        of_keys=of_keys,
        of_values=of_values,
        scale=scale * math.log2(math.e),
        q_strides=(q.stride(0), q.stride(1)),
        table_stride=block_table.stride(0),
        LATENTS=widths(heads, cache, rank),
        SHAPE=Heads(nope, of_values.shape[1]),
        PIECE=_MATRIX_PIECE,
        ROWS=TILE_ROWS,
        KEYS=program.keys,
        STAGES=program.stages,
        num_warps=program.warps,
        **launch_options(device),
    )


@triton.jit
def _pieces(rows, mine, SHAPE: tl.constexpr):
    """Pieces of the channels that are not rotated, at the pointers ``rows [N, 1]``."""
    pieces = ()
    number: tl.constexpr = (SHAPE.NOPE + _KEY_PIECE - 1) // _KEY_PIECE
    for piece in tl.static_range(number):
        channel = piece * _KEY_PIECE + tl.arange(0, _KEY_PIECE)[None, :]
        pieces += (tl.load(rows + channel, mask=mine & (channel < SHAPE.NOPE), other=0.0),)
    return pieces


@triton.jit
def _attend_fresh(
    out,
    norms,
    q,
    k,
    v,
    rotated,
    chunks,
    tiles,
    scale,
    q_strides,
    k_strides,
    v_strides,
    rotated_stride,
    ROTATED: tl.constexpr,
    ROTATED_WIDTH: tl.constexpr,
    VALUES_WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    head = tl.program_id(0)
    chunk, begin = tile_of_program(tiles)
    if chunk < 0:
        return
    _, first, _, count = chunk_fields(chunks, chunk)
    own = begin + tl.arange(0, ROWS)
    rows = first + own
    mine = (own < count)[:, None]
    d = tl.arange(0, ROTATED_WIDTH)[None, :]
    c = tl.arange(0, VALUES_WIDTH)[None, :]
    query = q + rows[:, None] * q_strides[0] + head * q_strides[1]
    pieces = _pieces(query, mine, SHAPE)
    turned = tl.load(query + SHAPE.NOPE + d, mask=mine & (d < ROTATED), other=0.0)
    k += first * k_strides[0] + head * k_strides[1]
    v += first * v_strides[0] + head * v_strides[1]
    rotated += first * rotated_stride
    number: tl.constexpr = (SHAPE.NOPE + _KEY_PIECE - 1) // _KEY_PIECE
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUES_WIDTH], tl.float32)
    for n in tl.range(0, tl.minimum(begin + ROWS, count), KEYS, num_stages=STAGES):
        key = n + tl.arange(0, KEYS)
        there = (key < count)[:, None]
        place = key.to(tl.int64)[:, None]
        keys = tl.load(rotated + place * rotated_stride + d, mask=there & (d < ROTATED), other=0.0)
        scores = dot(turned, tl.trans(keys))
        for piece in tl.static_range(number):
            channel = piece * _KEY_PIECE + tl.arange(0, _KEY_PIECE)[None, :]
            each = tl.load(k + place * k_strides[0] + channel, mask=there & (channel < SHAPE.NOPE), other=0.0)
            scores = dot(pieces[piece], tl.trans(each), scores)
        scores = tl.where(key[None, :] <= own[:, None], scores * scale, float("-inf"))
        higher = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(row_max - higher)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v + place * v_strides[0] + c, mask=there & (c < SHAPE.VALUES), other=0.0)
        acc = dot(weights.to(values.dtype), values, acc * shrink[:, None])
        row_max = higher
    line = rows * HEADS + head
    tl.store(norms + line, row_max + tl.log2(total), mask=own < count)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + line[:, None] * SHAPE.VALUES + c, result, mask=mine & (c < SHAPE.VALUES))


@triton.jit
def _attend_prefix(
    out,
    norms,
    q,
    cache,
    block_table,
    rows,
    chunks,
    tiles,
    of_keys,
    of_values,
    scale,
    q_strides,
    table_stride,
    LATENTS: tl.constexpr,
    SHAPE: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    head = tl.program_id(0)
    chunk, begin = tile_of_program(tiles)
    if chunk < 0:
        return
    _, first, prefix, count = chunk_fields(chunks, chunk)
    if prefix == 0:
        return
    own = begin + tl.arange(0, ROWS)
    mine = (own < count)[:, None]
    n = tl.arange(0, LATENTS.RANK_WIDTH)[:, None]
    d = tl.arange(0, LATENTS.ROTATED_WIDTH)[None, :]
    query = q + (first + own)[:, None] * q_strides[0] + head * q_strides[1]
    turned = tl.load(query + SHAPE.NOPE + d, mask=mine & (d < LATENTS.ROTATED), other=0.0)
    width: tl.constexpr = LATENTS.RANK_WIDTH
    absorbed = tl.zeros([ROWS, width], tl.float32)
    matrix = of_keys + head.to(tl.int64) * (LATENTS.RANK * SHAPE.NOPE) + n * SHAPE.NOPE
    # Loops, because all loads of unrolled ones would come first, and exceed the registers.
    for piece in tl.range(0, SHAPE.NOPE, PIECE):
        channel = piece + tl.arange(0, PIECE)[None, :]
        own_piece = tl.load(query + channel, mask=mine & (channel < SHAPE.NOPE), other=0.0)
        each = tl.load(matrix + channel, mask=(n < LATENTS.RANK) & (channel < SHAPE.NOPE), other=0.0)
        absorbed = dot(own_piece, tl.trans(each), absorbed)
    table = block_table + tl.load(rows + first + begin) * table_stride
    last = tl.zeros([ROWS], tl.int32) + prefix - 1
    queries = (absorbed.to(turned.dtype), turned)
    row_max, total, acc = attend_latents(queries, cache, table, 0, prefix, last, scale, LATENTS, KEYS, STAGES)
    sums = (acc / total[:, None]).to(turned.dtype)
    line = (first + own) * LATENTS.HEADS + head
    norm = tl.load(norms + line, mask=own < count, other=0.0)
    share = 1.0 / (1.0 + tl.exp2(norm - row_max - tl.log2(total)))
    matrix = of_values + head.to(tl.int64) * (SHAPE.VALUES * LATENTS.RANK) + tl.trans(n)
    for piece in tl.range(0, SHAPE.VALUES, PIECE):
        channel = piece + tl.arange(0, PIECE)[:, None]
        mask = (channel < SHAPE.VALUES) & (tl.trans(n) < LATENTS.RANK)
        each = tl.load(matrix + channel * LATENTS.RANK, mask=mask, other=0.0)
        result = dot(sums, tl.trans(each))
        to = out + line[:, None] * SHAPE.VALUES + tl.trans(channel)
        wanted = mine & (tl.trans(channel) < SHAPE.VALUES)
        fresh = tl.load(to, mask=wanted, other=0.0).to(tl.float32)
        tl.store(to, (fresh + (result - fresh) * share[:, None]).to(out.dtype.element_ty), mask=wanted)
