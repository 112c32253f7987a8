"""Prefill of the gated delta rule in Triton: packed chunks of many sequences, in tiles on tensor cores.

Within a tile the rule is a triangular system: the WY form of arXiv 2406.06484, with the decays of arXiv 2412.06464. G
is the sum of the log decays up to a token, and ``A[i, j] = β_i · exp(G_i - G_j) · k_i·k_j`` for j < i. The values that
the tile writes are ``(1 + A)^-1 · β · (v - exp(G) · k·S)``, S from before the tile. So there are three kernels: the
convolution; the systems of all tiles at once; and a walk over each chunk's tiles, with S in registers.
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
from rosebatch_kernels.gated_delta.parts import inverse, log_decay, unit_factor, written_share


@dataclass(frozen=True)
class Sizes:
    """Sizes of the programs.

    Attributes:
        channels: of the convolution's programs.
        rows: tokens of a system, a power of two from 16 to ``TILE_ROWS``, by bytes of a padded key or value.
        values: value columns of a program that walks over a chunk.
        solve_warps, walk_warps: of the programs.
        walk_stages: of the software pipeline that loads a chunk's next tiles.
        solve: precision of the products by which small inverses become large ones, for 16-bit inputs.
    """

    channels: int = 64
    rows: Steps = ((0, TILE_ROWS),)
    values: int = 64
    solve_warps: int = 4
    walk_warps: int = 4
    walk_stages: int = 2
    solve: str = "tf32x3"


_ROWS: Steps = ((1024, 32), (0, TILE_ROWS))
# On Blackwell, more of the products' operands lie in shared memory than on Hopper.
SIZES = table(Sizes(), sm_86=Sizes(rows=_ROWS, values=32, walk_warps=8), sm_100=Sizes(rows=_ROWS, values=32))


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
    """Chunks of tokens, packed one after the other; the rule is that of ``rosebatch_kernels.gated_delta.decode``.

    For 16-bit inputs the operands of products are rounded to the inputs' dtype, S is kept in fp32 throughout.

    Args:
        qkv: ``[T, C]``, q then k then v, as projected, rows at any stride.
        a, b: ``[T, value_heads]``, rows at any stride.
        state: updated in place. A chunk whose first position is 0 begins with zeros, others continue from their slots.
        packed: the chunks, no slot twice. Its tiles fix the size of the launches, so that a graph can hold them.
        weights: of the layer.

    Returns:
        ``[T, value_heads · value_dim]``; rows that no chunk covers are undefined.
    """
    key_heads, value_heads, key_dim, value_dim = state.heads
    tokens = len(qkv)
    mixed = convolve_chunks(qkv, state.inputs, packed, weights.conv, weights.conv_bias, sizes.channels, device=device)
    keys = torch.empty(tokens, value_heads, key_dim, dtype=qkv.dtype, device=qkv.device)
    values = torch.empty(tokens, value_heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    decays = torch.empty(tokens, value_heads, dtype=torch.float32, device=qkv.device)
    width = max(16, next_power_of_2(key_dim))
    value_width = max(16, next_power_of_2(value_dim))
    rows = value_at(sizes.rows, max(width, value_width) * qkv.itemsize)
    shape = {
        "KEY_HEADS": key_heads,
        "VALUE_HEADS": value_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "WIDTH": width,
        "ROWS": rows,
    }
    _delta_solve[(value_heads, len(packed.tiles), TILE_ROWS // rows)](
        keys=keys,
        values=values,
        decays=decays,
        mixed=mixed,
        a=a,
        b=b,
        chunks=packed.chunks,
        tiles=packed.tiles,
        log_rate=weights.log_rate,
        dt_bias=weights.dt_bias,
        a_stride=a.stride(0),
        b_stride=b.stride(0),
        VALUE_WIDTH=value_width,
        PRECISION="ieee" if qkv.dtype.itemsize == 4 else sizes.solve,
        MAX_BETA=weights.max_beta,
        num_warps=sizes.solve_warps,
        **shape,
        **launch_options(device),
    )
    out = torch.empty(tokens, value_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
    block = min(sizes.values, value_width)
    _delta_walk[(cdiv(value_dim, block), value_heads, len(packed.chunks))](
        out=out,
        mixed=mixed,
        keys=keys,
        values=values,
        decays=decays,
        memory=state.memory,
        chunks=packed.chunks,
        BLOCK=block,
        STAGES=sizes.walk_stages if qkv.dtype.itemsize < 4 else 1,
        num_warps=sizes.walk_warps,
        **shape,
        **launch_options(device),
    )
    return out


@triton.jit
def _delta_solve(
    keys,
    values,
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
    """``(1 + A)^-1 · β · exp(G) · k`` and ``(1 + A)^-1 · β · v`` of each token and value head, and G."""
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
        k = tl.load(of_token + (KEY_HEADS + key_head) * KEY_DIM + d, in_key, other=0.0)
        v = tl.load(of_token + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + c, in_value, other=0.0)
        step = log_decay(tl.load(a + rows * a_stride + head, present, other=0.0), log_rate + head, dt_bias + head)
        total = tl.cumsum(tl.where(present, step, 0.0), 0)
        beta = written_share(tl.load(b + rows * b_stride + head, present, other=0.0), MAX_BETA)
        beta = tl.where(present, beta, 0.0)
        unit = unit_factor(k, 1)
        products = dot(k, tl.trans(k))
        # Lengths are divided out of the products: the operands stay exact.
        products *= (beta * unit)[:, None] * unit[None, :] * tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
        solved = inverse(tl.where(r[:, None] > r[None, :], products, 0.0), ROWS, PRECISION)
        dtype = mixed.dtype.element_ty
        new = dot((solved * beta[None, :]).to(dtype), v)
        read = dot((solved * (beta * tl.exp(total) * unit)[None, :]).to(dtype), k)
        places = (rows * VALUE_HEADS + head)[:, None]
        tl.store(values + places * VALUE_DIM + c, new.to(dtype), in_value)
        tl.store(keys + places * KEY_DIM + d, read.to(dtype), in_key)
        tl.store(decays + rows * VALUE_HEADS + head, total, present)


@triton.jit
def _delta_walk(
    out,
    mixed,
    keys,
    values,
    decays,
    memory,
    chunks,
    KEY_HEADS: tl.constexpr,
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
    head = tl.program_id(1)
    slot, first, position, count = chunk_fields(chunks, tl.program_id(2))
    if count > 0:
        channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        r = tl.arange(0, ROWS)
        d = tl.arange(0, WIDTH)
        c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        cells = memory + ((slot * VALUE_HEADS + head) * KEY_DIM + d[:, None]) * VALUE_DIM + c[None, :]
        in_memory = (d < KEY_DIM)[:, None] & (c < VALUE_DIM)[None, :]
        known = tl.where(position > 0, KEY_DIM, 0)
        s = tl.load(cells, in_memory & (d < known)[:, None], other=0.0)
        dtype = mixed.dtype.element_ty
        for start in tl.range(0, count, ROWS, num_stages=STAGES):
            present = start + r < count
            rows = first + start + r
            in_key, in_value = present[:, None] & (d < KEY_DIM)[None, :], present[:, None] & (c < VALUE_DIM)[None, :]
            of_token = mixed + rows[:, None] * channels + key_head * KEY_DIM + d[None, :]
            places = rows * VALUE_HEADS + head
            q = tl.load(of_token, in_key, other=0.0)
            k = tl.load(of_token + KEY_HEADS * KEY_DIM, in_key, other=0.0)
            read = tl.load(keys + places[:, None] * KEY_DIM + d[None, :], in_key, other=0.0)
            new = tl.load(values + places[:, None] * VALUE_DIM + c[None, :], in_value, other=0.0).to(tl.float32)
            total = tl.load(decays + places, present, other=0.0)
            last = tl.sum(tl.where(r == tl.minimum(count - start, ROWS) - 1, total, 0.0), 0)
            before = s.to(dtype)
            new -= dot(read, before)
            k_unit = unit_factor(k, 1)
            q_unit = unit_factor(q, 1) * (KEY_DIM**-0.5)
            products = dot(q, tl.trans(k)) * q_unit[:, None] * k_unit[None, :]
            products *= tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
            products = tl.where(r[:, None] >= r[None, :], products, 0.0)
            result = dot(q, before) * (q_unit * tl.exp(total))[:, None]
            result = dot(products.to(dtype), new.to(dtype), result)
            tl.store(out + places[:, None] * VALUE_DIM + c[None, :], result.to(dtype), in_value)
            # Rows past the chunk's end wrote nothing: their new values are zeros, if their factors are finite.
            kept = tl.where(present, k_unit * tl.exp(tl.minimum(last - total, 0.0)), 0.0)
            s = dot(tl.trans(k), (new * kept[:, None]).to(dtype), s * tl.exp(last))
        tl.store(cells, s, in_memory)
