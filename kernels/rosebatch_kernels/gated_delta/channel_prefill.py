"""Prefill of the gated delta rule with a decay for each channel of a key (KDA, arXiv 2510.26692), in Triton.

It is ``prefill`` with ``A[i, j] = β_i · Σ_d exp(G_i - G_j)[d] · k_i[d] · k_j[d]``. For products of tiles, the
exponential is one of two factors, around the sums at a token. Where channels forget fast, one of them overflows, unless
that token stands between j and i. So a tile is halved again and again. Between the halves of a block of tokens, that
token is the right half's first one: both factors are at most 1. The systems also leave what the walk multiplies S with.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.causal_conv import convolve_chunks
from rosebatch_kernels.common.chunk_fields import chunk_fields, tile_of_program
from rosebatch_kernels.common.chunks import TILE_ROWS, PackedChunks
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.sizes import Steps, table, value_at
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2
from rosebatch_kernels.gated_delta.layout import DeltaState, DeltaWeights
from rosebatch_kernels.gated_delta.parts import channel_log_decay, inverse, unit_factor, written_share


@dataclass(frozen=True)
class Sizes:
    """Sizes of the programs, see ``prefill.Sizes``.

    A system of 64 rows with keys of 128 channels does not fit the registers of Hopper. None of these was measured.
    """

    channels: int = 64
    rows: Steps = ((1024, 16), (256, 32), (0, TILE_ROWS))
    values: int = 64
    solve_warps: int = 4
    walk_warps: int = 4
    walk_stages: int = 2
    solve: str = "tf32x3"


SIZES = table(Sizes(), sm_86=Sizes(values=32))


def prefill(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    state: DeltaState,
    packed: PackedChunks,
    weights: DeltaWeights,
    *,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """See ``rosebatch_kernels.gated_delta.prefill``; ``a`` is ``[T, value_heads · key_dim]``.

    Chunks stand in the order of their rows.
    """
    key_heads, value_heads, key_dim, value_dim = state.heads
    tokens, dtype = len(qkv), qkv.dtype
    mixed = convolve_chunks(qkv, state.inputs, packed, weights.conv, weights.conv_bias, sizes.channels, device=device)
    width, value_width = (max(16, next_power_of_2(size)) for size in (key_dim, value_dim))
    rows = value_at(sizes.rows, max(width, value_width) * qkv.itemsize)

    def empty(number: int, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(number, value_heads, size, dtype=dtype, device=qkv.device)

    sides = {
        "keys": empty(tokens, key_dim, dtype),
        "values": empty(tokens, value_dim, dtype),
        "queries": empty(tokens, key_dim, dtype),
        "kept": empty(tokens, key_dim, dtype),
        "products": empty(tokens, rows, dtype),
        "decays": empty(tokens // rows + len(packed.chunks), key_dim, torch.float32),
    }
    shape = {
        "VALUE_HEADS": value_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "WIDTH": width,
        "ROWS": rows,
    }
    _channel_solve[(value_heads, len(packed.tiles), TILE_ROWS // rows)](
        **sides,
        mixed=mixed,
        a=a,
        b=b,
        chunks=packed.chunks,
        tiles=packed.tiles,
        log_rate=weights.log_rate,
        dt_bias=weights.dt_bias,
        a_stride=a.stride(0),
        b_stride=b.stride(0),
        KEY_HEADS=key_heads,
        VALUE_WIDTH=value_width,
        PRECISION="ieee" if qkv.itemsize == 4 else sizes.solve,
        MAX_BETA=weights.max_beta,
        num_warps=sizes.solve_warps,
        **shape,
        **launch_options(device),
    )
    out = torch.empty(tokens, value_heads * value_dim, dtype=dtype, device=qkv.device)
    block = min(sizes.values, value_width)
    _channel_walk[(cdiv(value_dim, block), value_heads, len(packed.chunks))](
        out=out,
        **sides,
        memory=state.memory,
        chunks=packed.chunks,
        BLOCK=block,
        STAGES=sizes.walk_stages if qkv.itemsize < 4 else 1,
        num_warps=sizes.walk_warps,
        **shape,
        **launch_options(device),
    )
    return out


@triton.jit
def _channel_solve(
    keys,
    values,
    queries,
    kept,
    products,
    decays,
    mixed,
    a,
    b,
    chunks,
    tiles,
    log_rate,
    dt_bias,
    a_stride,
    b_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    MAX_BETA: tl.constexpr,
    PDL: tl.constexpr,
):
    """What the walk reads of each token and value head, and of each tile.

    ``(1 + A)^-1 · β · exp(G) · k`` and ``(1 + A)^-1 · β · v``; ``exp(G) · q``; k times the decay up to the tile's end;
    the products of q with the tile's keys; and the decay of the whole tile.
    """
    if PDL:
        wait()
    head = tl.program_id(0)
    chunk, start = tile_of_program(tiles)
    start += tl.program_id(2) * ROWS
    if chunk >= 0:
        _, first, _, count = chunk_fields(chunks, chunk)
        channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        r = tl.arange(0, ROWS)
        present = start + r < count
        rows = first + start + r
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        d = tl.arange(0, WIDTH)[None, :]
        c = tl.arange(0, VALUE_WIDTH)[None, :]
        in_key, in_value = present[:, None] & (d < KEY_DIM), present[:, None] & (c < VALUE_DIM)
        of_token = mixed + rows[:, None] * channels
        q = tl.load(of_token + key_head * KEY_DIM + d, in_key, other=0.0)
        k = tl.load(of_token + (KEY_HEADS + key_head) * KEY_DIM + d, in_key, other=0.0)
        v = tl.load(of_token + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + c, in_value, other=0.0)
        own = head * KEY_DIM + d
        step = channel_log_decay(a + rows[:, None] * a_stride + own, log_rate + head, dt_bias + own, in_key)
        step = tl.where(in_key, step, 0.0)
        total = tl.cumsum(step, 0)
        beta = written_share(tl.load(b + rows * b_stride + head, present, other=0.0), MAX_BETA)
        beta = tl.where(present, beta, 0.0)
        k_unit = unit_factor(k, 1)[:, None]
        q_unit = unit_factor(q, 1)[:, None] * (KEY_DIM**-0.5)
        of_keys, of_queries = _decayed_products(q, k, q_unit, k_unit, total, ROWS, WIDTH)
        solved = inverse(of_keys * beta[:, None], ROWS, PRECISION) * beta[None, :]
        dtype = mixed.dtype.element_ty
        decay = tl.exp(total)
        new = dot(solved.to(dtype), v)
        read = dot(solved.to(dtype), (k.to(tl.float32) * (k_unit * decay)).to(dtype))
        places = (rows * VALUE_HEADS + head)[:, None]
        tl.store(values + places * VALUE_DIM + c, new.to(dtype), in_value)
        tl.store(keys + places * KEY_DIM + d, read.to(dtype), in_key)
        tl.store(queries + places * KEY_DIM + d, (q.to(tl.float32) * (q_unit * decay)).to(dtype), in_key)
        last = tl.sum(step, 0)[None, :]
        left = k.to(tl.float32) * (k_unit * tl.exp(tl.minimum(last - total, 0.0)))
        tl.store(kept + places * KEY_DIM + d, left.to(dtype), in_key)
        tl.store(products + places * ROWS + tl.arange(0, ROWS)[None, :], of_queries.to(dtype), present[:, None])
        if start < count:
            tile = _place(first, start, chunk, ROWS)
            tl.store(decays + (tile * VALUE_HEADS + head) * KEY_DIM + d, tl.exp(last), d < KEY_DIM)


@triton.jit
def _place(first, start, chunk, ROWS: tl.constexpr):
    """A number of the tile, another for each: chunks stand in the order of their rows."""
    return (first + start) // ROWS + chunk


@triton.jit
def _decayed_products(q, k, q_unit, k_unit, total, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """``Σ_d exp(G_i - G_j)[d] · k_i[d] · k_j[d]`` for j < i, and the same of ``q_i`` for j <= i; else zeros."""
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    own = tl.sum(q.to(tl.float32) * k.to(tl.float32) * (q_unit * k_unit), 1)
    of_queries = tl.where(r == c, own[:, None], 0.0)
    of_keys = tl.zeros([ROWS, ROWS], tl.float32)
    for level in tl.static_range(0, 16):
        if (1 << level) < ROWS:
            between = ((r >> level) != (c >> level)) & ((r >> (level + 1)) == (c >> (level + 1))) & (r > c)
            pairs = tl.reshape(total, [ROWS >> (level + 1), 2 << level, WIDTH])
            # Of each block, the sums at the right half's first token.
            middle = tl.arange(0, 2 << level)[None, :, None] == (1 << level)
            middle = tl.sum(tl.where(middle, pairs, 0.0), 1)[:, None, :]
            factor = tl.reshape(tl.exp(-tl.abs(pairs - middle)), [ROWS, WIDTH])
            right = k.to(tl.float32) * (k_unit * factor)
            left = (q.to(tl.float32) * (q_unit * factor)).to(q.dtype)
            right = right.to(k.dtype)
            of_keys += tl.where(between, dot(right, tl.trans(right)), 0.0)
            of_queries += tl.where(between, dot(left, tl.trans(right)), 0.0)
    return of_keys, of_queries


@triton.jit
def _channel_walk(
    out,
    keys,
    values,
    queries,
    kept,
    products,
    decays,
    memory,
    chunks,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    head, chunk = tl.program_id(1), tl.program_id(2)
    slot, first, position, count = chunk_fields(chunks, chunk)
    if count > 0:
        r = tl.arange(0, ROWS)
        d = tl.arange(0, WIDTH)
        c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        cells = memory + ((slot * VALUE_HEADS + head) * KEY_DIM + d[:, None]) * VALUE_DIM + c[None, :]
        in_memory = (d < KEY_DIM)[:, None] & (c < VALUE_DIM)[None, :]
        known = tl.where(position > 0, KEY_DIM, 0)
        s = tl.load(cells, in_memory & (d < known)[:, None], other=0.0)
        dtype = out.dtype.element_ty
        for start in tl.range(0, count, ROWS, num_stages=STAGES):
            present = start + r < count
            places = ((first + start + r) * VALUE_HEADS + head)[:, None]
            in_key, in_value = present[:, None] & (d < KEY_DIM)[None, :], present[:, None] & (c < VALUE_DIM)[None, :]
            read = tl.load(keys + places * KEY_DIM + d[None, :], in_key, other=0.0)
            new = tl.load(values + places * VALUE_DIM + c[None, :], in_value, other=0.0).to(tl.float32)
            q = tl.load(queries + places * KEY_DIM + d[None, :], in_key, other=0.0)
            k = tl.load(kept + places * KEY_DIM + d[None, :], in_key, other=0.0)
            of_queries = tl.load(products + places * ROWS + r[None, :], present[:, None], other=0.0)
            tile = _place(first, start, chunk, ROWS)
            decay = tl.load(decays + (tile * VALUE_HEADS + head) * KEY_DIM + d, d < KEY_DIM, other=0.0)
            before = s.to(dtype)
            new -= dot(read, before)
            written = new.to(dtype)
            result = dot(of_queries, written, dot(q, before))
            tl.store(out + places * VALUE_DIM + c[None, :], result.to(dtype), in_value)
            s = dot(tl.trans(k), written, s * decay[:, None])
        tl.store(cells, s, in_memory)
