"""Bidirectional attention over packed prompts in Triton: nothing is kept, so keys lie beside the queries.

One program serves a tile of successive query tokens of one prompt and one query head. It walks over that prompt's keys
with an online softmax (FlashAttention, arXiv 2205.14135), or with a window over those that a row of the tile may see.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.chunks import TILE_ROWS
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.scores import LOG2_E
from rosebatch_kernels.common.sizes import Program, table
from rosebatch_kernels.common.whole_numbers import next_power_of_2
from rosebatch_kernels.paged_attention.online_softmax import no_key, values

# Channels of a head from which tiles of keys are smaller.
_LARGE_HEAD = 129


@dataclass(frozen=True)
class Sizes:
    """Sizes of a program; none was measured, they keep within shared memory.

    Attributes:
        fp32: for fp32.
        narrow: for 16 bits.
        large_heads: for 16 bits and heads of more than 128 channels.
    """

    fp32: Program
    narrow: Program
    large_heads: Program


_FP32 = Program(keys=16, warps=8, stages=1)
SIZES = table(
    Sizes(
        fp32=_FP32,
        narrow=Program(keys=64, warps=4, stages=3),
        large_heads=Program(keys=32, warps=8, stages=2),
    ),
    sm_86=Sizes(
        fp32=_FP32,
        narrow=Program(keys=32, warps=4, stages=2),
        large_heads=Program(keys=32, warps=8, stages=1),
    ),
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: Tensor,
    tiles: Tensor,
    *,
    scale: float,
    window: int = 0,
    bias: Tensor | None = None,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """Attention of prompts, packed one after the other, in which a token sees those before and after it.

    Args:
        q: ``[T, heads, D]``, rows at any stride; ``heads`` is a multiple of kv_heads.
        k, v: ``[T, kv_heads, D]``, rows at any stride.
        chunks: ``[S, 4]`` int32, of which the first row and the number of tokens are read: see ``PackedChunks``.
        tiles: ``[N, 2]`` int32: chunk, and its rows from this one on, at most ``TILE_ROWS`` of them; a chunk of -1 is
            padding. The result is undefined in rows that no tile covers.
        scale: factor on q·k.
        window: keys on each side that a token sees, its own included; 0 for all.
        bias: ``[heads, 2 · M - 1]``, contiguous, with M at least the tokens of a prompt, added to scores: that of a key
            n tokens after the query is at ``M - 1 + n``. None for none.
        sizes: of programs.

    Returns:
        ``[T, heads · D]``.
    """
    _, heads, size = q.shape
    out = q.new_empty(len(q), heads * size)
    program = sizes.fp32
    if q.dtype.itemsize == 2:
        program = sizes.large_heads if size >= _LARGE_HEAD else sizes.narrow
    _bidirectional_attend[(heads, len(tiles))](
        out,
        q,
        k,
        v,
        chunks,
        tiles,
        bias,
        scale * LOG2_E,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        window or None,
        HEADS=heads,
        GROUP=heads // k.shape[1],
        D=size,
        # A matrix product takes 16 channels at least.
        WIDTH=max(16, next_power_of_2(size)),
        DISTANCES=0 if bias is None else bias.shape[1],
        ROWS=TILE_ROWS,
        KEYS=program.keys,
        STAGES=program.stages,
        num_warps=program.warps,
        **launch_options(device),
    )
    return out


@triton.jit
def _bidirectional_attend(
    out,
    q,
    k,
    v,
    chunks,
    tiles,
    bias,
    scale,
    q_stride,
    k_stride,
    v_stride,
    window,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    DISTANCES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    head = tl.program_id(0)
    chunk = tl.load(tiles + 2 * tl.program_id(1))
    begin = tl.load(tiles + 2 * tl.program_id(1) + 1)
    real = chunk >= 0
    # A tile of padding has no rows and no keys.
    first = tl.load(chunks + 4 * chunk + 1, mask=real, other=0).to(tl.int64)
    count = tl.load(chunks + 4 * chunk + 3, mask=real, other=0)
    own = begin + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)[None, :]
    rows = (first + own)[:, None]
    mine = (own < count)[:, None] & (d < D)
    query = tl.load(q + rows * q_stride + head * D + d, mask=mine, other=0.0)
    k += first * k_stride + head // GROUP * D
    v += first * v_stride + head // GROUP * D
    if bias is not None:
        # That of the key at the query's own place.
        bias += head * DISTANCES + DISTANCES // 2
    start = 0
    stop = count
    if window is not None:
        start = tl.maximum(begin + 1 - window, 0) // KEYS * KEYS
        stop = tl.minimum(begin + ROWS - 1 + window, count)
    sums = no_key(ROWS, WIDTH)
    for n in tl.range(start, stop, KEYS, num_stages=STAGES):
        row_max, total, acc = sums
        key = n + tl.arange(0, KEYS)
        there = (key < count)[:, None] & (d < D)
        place = key.to(tl.int64)[:, None]
        keys = tl.load(k + place * k_stride + d, mask=there, other=0.0)
        products = dot(query, tl.trans(keys)) * scale
        apart = key[None, :] - own[:, None]
        seen = (key < count)[None, :]
        if window is not None:
            seen = seen & (tl.abs(apart) < window)
        if bias is not None:
            known = seen & (own < count)[:, None]
            products += tl.load(bias + apart, mask=known, other=0.0).to(tl.float32) * 1.4426950408889634
        products = tl.where(seen, products, float("-inf"))
        # Exponents stay finite where a row has seen no key yet.
        higher = tl.maximum(tl.maximum(row_max, tl.max(products, 1)), -1e30)
        weights = tl.exp2(products - higher[:, None])
        shrink = tl.exp2(row_max - higher)
        total = total * shrink + tl.sum(weights, 1)
        worth = tl.load(v + place * v_stride + d, mask=there, other=0.0)
        acc = dot(weights.to(worth.dtype), worth, acc * shrink[:, None])
        sums = higher, total, acc
    result = values(sums, None)
    tl.store(out + rows * (HEADS * D) + head * D + d, result.to(out.dtype.element_ty), mask=mine)
