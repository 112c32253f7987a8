"""What LoRA adapters add to products in Triton: rows sorted by adapter, a tile of one adapter's rows a program.

Two launches. The first multiplies x with A, each program some columns of it, and leaves parts of the sums in fp32. The
second adds the parts up, multiplies with B and adds that to the product; of a gated product it activates as well.
Adapters are read once for a tile of rows (source: S-LoRA, arXiv 2311.03285; Punica, arXiv 2310.18547).

Rows are sorted once a step, for all products. How many tiles have an adapter is known on the device alone: programs of
the second launch take tile after tile of those, so that a CUDA graph for any mixture costs no more than this one needs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.adapters.layout import TILE, Rows, Stack
from rosebatch_kernels.adapters.sizes import Sizes
from rosebatch_kernels.common.activations import GATES, activate
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.common.launch import launch_options, lines_of, prefetch, wait
from rosebatch_kernels.common.rounded import rounded
from rosebatch_kernels.common.sizes import value_at
from rosebatch_kernels.common.sort_rows import sort_by_group
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2

# Ranks that are multiplied at a time, at most.
_MOST_RANKS = 64


def sort_rows(adapters: Tensor, count: int, *, sizes: Sizes, device: Device) -> Rows:
    """See ``reference.sort_rows``; tiles have fewer rows."""
    tile_rows = value_at(sizes.rows, len(adapters))
    order = sort_by_group(adapters, count + 1, tile_rows, sizes.chunk, device=device)
    return Rows(adapters, order, tile_rows)


def add_(out: Tensor, x: Tensor, stack: Stack, rows: Rows, *, sizes: Sizes, device: Device) -> Tensor:
    """See ``reference.add_``."""
    y = _shrink_rows(x, stack, rows, sizes=sizes, device=device)
    _launch(y, stack, rows, len(stack.columns), {"out": out, "out_stride": out.stride(0)}, sizes=sizes, device=device)
    return out


def gated(
    gate_up: Tensor, x: Tensor, stack: Stack, rows: Rows, activation: str, *, sizes: Sizes, device: Device
) -> Tensor:
    """See ``reference.gated``."""
    assert stack.is_gated, "one half is the gate of the other"
    y, size = _shrink_rows(x, stack, rows, sizes=sizes, device=device), gate_up.shape[1] // 2
    out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
    given = {"out": out, "out_stride": size, "gate_up": gate_up, "stride": gate_up.stride(0)}
    given |= {"UP_PART": stack.num_parts - 1, "GATE": GATES[activation]}
    _launch(y, stack, rows, cdiv(size, TILE // 2), given, sizes=sizes, device=device)
    return out


def _shrink_rows(x: Tensor, stack: Stack, rows: Rows, *, sizes: Sizes, device: Device) -> Tensor:
    """``A x`` in parts ``[S, T, P · r]`` fp32 that are to be added up, in the order of the sorted rows."""
    assert x.stride(-1) == 1, "the last axis is contiguous"
    (count, depth), ranks, wide = x.shape, stack.a.shape[1], x.itemsize == 4
    step = sizes.wide_depth if wide else sizes.depth
    share = cdiv(min(value_at(sizes.shares, count), depth), step) * step
    splits, tile_ranks = cdiv(depth, share), min(next_power_of_2(ranks), sizes.ranks)
    y = torch.empty(splits, count, ranks, dtype=torch.float32, device=x.device)
    _shrink[(len(rows.order.tiles), splits, cdiv(ranks, tile_ranks))](
        x=x,
        a=stack.a,
        y=y,
        rows=rows.order.rows,
        tiles=rows.order.tiles,
        count=count,
        x_stride=x.stride(0),
        K=depth,
        RANKS=ranks,
        SHARE=share,
        ROWS=rows.tile_rows,
        TILE_RANKS=tile_ranks,
        DEPTH=step,
        STAGES=sizes.shrink_stages,
        PRECISION=_precision(x),
        num_warps=sizes.shrink_warps,
        **launch_options(device),
    )
    return y


def _launch(
    y: Tensor, stack: Stack, rows: Rows, column_tiles: int, given: dict[str, Any], *, sizes: Sizes, device: Device
) -> None:
    """The second launch, see above."""
    order, ranks = rows.order, stack.b.shape[2]
    most = len(order.tiles) * column_tiles
    programs = min(most, sizes.programs * device.processors)
    # The largest power of two in the ranks, which are a multiple of 16.
    depth = min(ranks & -ranks, _MOST_RANKS)
    kernel = _expand_gated if "GATE" in given else _expand
    if kernel is _expand:
        given |= {"columns": stack.columns, "ALIGNMENT": stack.alignment}
    kernel[(programs,)](
        y=y,
        b=stack.b,
        rows=order.rows,
        tiles=order.tiles,
        tile_ends=order.tile_ends,
        count=y.shape[1],
        column_tiles=column_tiles,
        N=stack.b.shape[1],
        GROUPS=len(order.tile_ends),
        WIDTH=y.shape[2],
        RANKS=ranks,
        SPLITS=len(y),
        ROWS=rows.tile_rows,
        TILE=TILE // 2 if kernel is _expand_gated else TILE,
        DEPTH=depth,
        LINES=lines_of(TILE * ranks * stack.b.itemsize),
        STAGES=sizes.stages,
        PRECISION=_precision(stack.b),
        num_warps=value_at(sizes.warps, rows.tile_rows),
        maxnreg=value_at(sizes.registers, rows.tile_rows),
        **given,
        **launch_options(device),
    )


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit(do_not_specialize=["count"])
def _shrink(
    x,
    a,
    y,
    rows,
    tiles,
    count,
    x_stride,
    K: tl.constexpr,
    RANKS: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    adapter, place, present, row = _rows_of(tl.program_id(0), tiles, rows, ROWS)
    if adapter == 0:
        return
    split = tl.program_id(1)
    n = tl.program_id(2) * TILE_RANKS + tl.arange(0, TILE_RANKS)
    x_rows = x + row[:, None] * x_stride
    # Past the end, read the last row again: its results are not stored.
    a_rows = a + ((adapter - 1).to(tl.int64) * RANKS + tl.minimum(n, RANKS - 1))[:, None] * K
    k = tl.arange(0, DEPTH)[None, :]
    acc = tl.zeros([ROWS, TILE_RANKS], tl.float32)
    begin = split * SHARE
    for start in tl.range(begin, tl.minimum(begin + SHARE, K), DEPTH, num_stages=STAGES):
        column = start + k
        if K % DEPTH == 0:
            values = tl.load(x_rows + column, mask=present[:, None], other=0.0)
            weight = tl.load(a_rows + column)
        else:
            values = tl.load(x_rows + column, mask=present[:, None] & (column < K), other=0.0)
            weight = tl.load(a_rows + column, mask=column < K, other=0.0)
        acc = dot(values, tl.trans(weight), acc, PRECISION=PRECISION)
    at = (split * count + place)[:, None] * RANKS + n[None, :]
    tl.store(y + at, acc, mask=present[:, None] & (n < RANKS)[None, :])


@triton.jit(do_not_specialize=["count"])
def _expand(
    out,
    y,
    b,
    columns,
    rows,
    tiles,
    tile_ends,
    count,
    out_stride,
    column_tiles,
    ALIGNMENT: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    LINES: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    # Rows without an adapter come first.
    first = tl.load(tile_ends)
    items = (tl.load(tile_ends + GROUPS - 1) - first) * column_tiles
    if PDL:
        if program < items:
            begin = tl.load(columns + (program % column_tiles) * 3)
            adapter = tl.load(tiles + (first + program // column_tiles) * 3)
            _prefetch_b(b, adapter, begin, N, RANKS, LINES)
        wait()
    dtype = out.dtype.element_ty
    for item in tl.range(program, items, tl.num_programs(0), num_stages=STAGES):
        adapter, place, present, row = _rows_of(first + item // column_tiles, tiles, rows, ROWS)
        column = columns + (item % column_tiles) * 3
        # Else each number would be loaded by itself.
        n = tl.multiple_of(tl.load(column), ALIGNMENT) + tl.arange(0, TILE)
        inside = n < tl.multiple_of(tl.load(column + 1), ALIGNMENT)
        at = out + row[:, None] * out_stride + n[None, :]
        wanted = present[:, None] & inside[None, :]
        # All loads come before the product, so that they are in flight together.
        before = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
        y_rows = y + place * WIDTH + tl.load(column + 2) * RANKS
        added = _added(
            y_rows, present, b, adapter, n, inside, count, N, WIDTH, RANKS, SPLITS, ROWS, TILE, DEPTH, PRECISION
        )
        tl.store(at, (before + added).to(dtype), mask=wanted)


@triton.jit(do_not_specialize=["count"])
def _expand_gated(
    gate_up,
    out,
    y,
    b,
    rows,
    tiles,
    tile_ends,
    count,
    stride,
    out_stride,
    column_tiles,
    N: tl.constexpr,
    UP_PART: tl.constexpr,
    GATE: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    LINES: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows without an adapter are activated, too."""
    half: tl.constexpr = N // 2
    program = tl.program_id(0)
    items = tl.load(tile_ends + GROUPS - 1) * column_tiles
    if PDL:
        if program < items:
            adapter = tl.load(tiles + (program // column_tiles) * 3)
            if adapter > 0:
                begin = (program % column_tiles) * TILE
                _prefetch_b(b, adapter, begin, N, RANKS, LINES // 2)
                _prefetch_b(b, adapter, half + begin, N, RANKS, LINES // 2)
        wait()
    dtype = out.dtype.element_ty
    for item in tl.range(program, items, tl.num_programs(0), num_stages=STAGES):
        adapter, place, present, row = _rows_of(item // column_tiles, tiles, rows, ROWS)
        n = (item % column_tiles) * TILE + tl.arange(0, TILE)
        inside = n < half
        wanted = present[:, None] & inside[None, :]
        at = gate_up + row[:, None] * stride + n[None, :]
        gate = tl.load(at, mask=wanted, other=0.0).to(tl.float32)
        up = tl.load(at + half, mask=wanted, other=0.0).to(tl.float32)
        if adapter > 0:
            y_rows = y + place * WIDTH
            gate += _added(
                y_rows, present, b, adapter, n, inside, count, N, WIDTH, RANKS, SPLITS, ROWS, TILE, DEPTH, PRECISION
            )
            y_rows += UP_PART * RANKS
            up += _added(
                y_rows, present, b, adapter, half + n, inside, count, N, WIDTH, RANKS, SPLITS, ROWS, TILE, DEPTH,
                PRECISION,
            )  # fmt: skip
        # Rounded where separate kernels would round.
        factor = activate(rounded(gate, dtype), GATE).to(dtype).to(tl.float32)
        tl.store(out + row[:, None] * out_stride + n[None, :], (factor * rounded(up, dtype)).to(dtype), mask=wanted)


@triton.jit
def _rows_of(tile, tiles, rows, ROWS: tl.constexpr):
    """A tile's adapter, its places among the sorted rows, which of them there are, and the numbers of the rows."""
    own = tiles + tile * 3
    m = tl.arange(0, ROWS)
    # A tile without rows may have any group.
    places = tl.load(own + 2)
    adapter = tl.where(places > 0, tl.load(own), 0)
    present = m < places
    place = tl.load(own + 1) + m
    return adapter, place, present, tl.load(rows + place, mask=present, other=0).to(tl.int64)


@triton.jit
def _prefetch_b(b, adapter, begin, N: tl.constexpr, RANKS: tl.constexpr, LINES: tl.constexpr):
    """Start to bring an adapter's rows of B into the L2 cache; some lines may be of what follows in memory."""
    per_line: tl.constexpr = 128 // (b.dtype.element_ty.primitive_bitwidth // 8)
    at = begin.to(tl.int64) * RANKS + tl.arange(0, LINES) * per_line
    prefetch(b + (adapter - 1).to(tl.int64) * N * RANKS + tl.minimum(at, N * RANKS - 1))


@triton.jit
def _added(
    y_rows,
    present,
    b,
    adapter,
    n,
    inside,
    count,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``B A x`` of a tile of rows and outputs ``n``, fp32: the parts of ``A x`` are added up and rounded."""
    b_rows = b + ((adapter - 1).to(tl.int64) * N + n)[:, None] * RANKS
    acc = tl.zeros([ROWS, TILE], tl.float32)
    for start in tl.static_range(0, RANKS, DEPTH):
        rank = start + tl.arange(0, DEPTH)[None, :]
        weight = tl.load(b_rows + rank, mask=inside[:, None], other=0.0)
        values = tl.zeros([ROWS, DEPTH], tl.float32)
        for split in tl.static_range(SPLITS):
            part = y_rows[:, None] + split * count * WIDTH + rank
            values += tl.load(part, mask=present[:, None], other=0.0)
        acc = dot(values.to(b.dtype.element_ty), tl.trans(weight), acc, PRECISION=PRECISION)
    return acc
