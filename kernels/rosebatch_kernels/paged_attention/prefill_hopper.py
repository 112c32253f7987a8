"""Prefill attention for Hopper, in Gluon: a warp that copies, and two groups of four warps that compute.

The same work as ``prefill``, for caches of 16 bits. A persistent program serves one item after the other. An item is a
tile of query tokens and two query heads of a K/V head. One warp copies queries, keys and values to shared memory (TMA).
Each warp group has a head, and both read the same keys and values. A warp group starts the products q·k of a tile of
keys before it weighs the values of the tile before. So its exponentials run beside a matrix product
(FlashAttention-3, arXiv 2407.08608). The first products of an item start before the last values of the item before.

Keys are walked from the last to the first: the tile at the diagonal comes first, so that the others need no mask.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import math
from typing import Any, NamedTuple

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
# Bytes of K and V whose heads are walked at once, at most: most of a half of an H100's L2.
_CACHED = 10 << 20
# Tiles that a program looks at together.
_COUNTED = gl.constexpr(512)
# No score is as low: of rows that saw no key yet. Finite, so that differences are.
_NO_SCORE = gl.constexpr(-1e30)
# Of what is copied. Triton checks each one that is made, which takes as long as a short launch.
_COPIED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
# Their names up to Triton 3.6.
_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


class Program(NamedTuple):
    """Constants of a program.

    Attributes:
        ROWS: query tokens of a tile.
        KEYS: keys of a tile.
        Q_STAGES, K_STAGES, V_STAGES: tiles of Q for a head, of K and of V in shared memory. With two of Q, whole tiles
            of the result go through the one that is done with, and are copied (TMA).
        PIECE: keys of a copy, all of a block.
        SECTIONS: K/V heads are walked in so many parts, see ``sections_of``.
    """

    ROWS: int
    KEYS: int
    Q_STAGES: int
    K_STAGES: int
    V_STAGES: int
    PIECE: int
    SECTIONS: int


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
    rows = [num_heads, len(q), shape.D]
    _prefill_hopper[(min(device.processors, items),)](
        out=out,
        results=_descriptor(out, rows, [shape.D, out.stride(0), 1], TILE_ROWS, shape),
        queries=_descriptor(q, rows, [shape.D, q.stride(0), 1], TILE_ROWS, shape),
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
        PROGRAM=Program(
            TILE_ROWS,
            program.keys,
            program.q_stages,
            program.k_stages,
            program.v_stages,
            piece,
            sections_of(len(q), shape.KV_HEADS, shape.D),
        ),
        num_warps=4,
        maxnreg=_LAUNCH_REGISTERS,
        **launch_options(device),
    )
    return out


def sections_of(tokens: int, kv_heads: int, size: int) -> int:
    """Parts in which K/V heads are walked: one, or a part for each, so that its K and V stay in L2 for all tiles.

    Tokens are taken as those of whole prompts. In one part, the longest tiles of all heads come first: few tiles
    balance better. A warm-up compiles both forms, so there are no more of them.
    """
    return 1 if tokens * kv_heads * size * 4 <= _CACHED else kv_heads


def _descriptor(tensor: Tensor, sizes: list[int], strides: list[int], rows: int, shape: Shape) -> Any:
    """A tensor ``[heads, tokens, D]`` whose copies have so many tokens. What lies outside of it is copied as zeros."""
    return TensorDescriptor(tensor, sizes, strides, [1, rows, shape.WIDTH], _COPIED)


class Work(NamedTuple):
    """The tiles of a call, ``[at least number, 4]``, and the window of its rows or None."""

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
    """Tiles of Q, K or V in shared memory, and barriers that tell when one is full and when it is empty again."""

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
    results,
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
    q_stages: gl.constexpr = PROGRAM.Q_STAGES * _HEADS
    q_tiles = gl.allocate_shared_memory(queries.dtype, [q_stages, PROGRAM.ROWS, SHAPE.WIDTH], layout)
    k_tiles = gl.allocate_shared_memory(cache.dtype, [PROGRAM.K_STAGES, PROGRAM.KEYS, SHAPE.WIDTH], layout)
    v_tiles = gl.allocate_shared_memory(cache.dtype, [PROGRAM.V_STAGES, PROGRAM.KEYS, SHAPE.WIDTH], layout)
    q_ring = Ring(q_tiles, _barriers(q_stages, 1), _barriers(q_stages, 1))
    k_ring = Ring(k_tiles, _barriers(PROGRAM.K_STAGES, 1), _barriers(PROGRAM.K_STAGES, _HEADS))
    v_ring = Ring(v_tiles, _barriers(PROGRAM.V_STAGES, 1), _barriers(PROGRAM.V_STAGES, _HEADS))
    turns = _barriers(_HEADS, 1)
    rings = (q_ring, k_ring, v_ring)
    outputs = (out, results)
    # Written before the predecessor: see ``common.launch``.
    work = Work(tiles, _number_of_tiles(tiles, num_tiles, SHAPE), window)
    # The other warps start behind these.
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_compute, (rings, turns, outputs, work, scores, sinks, 0, SHAPE, PROGRAM)),
            (_compute, (rings, turns, outputs, work, scores, sinks, 1, SHAPE, PROGRAM)),
            (_copy, (rings, queries, cache, block_table, work, num_blocks, table_stride, SHAPE, PROGRAM)),
        ],
        [4, 1],
        [_COMPUTE_REGISTERS, _COPY_REGISTERS],
    )


@gluon.jit
def _number_of_tiles(tiles, number, SHAPE: gl.constexpr):
    """Tiles up to the last one with rows, or more, so that each program has an item. Others pad steps of a graph.

    An empty item takes as long as a short one: beside 128 prompts of 48 tokens, 224 took as long as the prompts.
    """
    pairs: gl.constexpr = SHAPE.KV_HEADS * ((SHAPE.GROUP + 1) // 2)
    at = gl.arange(0, _COUNTED, gl.BlockedLayout([1], [32], [4], [0]))
    last = gl.cdiv(gl.num_programs(0), pairs)
    for first in range(0, number, _COUNTED):
        count = gl.load(tiles + (first + at) * 4 + 3, mask=first + at < number, other=0)
        last = gl.maximum(last, gl.max(gl.where(count > 0, first + at + 1, 0), 0))
    return last


@gluon.jit
def _barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers of so many arrivals each."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def _item(work, turn, SHAPE: gl.constexpr, PROGRAM: gl.constexpr):
    """The item of a program's ``turn``, of no rows after the last.

    Items come in sections of K/V heads. Every other section has its longest tiles last, so that the lengths of
    successive items differ little; the last has them first. Every other turn goes through the programs backwards, so
    that long items do not meet the same ones.
    """
    pairs: gl.constexpr = SHAPE.KV_HEADS * ((SHAPE.GROUP + 1) // 2)
    sections: gl.constexpr = PROGRAM.SECTIONS
    together: gl.constexpr = pairs // sections
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    item = turn * programs + gl.where(turn % 2 == 0, own, programs - 1 - own)
    there = item < work.number * pairs
    size = work.number * together
    section = 0
    place = item
    # Compared, because a division takes more registers, and some of the loops' would move.
    for _ in gl.static_range(1, sections):
        section += gl.where(place >= size, 1, 0)
        place -= gl.where(place >= size, size, 0)
    place = gl.where((sections - 1 - section) % 2 == 0, place, size - 1 - place)
    tile = work.tiles + place // together * 4
    return Item(
        gl.load(tile, mask=there, other=0),
        gl.load(tile + 1, mask=there, other=0),
        gl.load(tile + 2, mask=there, other=0),
        gl.load(tile + 3, mask=there, other=0),
        section * together + place % together,
    )


@gluon.jit
def _turns(work, SHAPE: gl.constexpr):
    """Items of a program."""
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    items = work.number * (SHAPE.KV_HEADS * ((SHAPE.GROUP + 1) // 2))
    whole = items // programs
    place = gl.where(whole % 2 == 0, own, programs - 1 - own)
    return whole + gl.where(place < items % programs, 1, 0)


@gluon.jit
def _bounds(item, window, PROGRAM: gl.constexpr):
    """Tiles of keys: the first that a row sees, the one after the last, and between them those that all rows see.

    An item of no rows has a tile as well, of zeros: so each item has a first tile.
    """
    start = item.count * 0
    full = start
    stop = gl.maximum(gl.cdiv(item.position + item.count, PROGRAM.KEYS), 1)
    whole = gl.minimum((item.position + 1) // PROGRAM.KEYS, stop - 1)
    if window is not None:
        start = gl.minimum(gl.maximum(item.position + 1 - window, 0) // PROGRAM.KEYS, stop - 1)
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
    """The warp that copies queries, keys and values of all items in the order in which they are needed.

    Values are needed a step after their keys, beside the next keys.
    """
    q_ring, k_ring, v_ring = rings
    pairs: gl.constexpr = (SHAPE.GROUP + 1) // 2
    pieces: gl.constexpr = PROGRAM.KEYS // PROGRAM.PIECE
    values = num_blocks * SHAPE.KV_HEADS
    copied = 0
    following = _item(work, 0, SHAPE, PROGRAM)
    rows_before = ()
    places_before = ()
    for _piece in gl.static_range(pieces):
        rows_before += (following.count * 0,)
        places_before += (following.count * 0,)
    for turn in range(_turns(work, SHAPE)):
        item = following
        following = _item(work, turn + 1, SHAPE, PROGRAM)
        kv_head = item.pair // pairs
        for i in gl.static_range(_HEADS):
            head = kv_head * SHAPE.GROUP + gl.minimum(item.pair % pairs * 2 + i, SHAPE.GROUP - 1)
            slot = turn % PROGRAM.Q_STAGES * 2 + i
            full = q_ring.full.index(slot)
            mbarrier.wait(q_ring.empty.index(slot), (turn // PROGRAM.Q_STAGES & 1) ^ 1)
            mbarrier.expect(full, PROGRAM.ROWS * SHAPE.WIDTH * 2)
            _load(queries, [head, item.first_row, 0], full, q_ring.tiles.index(slot))
        table = block_table + item.sequence * table_stride
        end = item.position + item.count
        start, _, _, stop = _bounds(item, work.window, PROGRAM)
        first = item.count * 0
        if work.window is not None:
            first = gl.maximum(item.position + 1 - work.window, 0)
        for back in range(stop - start):
            key = (stop - 1 - back) * PROGRAM.KEYS
            rows = ()
            places = ()
            for piece in gl.static_range(pieces):
                n = key + piece * PROGRAM.PIECE
                block = gl.load(table + gl.maximum(gl.minimum(gl.maximum(n, first), end - 1), 0) // SHAPE.BLOCK)
                rows += (block * SHAPE.KV_HEADS + kv_head,)
                # What lies outside of a block is zeros. So keys that no sequence wrote are not read: the piece with
                # the end ends there, and those without a key lie before the block.
                place = n % SHAPE.BLOCK - gl.maximum(n + PROGRAM.PIECE - end, 0)
                places += (gl.where((n >= end) | (n + PROGRAM.PIECE <= first), -PROGRAM.PIECE, place),)
            _copy_tile(k_ring, PROGRAM.K_STAGES, copied, cache, rows, 0, places, SHAPE, PROGRAM)
            if copied > 0:
                _copy_tile(
                    v_ring, PROGRAM.V_STAGES, copied - 1, cache, rows_before, values, places_before, SHAPE, PROGRAM
                )
            rows_before = rows
            places_before = places
            copied += 1
    _copy_tile(v_ring, PROGRAM.V_STAGES, copied - 1, cache, rows_before, values, places_before, SHAPE, PROGRAM)


@gluon.jit
def _copy_tile(
    ring, STAGES: gl.constexpr, number, cache, rows, plane, places, SHAPE: gl.constexpr, PROGRAM: gl.constexpr
):
    """Tile ``number`` of K or of V as soon as its place is empty: its pieces by block and K/V head, and by place in it.

    ``plane`` is the first row of K or of V.
    """
    stage = number % STAGES
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), (number // STAGES & 1) ^ 1)
    mbarrier.expect(full, PROGRAM.KEYS * SHAPE.WIDTH * 2)
    for piece in gl.static_range(PROGRAM.KEYS // PROGRAM.PIECE):
        to = ring.tiles.index(stage).slice(piece * PROGRAM.PIECE, PROGRAM.PIECE)
        _load(cache, [rows[piece] + plane, places[piece], 0], full, to)


@gluon.jit
def _compute(
    rings,
    turns,
    outputs,
    work,
    scores,
    sinks,
    WHICH: gl.constexpr,
    SHAPE: gl.constexpr,
    PROGRAM: gl.constexpr,
):
    """A warp group that computes one head of each item."""
    q_ring, k_ring, v_ring = rings
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PROGRAM.KEYS, 16])
    of_values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.WIDTH, 16])
    r = gl.arange(0, PROGRAM.ROWS, gl.SliceLayout(1, of_scores))
    number = _turns(work, SHAPE)
    item = _item(work, 0, SHAPE, PROGRAM)
    slot = gl.to_tensor(WHICH)
    mbarrier.wait(q_ring.full.index(slot), 0)
    mbarrier.wait(k_ring.full.index(0), 0)
    s = _products(q_ring.tiles.index(slot), k_ring.tiles.index(0), of_scores, PROGRAM)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_ring.empty.index(0))
    weights, row_max, total = _first_weights(s, item, r, work.window, scores, PROGRAM)
    p = _operand(weights, q_ring.tiles.dtype, of_values)
    # Tiles of keys so far.
    steps = 1
    following = _item(work, 1, SHAPE, PROGRAM)
    for turn in range(number):
        own = item.position + r
        start, full, whole, stop = _bounds(item, work.window, PROGRAM)
        acc = gl.full([PROGRAM.ROWS, SHAPE.WIDTH], 0.0, gl.float32, of_values)
        sums = Sums(p, acc, row_max, total)
        operands = Operands(_queries(q_ring, slot, steps, PROGRAM), k_ring, v_ring, turns)
        for back in range(stop - 1 - whole):
            base = own - (stop - 2 - back) * PROGRAM.KEYS
            sums = _step(operands, sums, steps, base, work.window, scores, True, WHICH, SHAPE, PROGRAM)
            steps += 1
        operands = Operands(_queries(q_ring, slot, steps, PROGRAM), k_ring, v_ring, turns)
        for _ in range(whole - full):
            sums = _step(operands, sums, steps, own, work.window, scores, False, WHICH, SHAPE, PROGRAM)
            steps += 1
        if work.window is not None:
            operands = Operands(_queries(q_ring, slot, steps, PROGRAM), k_ring, v_ring, turns)
            for back in range(full - start):
                base = own - (full - 1 - back) * PROGRAM.KEYS
                sums = _step(operands, sums, steps, base, work.window, scores, True, WHICH, SHAPE, PROGRAM)
                steps += 1
        if PROGRAM.Q_STAGES == 1:
            mbarrier.arrive(q_ring.empty.index(slot))
        p, acc, row_max, total = sums
        before = item
        slot_before = slot
        max_before = row_max
        total_before = total
        if turn + 1 < number:
            # The first tile of the next item, beside the last values of this one.
            item = following
            slot = (turn + 1) % PROGRAM.Q_STAGES * 2 + WHICH
            mbarrier.wait(q_ring.full.index(slot), (turn + 1) // PROGRAM.Q_STAGES & 1)
            operands = Operands(q_ring.tiles.index(slot), k_ring, v_ring, turns)
            s, acc = _both_products(operands, p, acc, steps, WHICH, PROGRAM)
            following = _item(work, turn + 2, SHAPE, PROGRAM)
            weights, row_max, total = _first_weights(s, item, r, work.window, scores, PROGRAM)
            acc = _values(v_ring, p, acc, steps - 1, PROGRAM)
            p = _operand(weights, q_ring.tiles.dtype, of_values)
            _write(
                acc,
                max_before,
                total_before,
                before,
                q_ring.tiles,
                slot_before,
                outputs,
                scores,
                sinks,
                WHICH,
                SHAPE,
                PROGRAM,
            )
            steps += 1
        else:
            stage = (steps - 1) % PROGRAM.V_STAGES
            mbarrier.wait(v_ring.full.index(stage), (steps - 1) // PROGRAM.V_STAGES & 1)
            acc = warpgroup_mma(p, v_ring.tiles.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _write(
                acc,
                max_before,
                total_before,
                before,
                q_ring.tiles,
                slot_before,
                outputs,
                scores,
                sinks,
                WHICH,
                SHAPE,
                PROGRAM,
            )
        if PROGRAM.Q_STAGES > 1:
            # The copy has read the result: queries may come.
            tma.store_wait(0)
            mbarrier.arrive(q_ring.empty.index(slot_before))


@gluon.jit
def _queries(q_ring, slot, steps, PROGRAM: gl.constexpr):
    """The queries of a slot, for the loop that starts after so many steps."""
    if PROGRAM.Q_STAGES > 1:
        # Adds 0, and makes the address another value in each loop. ptxas (CUDA 12.8) computes what the loops' addresses
        # share before the first loop alone: where that has no turn, the next one would read stale registers.
        slot += steps >> 31
    return q_ring.tiles.index(slot)


@gluon.jit
def _first_weights(s, item, r, window, scores, PROGRAM: gl.constexpr):
    """Of the products of an item's first tile of keys, its last one: weights, largest scores, and sums."""
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PROGRAM.KEYS, 16])
    s, factor = _scores(s, scores)
    end = item.position + item.count
    tile = gl.maximum(gl.cdiv(end, PROGRAM.KEYS), 1) - 1
    keys = _last_keys(end, tile, of_scores, PROGRAM)
    s = _masked(s, keys, item.position + r - tile * PROGRAM.KEYS, window)
    row_max = gl.maximum(gl.max(s, 1), _NO_SCORE)
    weights = gl.exp2(s * factor - (row_max * factor)[:, None])
    return weights, row_max, gl.sum(weights, 1)


