"""Prefill attention for Hopper, in Gluon: a warp that copies, and two groups of four warps that compute.

The same work as ``prefill``, for caches of 16 bits. A persistent program serves one item after the other. An item is a
tile of query tokens and two query heads of a K/V head. One warp copies queries, keys and values to shared memory (TMA).
Each warp group has a head, and both read the same keys and values. A warp group starts the products q·k of a tile of
keys before it weighs the values of the tile before. So its exponentials run beside a matrix product
(FlashAttention-3, arXiv 2407.08608).

Keys are walked from the last to the first: the tile at the diagonal comes first, so that the others need no mask.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import math
from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.heads import Shape, shape_of
from rosebatch_kernels.common.launch import launch_options
from rosebatch_kernels.common.scores import score_factors
from rosebatch_kernels.common.tiles import TILE_ROWS
from rosebatch_kernels.paged_attention.sizes import HopperProgram

# Query heads of an item, one for each warp group that computes.
_HEADS = gl.constexpr(2)
# Registers of a thread: of the launch, of a thread that computes, and of one that copies.
_LAUNCH_REGISTERS = 168
_COMPUTE_REGISTERS = gl.constexpr(240)
_COPY_REGISTERS = gl.constexpr(24)
# Channels of a row that the copy stores in another order, so that the products read it without conflicts.
_MIN_WIDTH = 64
# No score is as low: of rows that saw no key yet. Finite, so that differences are.
_NO_SCORE = gl.constexpr(-1e30)
# Its name up to Triton 3.6.
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


class Program(NamedTuple):
    """Constants of a program.

    Attributes:
        ROWS: query tokens of a tile.
        KEYS: keys of a tile.
        STAGES: tiles of K, and as many of V, in shared memory.
        PIECE: keys of a copy, all of a block.
        TURNS: whether the warp groups issue their products in turn.
    """

    ROWS: int
    KEYS: int
    STAGES: int
    PIECE: int
    TURNS: bool


def prefill_hopper(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    program: HopperProgram,
    device: Device,
) -> Tensor:
    """See ``rosebatch_kernels.paged_attention.prefill``, whose ``hopper_program`` says which calls are served.

    The work is balanced if the tiles with the most keys come first.
    """
    shape = shape_of(cache, num_heads)
    shape = shape._replace(WIDTH=max(_MIN_WIDTH, shape.WIDTH))
    piece = math.gcd(shape.BLOCK, program.keys)
    out = q.new_empty(len(q), num_heads * shape.D)
    items = len(tiles) * shape.KV_HEADS * -(-shape.GROUP // 2)
    _prefill_hopper[(min(device.processors, items),)](
        out=out,
        queries=_descriptor(q, [num_heads, len(q), shape.D], [shape.D, q.stride(0), 1], TILE_ROWS, shape),
        cache=_descriptor(
            cache,
            [2 * cache.shape[1] * shape.KV_HEADS, shape.BLOCK, shape.D],
            [shape.BLOCK * shape.D, shape.D, 1],
            piece,
            shape,
        ),
        block_table=block_table,
        tiles=tiles,
        scores=score_factors(scale, soft_cap),
        sinks=sinks,
        num_tiles=len(tiles),
        num_blocks=cache.shape[1],
        table_stride=block_table.stride(0),
        window=window or None,
        SHAPE=shape,
        PROGRAM=Program(TILE_ROWS, program.keys, program.stages, piece, program.turns),
        num_warps=4,
        maxnreg=_LAUNCH_REGISTERS,
        **launch_options(device),
    )
    return out


def _descriptor(tensor: Tensor, sizes: list[int], strides: list[int], rows: int, shape: Shape) -> Any:
    """A tensor ``[heads, tokens, D]`` whose copies have so many tokens. What lies outside of it is copied as zeros."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    return TensorDescriptor(tensor, sizes, strides, [1, rows, shape.WIDTH], layout)


class Work(NamedTuple):
    """The tiles of a call, ``[number, 4]``, and the window of its rows or None."""

    tiles: Any
    number: Any
    window: Any


class Item(NamedTuple):
    """A tile of query tokens and a pair of heads."""

    sequence: Any
    first_row: Any
    position: Any
    count: Any
    pair: Any


class Ring(NamedTuple):
    """Tiles of K or of V in shared memory, and barriers that tell when one is full and when it is empty again."""

    tiles: Any
    full: Any
    empty: Any


