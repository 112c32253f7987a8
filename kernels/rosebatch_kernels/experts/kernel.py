"""The products of a mixture of experts in Triton: rows sorted by expert, a tile of one expert's rows a program.

Two launches after the sort. The first gathers the rows of x, multiplies them with gate and up, and activates. The
second multiplies with down, adds the bias, weights the result, and writes it to its token's slot; the reader adds up
the slots. Programs of one tile of rows are successive, and so are the tiles of one expert. Its weights are read from
memory once and then come from the L2 cache.

Quantized weights are decoded in registers. Their product is computed transposed: then the weight is the first operand
of the matrix instruction, which may lie in registers. Weights of fp8 meet many rows as they are; each row is rounded to
fp8 then, of x before it is gathered.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rosebatch_kernels.common.activations import activate
from rosebatch_kernels.common.device import INTERPRETER, Device, can_describe
from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.rounded import rounded
from rosebatch_kernels.common.sort_rows import sort_by_group
from rosebatch_kernels.common.whole_numbers import cdiv
from rosebatch_kernels.experts.codes import code_of
from rosebatch_kernels.experts.fp8_sums import fp8_sums
from rosebatch_kernels.experts.packed import CHUNK, Packed
from rosebatch_kernels.experts.packed_sums import packed_sums
from rosebatch_kernels.experts.reference import LIMIT, SLOPE
from rosebatch_kernels.experts.sizes import Sizes, Step, Tile
from rosebatch_kernels.fp8 import quantize

_SLOPE, _LIMIT = tl.constexpr(SLOPE), tl.constexpr(LIMIT)
# Activations of the gate; one more gated form, and one without a gate, are written out.
_GATES = {"silu_mul": "silu", "gelu_mul": "gelu_tanh", "clamped_swiglu": "clamped_swiglu", "relu2": "relu2"}


def parts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | Packed,
    down: Tensor | Packed,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu_mul",
    shared: Tensor | None = None,
    step: Step | None = None,
    *,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """See ``reference.parts``; rows of ``x`` may lie apart, all else is contiguous.

    The parts are fp32 for few tokens and in x's dtype for many. Each weight may be quantized. ``step`` replaces the
    tiles that the table has.
    """
    assert x.stride(-1) == 1, "the last axis is contiguous"
    (tokens, size), slots = x.shape, ids.shape[1]
    experts, _, inner = down.shape
    number = tokens * slots
    if step is None:
        step = sizes.at(number // experts, x.itemsize)
    up_tile, down_tile = step.tiles(gate_up, down, device)
    assert up_tile.rows == down_tile.rows, "both products share a list of tiles"
    pairs, _, tiles, _ = sort_by_group(ids, experts, up_tile.rows, sizes.chunk, device=device)
    hidden = torch.empty(number, inner, dtype=x.dtype, device=x.device)
    exact = tokens <= sizes.max_exact
    parts = slots + (shared is not None)
    out = torch.empty(parts, tokens, size, dtype=torch.float32 if exact else x.dtype, device=x.device)
    if shared is not None:
        out[slots].copy_(shared)
    order = (pairs, tiles, tokens, slots, device)
    _launch(x, gate_up, gate_up_bias, None, hidden, *order, columns=inner, gate=_GATES[activation], tile=up_tile)
    _launch(hidden, down, down_bias, weights, out, *order, columns=size, gate=None, tile=down_tile)
    return out


def _launch(
    x: Tensor,
    weight: Tensor | Packed,
    bias: Tensor | None,
    factors: Tensor | None,
    out: Tensor,
    pairs: Tensor,
    tiles: Tensor,
    tokens: int,
    slots: int,
    device: Device,
    *,
    columns: int,
    gate: str | None,
    tile: Tile,
) -> None:
    depth, column_tiles = weight.shape[2], cdiv(columns, tile.columns)
    given: dict[str, Any]
    if isinstance(weight, Packed) and tile.fp8:
        x, x_scales, _ = quantize.quantize(x, weight.unit, CHUNK, sizes=quantize.SIZES.of(device), device=device)
        given = {"weight": weight.words.view(x.dtype), "scales": weight.scales, "x_scales": x_scales, "TMA": False}
        # A tile's rows, and those of the gate's other half, are of one block each.
        in_blocks = weight.in_blocks and weight.unit == CHUNK and (gate is None or columns % CHUNK == 0)
        given |= {"UNIT": weight.unit, "IN_BLOCKS": in_blocks and CHUNK % tile.columns == 0}
    elif isinstance(weight, Packed):
        code = code_of(weight.form, x.dtype, assembles=device != INTERPRETER)
        given = {"weight": weight.words, "scales": weight.scales, "zeros": weight.zeros, "TMA": False}
        given |= {"CODE": code, "UNIT": weight.unit}
    else:
        tma = tile.tma and device.tma and can_describe(depth, weight.dtype)
        flat = weight.view(-1, depth)
        described = TensorDescriptor.from_tensor(flat, [tile.columns, tile.depth]) if tma else weight
        given = {"weight": described, "TMA": tma}
    _expert_product[(len(tiles) * column_tiles,)](
        x=x,
        bias=bias,
        factors=factors,
        out=out,
        pairs=pairs,
        tiles=tiles,
        tokens=tokens,
        x_stride=x.stride(0),
        column_tiles=column_tiles,
        SLOTS=slots,
        N=columns,
        K=depth,
        GATE=gate,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        STAGES=tile.stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        **given,
        **launch_options(device),
    )


@triton.jit(do_not_specialize=["tokens"])
def _expert_product(
    x,
    weight,
    bias,
    factors,
    out,
    pairs,
    tiles,
    tokens,
    x_stride,
    column_tiles,
    SLOTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    scales=None,
    zeros=None,
    x_scales=None,
    CODE: tl.constexpr = None,
    UNIT: tl.constexpr = None,
    IN_BLOCKS: tl.constexpr = False,
):
    """With GATE, x is gathered by token and the result stands in sorted order; else the other way round.

    It is the activation of the gate, or ``relu2`` of a product without one.
    """
    if PDL:
        wait()
    program = tl.program_id(0)
    tile = tiles + (program // column_tiles) * 3
    places = tl.load(tile + 2)
    if places == 0:
        return
    expert, begin = tl.load(tile), tl.load(tile + 1)
    m = tl.arange(0, ROWS)
    present = m < places
    place = (begin + m).to(tl.int64)
    pair = tl.load(pairs + place, mask=present, other=0)
    token = (pair // SLOTS).to(tl.int64)
    x_rows = x + (token if GATE is not None else place)[:, None] * x_stride
    first = (program % column_tiles) * COLUMNS
    n = first + tl.arange(0, COLUMNS)
    gated: tl.constexpr = GATE is not None and GATE != "relu2"
    matrix: tl.constexpr = 2 * N if gated else N
    if x_scales is not None:
        count = tokens if GATE is not None else tokens * SLOTS
        own = x_scales + (token if GATE is not None else place)
        acc, up_acc = fp8_sums(
            x_rows,
            own,
            count,
            present,
            weight,
            scales,
            expert,
            first,
            N,
            K,
            gated,
            ROWS,
            COLUMNS,
            STAGES,
            UNIT,
            IN_BLOCKS,
        )
    elif CODE is None:
        acc, up_acc = _sums(
            x_rows, present, weight, expert, first, N, K, gated, ROWS, COLUMNS, DEPTH, STAGES, TMA, PRECISION
        )
    else:
        acc, up_acc = packed_sums(
            x_rows, present, weight, scales, zeros, expert, n, N, K, gated, ROWS, COLUMNS, STAGES, CODE, UNIT, PRECISION
        )
    wanted = present[:, None] & (n < N)[None, :]
    dtype = out.dtype.element_ty
    if bias is not None:
        acc += tl.load(bias + expert * matrix + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if gated:
            up_acc += tl.load(bias + expert * matrix + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATE == "relu2":
        value = tl.maximum(rounded(acc, dtype), 0.0)
        tl.store(out + place[:, None] * N + n[None, :], (value * value).to(dtype), mask=wanted)
    elif GATE is not None:
        # Rounded where separate kernels would round.
        value = rounded(acc, dtype)
        other = rounded(up_acc, dtype)
        if GATE == "clamped_swiglu":
            value = tl.minimum(value, _LIMIT)
            other = tl.minimum(tl.maximum(other, -_LIMIT), _LIMIT)
            result = (other + 1.0) * (activate(value * _SLOPE, "silu") * (1.0 / _SLOPE))
        else:
            result = activate(value, GATE).to(dtype).to(tl.float32) * other
        tl.store(out + place[:, None] * N + n[None, :], result.to(dtype), mask=wanted)
    else:
        result = acc * tl.load(factors + pair, mask=present, other=0.0)[:, None]
        line = (pair % SLOTS).to(tl.int64) * tokens + token
        tl.store(out + line[:, None] * N + n[None, :], result.to(dtype), mask=wanted)


@triton.jit
def _sums(
    x_rows,
    present,
    weight,
    expert,
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x times an expert's rows from ``first`` of N on, and with GATED those N further on: ``[ROWS, COLUMNS]`` each."""
    n = first + tl.arange(0, COLUMNS)
    matrix: tl.constexpr = 2 * N if GATED else N
    k = tl.arange(0, DEPTH)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    if not TMA:
        # Past the end, read the last row again: its results are not stored.
        row = expert.to(tl.int64) * matrix + tl.minimum(n, N - 1)
        rows = weight + row[:, None] * K
    for start in tl.range(0, K, DEPTH, num_stages=STAGES):
        column = start + k[None, :]
        if K % DEPTH == 0:
            a = tl.load(x_rows + column, mask=present[:, None], other=0.0)
        else:
            a = tl.load(x_rows + column, mask=present[:, None] & (column < K), other=0.0)
        if TMA:
            b = weight.load([expert * matrix + first, start])
        elif K % DEPTH == 0:
            b = tl.load(rows + column)
        else:
            b = tl.load(rows + column, mask=column < K, other=0.0)
        acc = dot(a, tl.trans(b), acc, PRECISION=PRECISION)
        if GATED:
            if TMA:
                up = weight.load([expert * matrix + N + first, start])
            elif K % DEPTH == 0:
                up = tl.load(rows + N * K + column)
            else:
                up = tl.load(rows + N * K + column, mask=column < K, other=0.0)
            # Behind the same fence.
            up_acc = tl.dot(a, tl.trans(up), up_acc, input_precision=PRECISION)
    return acc, up_acc