@gluon.jit
def _write(
    acc,
    row_max,
    total,
    item,
    tiles,
    slot,
    outputs,
    scores,
    sinks,
    WHICH: gl.constexpr,
    SHAPE: gl.constexpr,
    PROGRAM: gl.constexpr,
):
    """Divide the weighted values of an item's rows by their weights, and store them.

    A whole tile goes through a slot of ``tiles`` in shared memory; its copy is to be waited for.
    """
    of_values: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SHAPE.WIDTH, 16])
    pairs: gl.constexpr = (SHAPE.GROUP + 1) // 2
    out, results = outputs
    head = item.pair // pairs * SHAPE.GROUP + item.pair % pairs * 2 + WHICH
    if sinks is not None:
        factor = scores.scale
        if scores.cap is not None:
            factor = 1.0
        sink = gl.load(sinks + gl.minimum(head, SHAPE.HEADS - 1)).to(gl.float32)
        total += gl.exp2(gl.minimum(sink * 1.4426950408889634 - row_max * factor, 120.0))
    share = gl.convert_layout(1.0 / gl.maximum(total, 1e-30), gl.SliceLayout(1, of_values))
    result = (acc * share[:, None]).to(out.dtype.element_ty)
    there = item.pair % pairs * 2 + WHICH < SHAPE.GROUP
    if PROGRAM.Q_STAGES > 1 and item.count == PROGRAM.ROWS:
        if there:
            tile = tiles.index(slot)
            tile.store(result)
            fence_async_shared()
            _store(results, [head, item.first_row, 0], tile)
    else:
        here = out + (item.first_row.to(gl.int64) * SHAPE.HEADS + head) * SHAPE.D
        line = gl.arange(0, PROGRAM.ROWS, gl.SliceLayout(1, of_values))[:, None]
        d = gl.arange(0, SHAPE.WIDTH, gl.SliceLayout(0, of_values))[None, :]
        mine = (line < item.count) & (d < SHAPE.D) & there
        gl.store(here + (line * (SHAPE.HEADS * SHAPE.D) + d), result, mask=mine)