class Operands(NamedTuple):
    """What a warp group multiplies: q ``[ROWS, WIDTH]``, the rings of K and V, and barriers of turns."""

    q: Any
    keys: Ring
    values: Ring
    turns: Any


class Sums(NamedTuple):
    """Of a tile's rows: weights of the tile of keys whose values come next, and over all before it the rest.

    Attributes:
        weights: ``[ROWS, KEYS]`` in 16 bits, as the product with values takes them.
        acc: ``[ROWS, WIDTH]``, weighted values.
        row_max: ``[ROWS]``, the largest score; that of ``weights`` included.
        total: ``[ROWS]``, the sum of weights; the same.
    """

    weights: Any
    acc: Any
    row_max: Any
    total: Any


@gluon.jit(do_not_specialize=["num_tiles", "num_blocks", "window"])
def _prefill_hopper(
    out,
    queries,
    cache,
    block_table,
    tiles,
    scores,
    sinks,
    num_tiles,
    num_blocks,
    table_stride,
    window,
    SHAPE: gl.constexpr,
    PROGRAM: gl.constexpr,
    PDL: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_tiles = gl.allocate_shared_memory(queries.dtype, [_HEADS, PROGRAM.ROWS, SHAPE.WIDTH], layout)
    k_tiles = gl.allocate_shared_memory(cache.dtype, [PROGRAM.STAGES, PROGRAM.KEYS, SHAPE.WIDTH], layout)
    v_tiles = gl.allocate_shared_memory(cache.dtype, [PROGRAM.STAGES, PROGRAM.KEYS, SHAPE.WIDTH], layout)
    q_ring = Ring(q_tiles, _barriers(_HEADS, 1), _barriers(_HEADS, 1))
    k_ring = Ring(k_tiles, _barriers(PROGRAM.STAGES, 1), _barriers(PROGRAM.STAGES, _HEADS))
    v_ring = Ring(v_tiles, _barriers(PROGRAM.STAGES, 1), _barriers(PROGRAM.STAGES, _HEADS))
    turns = _barriers(_HEADS, 1)
    rings = (q_ring, k_ring, v_ring)
    work = Work(tiles, num_tiles, window)
    # The other warps start behind these.
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_compute, (rings, turns, out, work, scores, sinks, 0, SHAPE, PROGRAM)),
            (_compute, (rings, turns, out, work, scores, sinks, 1, SHAPE, PROGRAM)),
            (_copy, (rings, queries, cache, block_table, work, num_blocks, table_stride, SHAPE, PROGRAM)),
        ],
        [4, 1],
        [_COMPUTE_REGISTERS, _COPY_REGISTERS],
    )


