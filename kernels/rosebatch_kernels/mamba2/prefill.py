"""Prefill of Mamba2 in Triton: packed chunks of many sequences, in tiles on tensor cores (SSD of arXiv 2405.21060).

G is the sum of the log decays of a tile up to a token. Its result is ``Σ_j exp(G_i - G_j) · step_j · (C_i·B_j) · x_j``
over the tile's tokens j up to it, and ``exp(G_i) · S C_i``, S from before the tile. There are two kernels: the
convolution, and a walk over each chunk's tiles with S in registers.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.activations import softplus
from rosebatch_kernels.common.causal_conv import convolve_chunks
from rosebatch_kernels.common.chunk_fields import chunk_fields
from rosebatch_kernels.common.chunks import TILE_ROWS, PackedChunks
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.sizes import Steps, table, value_at
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2
from rosebatch_kernels.mamba2.layout import MambaState, MambaWeights


@dataclass(frozen=True)
class Sizes:
    """Sizes of the programs.

    Attributes:
        channels: of the convolution's programs.
        rows: tokens that are multiplied at once, a power of two from 16 to ``TILE_ROWS``, by bytes of a padded B.
        numbers: of S, of a program that walks over a chunk.
        warps: of these programs.
        stages: of the software pipeline that loads a chunk's next tiles.
    """

    channels: int = 64
    rows: Steps = ((0, TILE_ROWS),)
    numbers: int = 8192
    warps: int = 4
    stages: int = 2


SIZES = table(Sizes(), sm_86=Sizes(rows=((512, 32), (0, TILE_ROWS)), numbers=4096))


def prefill(
    xbc: Tensor,
    dt: Tensor,
    state: MambaState,
    packed: PackedChunks,
    weights: MambaWeights,
    *,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """Chunks of tokens, packed one after the other; the rule is that of ``rosebatch_kernels.mamba2.decode``.

    For 16-bit inputs the operands of products are rounded to the inputs' dtype, S is kept in fp32 throughout.

    Args:
        xbc: ``[T, C]``, x of all heads, then B and C of all groups, as projected, rows at any stride.
        dt: ``[T, heads]``, rows at any stride.
        state: updated in place. A chunk whose first position is 0 begins with zeros, others continue from their slots.
        packed: the chunks, no slot twice. Its tiles fix the size of the launches, so that a graph can hold them.
        weights: of the layer.

    Returns:
        ``[T, heads · head_dim]``; rows that no chunk covers are undefined.
    """
    heads, head_dim, groups, size = state.heads
    mixed = convolve_chunks(xbc, state.inputs, packed, weights.conv, weights.conv_bias, sizes.channels, device=device)
    out = torch.empty(len(xbc), heads * head_dim, dtype=xbc.dtype, device=xbc.device)
    width = max(16, next_power_of_2(size))
    block = min(max(16, sizes.numbers // width), max(16, next_power_of_2(head_dim)))
    _mamba_walk[(cdiv(head_dim, block), heads, len(packed.chunks))](
        out=out,
        mixed=mixed,
        dt=dt,
        memory=state.memory,
        chunks=packed.chunks,
        log_rate=weights.log_rate,
        dt_bias=weights.dt_bias,
        skip=weights.skip,
        dt_stride=dt.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        GROUPS=groups,
        SIZE=size,
        WIDTH=width,
        BLOCK=block,
        ROWS=value_at(sizes.rows, width * xbc.itemsize),
        STAGES=sizes.stages if xbc.dtype.itemsize < 4 else 1,
        num_warps=sizes.warps,
        **launch_options(device),
    )
    return out


@triton.jit
def _mamba_walk(
    out,
    mixed,
    dt,
    memory,
    chunks,
    log_rate,
    dt_bias,
    skip,
    dt_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    head = tl.program_id(1)
    slot, first, position, count = chunk_fields(chunks, tl.program_id(2))
    if count > 0:
        channels: tl.constexpr = HEADS * HEAD_DIM + 2 * GROUPS * SIZE
        group = head // (HEADS // GROUPS)
        r = tl.arange(0, ROWS)
        n = tl.arange(0, WIDTH)
        p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        cells = memory + ((slot * HEADS + head) * HEAD_DIM + p[:, None]) * SIZE + n[None, :]
        in_memory = (p < HEAD_DIM)[:, None] & (n < SIZE)[None, :]
        known = tl.where(position > 0, SIZE, 0)
        s = tl.load(cells, in_memory & (n < known)[None, :], other=0.0)
        rate = -tl.exp(tl.load(log_rate + head).to(tl.float32))
        bias = tl.load(dt_bias + head).to(tl.float32)
        own = tl.load(skip + head).to(tl.float32)
        dtype = mixed.dtype.element_ty
        for start in tl.range(0, count, ROWS, num_stages=STAGES):
            present = start + r < count
            rows = first + start + r
            in_b, in_x = present[:, None] & (n < SIZE)[None, :], present[:, None] & (p < HEAD_DIM)[None, :]
            of_token = mixed + rows[:, None] * channels
            x = tl.load(of_token + head * HEAD_DIM + p[None, :], in_x, other=0.0)
            b = tl.load(of_token + HEADS * HEAD_DIM + group * SIZE + n[None, :], in_b, other=0.0)
            c = tl.load(of_token + HEADS * HEAD_DIM + (GROUPS + group) * SIZE + n[None, :], in_b, other=0.0)
            step = softplus(tl.load(dt + rows * dt_stride + head, present, other=0.0).to(tl.float32) + bias)
            # Rows past the chunk's end neither change S nor forget.
            step = tl.where(present, step, 0.0)
            total = tl.cumsum(rate * step, 0)
            last = tl.sum(tl.where(r == ROWS - 1, total, 0.0), 0)
            products = dot(c, tl.trans(b)) * step[None, :]
            products *= tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
            products = tl.where(r[:, None] >= r[None, :], products, 0.0)
            result = dot(c, tl.trans(s).to(dtype)) * tl.exp(total)[:, None]
            result = dot(products.to(dtype), x, result) + own * x.to(tl.float32)
            tl.store(out + rows[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + p[None, :], result.to(dtype), in_x)
            kept = step * tl.exp(tl.minimum(last - total, 0.0))
            s = dot(tl.trans((x.to(tl.float32) * kept[:, None]).to(dtype)), b, s * tl.exp(last))
        tl.store(cells, s, in_memory)