@gluon.jit
def _step(
    operands,
    sums,
    steps,
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
    q, _, v_ring, _ = operands
    p, acc, row_max, total = sums
    s, acc = _both_products(operands, p, acc, steps, WHICH, PROGRAM)
    s, factor = _scores(s, scores)
    if MASKED:
        keys = gl.arange(0, PROGRAM.KEYS, gl.SliceLayout(0, of_scores))
        s = _masked(s, keys, own, window)
    weights, shrink, row_max, total = _weigh(s, factor, row_max, total)
    acc = _values(v_ring, p, acc, steps - 1, PROGRAM)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, of_values))[:, None]
    return Sums(_operand(weights, q.dtype, of_values), acc, row_max, total)


@gluon.jit
def _both_products(operands, p, acc, steps, WHICH: gl.constexpr, PROGRAM: gl.constexpr):
    """q·k of a tile of keys, and the product of ``p`` with the values of the tile before, which is to be waited for."""
    of_scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PROGRAM.KEYS, 16])
    q, k_ring, v_ring, turns = operands
    stage = steps % PROGRAM.K_STAGES
    before = steps - 1
    stage_before = before % PROGRAM.V_STAGES
    mbarrier.wait(k_ring.full.index(stage), steps // PROGRAM.K_STAGES & 1)
    _wait_for_turn(turns, before, WHICH)
    s = _products(q, k_ring.tiles.index(stage), of_scores, PROGRAM)
    mbarrier.wait(v_ring.full.index(stage_before), before // PROGRAM.V_STAGES & 1)
    acc = warpgroup_mma(p, v_ring.tiles.index(stage_before), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - WHICH))
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(k_ring.empty.index(stage))
    return s, acc


@gluon.jit
def _values(v_ring, p, acc, step, PROGRAM: gl.constexpr):
    """``acc``, when the product of ``p`` with the values of a step has ended."""
    stage = step % PROGRAM.V_STAGES
    # Passed already. ptxas moves no exponential past the end of a block: without one, they would wait for the product.
    mbarrier.wait(v_ring.full.index(stage), step // PROGRAM.V_STAGES & 1)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(v_ring.empty.index(stage))
    return acc


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