@gluon.jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers of so many arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def _item(work, turn, SHAPE: gl.constexpr):
    """The item of a program's ``turn``, of no rows after the last.

    Every other turn goes through the programs backwards, so that long items do not meet the same ones.
    """
    pairs: gl.constexpr = SHAPE.KV_HEADS * ((SHAPE.GROUP + 1) // 2)
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    item = turn * programs + gl.where(turn % 2 == 0, own, programs - 1 - own)
    there = item < work.number * pairs
    tile = work.tiles + item // pairs * 4
    return Item(
        gl.load(tile, mask=there, other=0),
        gl.load(tile + 1, mask=there, other=0),
        gl.load(tile + 2, mask=there, other=0),
        gl.load(tile + 3, mask=there, other=0),
        item % pairs,
    )


@gluon.jit
def _turns(work, SHAPE: gl.constexpr):
    """Items of a program, at most."""
    return gl.cdiv(work.number * (SHAPE.KV_HEADS * ((SHAPE.GROUP + 1) // 2)), gl.num_programs(0))


@gluon.jit
def _bounds(item, window, PROGRAM: gl.constexpr):
    """Tiles of keys: the first that a row sees, the one after the last, and between them those that all rows see."""
    start = item.count * 0
    full = start
    stop = gl.cdiv(item.position + item.count, PROGRAM.KEYS)
    whole = gl.minimum((item.position + 1) // PROGRAM.KEYS, stop - 1)
    if window is not None:
        start = gl.maximum(item.position + 1 - window, 0) // PROGRAM.KEYS
        whole = gl.maximum(whole, start)
        full = gl.cdiv(gl.maximum(item.position + item.count - window, 0), PROGRAM.KEYS)
        full = gl.minimum(gl.maximum(full, start), whole)
    return start, full, whole, stop


@gluon.jit
def _copy(
    rings,
    queries,
    cache,
    block_table,
    work,
    num_blocks,
    table_stride,
    SHAPE: gl.constexpr,
    PROGRAM: gl.constexpr,
):
    """The warp that copies queries, keys and values of all items in the order in which they are needed."""
    q_ring, k_ring, v_ring = rings
    pairs: gl.constexpr = (SHAPE.GROUP + 1) // 2
    copied = 0
    following = _item(work, 0, SHAPE)
    done = 0
    for turn in range(_turns(work, SHAPE)):
        item = following
        following = _item(work, turn + 1, SHAPE)
        if item.count > 0:
            kv_head = item.pair // pairs
            for i in gl.static_range(_HEADS):
                head = kv_head * SHAPE.GROUP + gl.minimum(item.pair % pairs * 2 + i, SHAPE.GROUP - 1)
                full = q_ring.full.index(i)
                mbarrier.wait(q_ring.empty.index(i), (done & 1) ^ 1)
                mbarrier.expect(full, PROGRAM.ROWS * SHAPE.WIDTH * 2)
                _load(queries, [head, item.first_row, 0], full, q_ring.tiles.index(i))
            done += 1
            table = block_table + item.sequence * table_stride
            end = item.position + item.count
            start, _, _, stop = _bounds(item, work.window, PROGRAM)
            first = item.count * 0
            if work.window is not None:
                first = gl.maximum(item.position + 1 - work.window, 0)
            for back in range(stop - start):
                key = (stop - 1 - back) * PROGRAM.KEYS
                stage = copied % PROGRAM.STAGES
                phase = (copied // PROGRAM.STAGES & 1) ^ 1
                copied += 1
                rows = ()
                places = ()
                for piece in gl.static_range(PROGRAM.KEYS // PROGRAM.PIECE):
                    n = key + piece * PROGRAM.PIECE
                    block = gl.load(table + gl.minimum(gl.maximum(n, first), end - 1) // SHAPE.BLOCK)
                    rows += (block * SHAPE.KV_HEADS + kv_head,)
                    # What lies outside of a block is zeros. So keys that no sequence wrote are not read: the piece with
                    # the end ends there, and those without a key lie before the block.
                    place = n % SHAPE.BLOCK - gl.maximum(n + PROGRAM.PIECE - end, 0)
                    places += (gl.where((n >= end) | (n + PROGRAM.PIECE <= first), -PROGRAM.PIECE, place),)
                _copy_tile(k_ring, stage, phase, cache, rows, 0, places, SHAPE, PROGRAM)
                _copy_tile(v_ring, stage, phase, cache, rows, num_blocks * SHAPE.KV_HEADS, places, SHAPE, PROGRAM)


@gluon.jit
def _copy_tile(ring, stage, phase, cache, rows, plane, places, SHAPE: gl.constexpr, PROGRAM: gl.constexpr):
    """A tile of K or of V as soon as its place is empty: its pieces by block and K/V head, and by place in the block.

    ``plane`` is the first row of K or of V.
    """
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), phase)
    mbarrier.expect(full, PROGRAM.KEYS * SHAPE.WIDTH * 2)
    for piece in gl.static_range(PROGRAM.KEYS // PROGRAM.PIECE):
        to = ring.tiles.index(stage).slice(piece * PROGRAM.PIECE, PROGRAM.PIECE)
        _load(cache, [rows[piece] + plane, places[piece], 0], full, to)


@gluon.jit
def _compute(
    rings,
    turns,
    out,
    work,
    scores,
    sinks,
    WHICH: gl.constexpr,
    SHAPE: gl.constexpr,
    PROGRAM: gl.constexpr,
):
    """A warp group that computes one head of each item."""
    q_ring, k_ring, v_ring = rings
    operands = Operands(q_ring.tiles.index(WHICH), k_ring, v_ring, turns)
    pairs: gl.constexpr = (SHAPE.GROUP + 1) // 2
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PROGRAM.KEYS, 16])
    of_values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.WIDTH, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, of_scores)
    r = gl.arange(0, PROGRAM.ROWS, of_rows)
    # Tiles of keys so far, and items.
    steps = 0
    done = 0
    following = _item(work, 0, SHAPE)
    for turn in range(_turns(work, SHAPE)):
        item = following
        following = _item(work, turn + 1, SHAPE)
        if item.count > 0:
            own = item.position + r
            start, full, whole, stop = _bounds(item, work.window, PROGRAM)
            mbarrier.wait(q_ring.full.index(WHICH), done & 1)
            done += 1
            stage = steps % PROGRAM.STAGES
            mbarrier.wait(k_ring.full.index(stage), steps // PROGRAM.STAGES & 1)
            s = _products(operands.q, k_ring.tiles.index(stage), of_scores, PROGRAM)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(k_ring.empty.index(stage))
            steps += 1
            row_max = gl.full([PROGRAM.ROWS], _NO_SCORE, gl.float32, of_rows)
            total = gl.full([PROGRAM.ROWS], 0.0, gl.float32, of_rows)
            acc = gl.full([PROGRAM.ROWS, SHAPE.WIDTH], 0.0, gl.float32, of_values)
            s, factor = _scores(s, scores)
            keys = _last_keys(item.position + item.count, stop - 1, of_scores, PROGRAM)
            s = _masked(s, keys, own - (stop - 1) * PROGRAM.KEYS, work.window)
            p, _, row_max, total = _weigh(s, factor, row_max, total)
            sums = Sums(_operand(p, operands.q.dtype, of_values), acc, row_max, total)
            for back in range(stop - 1 - whole):
                base = own - (stop - 2 - back) * PROGRAM.KEYS
                sums = _step(operands, sums, steps, done, base, work.window, scores, True, WHICH, SHAPE, PROGRAM)
                steps += 1
            for _ in range(whole - full):
                sums = _step(operands, sums, steps, done, own, work.window, scores, False, WHICH, SHAPE, PROGRAM)
                steps += 1
            if work.window is not None:
                for back in range(full - start):
                    base = own - (full - 1 - back) * PROGRAM.KEYS
                    sums = _step(operands, sums, steps, done, base, work.window, scores, True, WHICH, SHAPE, PROGRAM)
                    steps += 1
            mbarrier.arrive(q_ring.empty.index(WHICH))
            last = steps - 1
            stage = last % PROGRAM.STAGES
            mbarrier.wait(v_ring.full.index(stage), last // PROGRAM.STAGES & 1)
            acc = warpgroup_mma(sums.weights, v_ring.tiles.index(stage), sums.acc, is_async=True)
            total = sums.total
            head = item.pair // pairs * SHAPE.GROUP + item.pair % pairs * 2 + WHICH
            if sinks is not None:
                sink = gl.load(sinks + gl.minimum(head, SHAPE.HEADS - 1)).to(gl.float32)
                total += gl.exp2(gl.minimum(sink * 1.4426950408889634 - sums.row_max * factor, 120.0))
            share = gl.convert_layout(1.0 / gl.maximum(total, 1e-30), gl.SliceLayout(1, of_values))
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_ring.empty.index(stage))
            here = out + (item.first_row.to(gl.int64) * SHAPE.HEADS + head) * SHAPE.D
            line = gl.arange(0, PROGRAM.ROWS, gl.SliceLayout(1, of_values))[:, None]
            d = gl.arange(0, SHAPE.WIDTH, gl.SliceLayout(0, of_values))[None, :]
            mine = (line < item.count) & (d < SHAPE.D) & (item.pair % pairs * 2 + WHICH < SHAPE.GROUP)
            result = (acc * share[:, None]).to(out.dtype.element_ty)
            gl.store(here + (line * (SHAPE.HEADS * SHAPE.D) + d), result, mask=mine)


@gluon.jit
def _step(
    operands,
    sums,
    steps,
    done,
    own,
    window,
    scores,
    MASKED: gl.constexpr,
    WHICH: gl.constexpr,
    SHAPE: gl.constexpr,
    PROGRAM: gl.constexpr,
):
    """The scores of a tile of keys, beside the product of the weights before with the values of the tile before.

    ``own`` are positions of rows relative to the first key; only with MASKED.
    """
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PROGRAM.KEYS, 16])
    of_values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.WIDTH, 16])
    q, k_ring, v_ring, turns = operands
    p, acc, row_max, total = sums
    stage = steps % PROGRAM.STAGES
    before = steps - 1
    stage_before = before % PROGRAM.STAGES
    mbarrier.wait(k_ring.full.index(stage), steps // PROGRAM.STAGES & 1)
    if PROGRAM.TURNS:
        _wait_for_turn(turns, steps - done, WHICH)
    s = _products(q, k_ring.tiles.index(stage), of_scores, PROGRAM)
    mbarrier.wait(v_ring.full.index(stage_before), before // PROGRAM.STAGES & 1)
    acc = warpgroup_mma(p, v_ring.tiles.index(stage_before), acc, is_async=True)
    if PROGRAM.TURNS:
        mbarrier.arrive(turns.index(1 - WHICH))
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_ring.empty.index(stage))
    s, factor = _scores(s, scores)
    if MASKED:
        keys = gl.arange(0, PROGRAM.KEYS, gl.SliceLayout(0, of_scores))
        s = _masked(s, keys, own, window)
    weights, shrink, row_max, total = _weigh(s, factor, row_max, total)
    # Passed already. ptxas moves no exponential past the end of a block: without one, they would wait for the product.
    mbarrier.wait(v_ring.full.index(stage_before), before // PROGRAM.STAGES & 1)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(v_ring.empty.index(stage_before))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, of_values))[:, None]
    return Sums(_operand(weights, q.dtype, of_values), acc, row_max, total)


@gluon.jit
def _products(q, k, of_scores: gl.constexpr, PROGRAM: gl.constexpr):
    """q·k ``[ROWS, KEYS]`` of a tile of keys, to be waited for."""
    none = gl.full([PROGRAM.ROWS, PROGRAM.KEYS], 0.0, gl.float32, of_scores)
    return warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _scores(s, scores):
    """Of products: with a soft cap in units of ln 2, else as they are; and the factor that is left to multiply."""
    factor = scores.scale
    if scores.cap is not None:
        s = s * scores.scale
        small = gl.exp2(gl.abs(s) * -2.885390081777927)
        size = scores.cap * gl.fdiv(1.0 - small, 1.0 + small)
        s = gl.where(s < 0, -size, size)
        factor = 1.0
    return s, factor


@gluon.jit
def _weigh(s, factor, row_max, total):
    """Weights of scores, the factor on what was summed before, and the new largest scores and sums of weights."""
    higher = gl.maximum(row_max, gl.max(s, 1))
    offset = higher * factor
    weights = gl.exp2(s * factor - offset[:, None])
    shrink = gl.exp2(row_max * factor - offset)
    return weights, shrink, higher, total * shrink + gl.sum(weights, 1)


@gluon.jit
def _operand(weights, dtype: gl.constexpr, of_values: gl.constexpr):
    """Weights as the product with values takes them from registers."""
    # By hand: the compiler exchanges the halves of each register, and exchanges them again after the loop's turn.
    if dtype == gl.bfloat16:
        rounded = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [weights], dtype=gl.bfloat16, is_pure=False, pack=2
        )
    else:
        rounded = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [weights], dtype=gl.float16, is_pure=False, pack=2
        )
    return gl.convert_layout(rounded, gl.DotOperandLayout(0, of_values, 2))


@gluon.jit
def _masked(s, key, own, window):
    """Scores of the keys ``[KEYS]`` for rows at positions ``own [ROWS]``, -inf where a row does not see the key.

    By hand and in place: the compiler would compute the mask ahead of the products, and keep it in packed bits.
    """
    if window is not None:
        s = gl.inline_asm_elementwise(
            """{.reg .pred a, b;
            setp.gt.s32 a, $2, $3; setp.le.or.s32 b, $2, $4, a; selp.f32 $0, 0fFF800000, $1, b;}""",
            "=f,f,r,r,r",
            [s, key[None, :], own[:, None], (own - window)[:, None]],
            dtype=gl.float32,
            is_pure=False,
            pack=1,
        )
    else:
        s = gl.inline_asm_elementwise(
            "{.reg .pred a; setp.gt.s32 a, $2, $3; selp.f32 $0, 0fFF800000, $1, a;}",
            "=f,f,r,r",
            [s, key[None, :], own[:, None]],
            dtype=gl.float32,
            is_pure=False,
            pack=1,
        )
    return s


@gluon.jit
def _last_keys(end, tile, of_scores: gl.constexpr, PROGRAM: gl.constexpr):
    """The keys of the last tile, relative to its first, whose piece with the end was copied so that it ends there.

    Instead of those that the piece repeats or that are zeros: one that no row sees.
    """
    key = gl.arange(0, PROGRAM.KEYS, gl.SliceLayout(0, of_scores))
    piece = (end - 1) // PROGRAM.PIECE * PROGRAM.PIECE - tile * PROGRAM.KEYS
    behind = -end & (PROGRAM.PIECE - 1)
    copied = gl.where(key < piece, key, key - behind)
    return gl.where((key >= piece) & (copied < piece), 1 << 30, copied)


@gluon.jit
def _wait_for_turn(turns, number, WHICH: gl.constexpr):
    """Wait until the other warp group has issued the products of its turn of this number, or of the one before."""
    mbarrier.wait(turns.index(WHICH), (number & 1) ^ (1 - WHICH))
