"""Decode attention over keys that many sequences share, once for all of them, on the tensor cores.

One program serves an item (see ``rosebatch_kernels.common.shared_keys``), one K/V head and up to 128 queries: the
members' heads that share it. It reads the shared K and V once for all of these; the decode kernel would read them for
each row. Norm and rotation of q are those of the decode kernel (source of the idea: Hydragen, arXiv 2402.05099).

Where a row's bits may not depend on the batch, an item's keys are cut in the pieces of the decode kernel, each with
tiles as long as there. A kernel before this one norms and rotates q in tiles as wide as there.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl

from rosebatch_kernels.common.decode_step import SharedPartials, first_line, query_halves
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.heads import normed_and_rotated, shape_of, turn, weight_halves
from rosebatch_kernels.common.kv_tiles import pages_of
from rosebatch_kernels.common.launch import launch_options, wait, wait_before_return
from rosebatch_kernels.common.scores import ScoreFactors
from rosebatch_kernels.common.shared_keys import MAX_PARTS, MEMBERS, QUERIES, SharedKeys
from rosebatch_kernels.common.whole_numbers import cdiv, next_power_of_2
from rosebatch_kernels.paged_attention.online_softmax import (
    attend_tiles,
    leave,
    no_key,
    no_key_in_order,
    one_column,
    queries,
)
from rosebatch_kernels.paged_attention.sizes import Sizes, is_widest, program_of


def attend_shared(
    tokens: dict[str, Any],
    results: SharedPartials,
    keys: SharedKeys,
    scores: ScoreFactors,
    tile: int,
    *,
    sizes: Sizes,
    device: Device,
) -> None:
    """Attend to shared keys and leave each row's partial results.

    Args:
        tokens: of ``token_arguments``, and the cache's scales.
        results: for partial results, which ``rosebatch_kernels.paged_attention.decode`` takes over.
        keys: of the step.
        scores: factors.
        tile: keys of a tile of the decode kernel.
        sizes: of programs.
    """
    shape = tokens["SHAPE"]
    program = sizes.shared.narrow if shape.D <= 128 else sizes.shared.large_heads
    max_queries, pieces = QUERIES, sizes.decode.pieces
    if is_widest(shape.D):
        program, max_queries = sizes.shared.widest, max_queries // 2
    if pieces:
        # As many keys ahead at most.
        stages = max(min(program.stages, program.stages * program.keys // tile), 1)
        program = program._replace(keys=tile, stages=stages)
        tokens = _with_ready_queries(tokens, sizes=sizes, device=device)
    if tokens["tokens"].qkv.dtype.itemsize == 4:
        program, max_queries = sizes.shared.fp32, QUERIES // 4
    rows = min(max_queries, next_power_of_2(MEMBERS * shape.GROUP))
    _attend_shared[(shape.KV_HEADS, len(keys.items), cdiv(MEMBERS * shape.GROUP, rows))](
        **tokens,
        items=keys.items,
        members=keys.members,
        results=results,
        scores=scores,
        QUERIES=rows,
        PARTS=pieces or MAX_PARTS,
        PIECES=pieces > 0,
        TILE=program.keys,
        STAGES=program.stages,
        num_warps=program.warps,
        maxnreg=program.registers,
        **launch_options(device),
    )


@triton.jit(do_not_specialize=["num_blocks"])
def _attend_shared(
    items,
    members,
    tokens,
    cache,
    scales,
    block_table,
    results,
    scores,
    num_blocks,
    table_stride,
    SHAPE: tl.constexpr,
    QUERIES: tl.constexpr,
    PARTS: tl.constexpr,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    # What the host wrote is older than this kernel's predecessor.
    item = items + tl.program_id(1) * 5
    count = tl.load(item + 1)
    first_query = tl.program_id(2) * QUERIES
    if first_query >= count * SHAPE.GROUP:
        wait_before_return((tl.program_id(1) == 0) & (first_query == 0), PDL)
        return
    group_members = members + tl.load(item)
    first = tl.load(item + 2)
    end = tl.load(item + 3)
    part = tl.load(item + 4)
    r = first_query + tl.arange(0, QUERIES)
    g = r % SHAPE.GROUP
    row = tl.load(group_members + tl.minimum(r // SHAPE.GROUP, count - 1))
    position = tl.load(tokens.positions + row * tokens.state_stride)
    real = (r < count * SHAPE.GROUP) & (position < tl.load(tokens.limits + row * tokens.state_stride))
    # Rotary tables may have no row for a sequence that has ended.
    position = tl.where(real, position, 0)
    pages = pages_of(cache, scales, num_blocks, block_table + tl.load(group_members) * table_stride, head, SHAPE)
    first_tile = first // TILE
    block = tl.load(pages.table + (first_tile * TILE) // SHAPE.BLOCK)
    turned = turn(tokens.rotary, position[:, None], SHAPE)
    own_head = (head * SHAPE.GROUP + g)[:, None]
    q_weights = weight_halves(tokens.q_norm, own_head, real[:, None], SHAPE)
    if PDL:
        wait()

    q_halves = query_halves(tokens, row[:, None], own_head, real[:, None], SHAPE)
    q = queries(normed_and_rotated(q_halves, q_weights, turned, SHAPE), scores, pages)
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    line = first_line(row, head, PARTS, SHAPE) + g
    wanted = real[:, None] & (d < SHAPE.D)
    if PIECES:
        for piece in tl.range(first // part, tl.cdiv(end, part), num_stages=1):
            begin = piece * part
            block = tl.load(pages.table + begin // SHAPE.BLOCK)
            keys = first, end, begin // TILE, tl.minimum(begin + part, end) // TILE, block
            sums = no_key_in_order(QUERIES, SHAPE.WIDTH)
            sums = attend_tiles(q, pages, keys, (keys[0], keys[1]), sums, scores, SHAPE, TILE, False, STAGES)
            leave(results, line + piece * SHAPE.GROUP, one_column(sums), wanted, real, d, SHAPE)
        return
    keys = first, end, first_tile, tl.cdiv(end, TILE), block
    sums = attend_tiles(
        q, pages, keys, (keys[0], keys[1]), no_key(QUERIES, SHAPE.WIDTH), scores, SHAPE, TILE, False, STAGES
    )
    leave(results, line + part * SHAPE.GROUP, sums, wanted, real, d, SHAPE)


def _with_ready_queries(tokens: dict[str, Any], *, sizes: Sizes, device: Device) -> dict[str, Any]:
    """The arguments with q normed and rotated in memory of its own. A norm's sum goes by the tile, too."""
    given, shape = tokens["tokens"], tokens["SHAPE"]
    if given.rotary is None and given.q_norm is None:
        return tokens
    rows = len(given.qkv)
    ready = torch.empty(rows, shape.HEADS * shape.D, dtype=given.qkv.dtype, device=given.qkv.device)
    program = program_of(shape.GROUP, shape.D, given.qkv.dtype, e4m3=False, sizes=sizes)
    _ready_queries[(shape.KV_HEADS, rows)](
        tokens=given,
        ready=ready,
        SHAPE=shape,
        MEMBERS=next_power_of_2(shape.GROUP),
        num_warps=program.warps,
        **launch_options(device),
    )
    plain = shape_of(tokens["cache"], shape.HEADS, None, None)
    given = given._replace(qkv=ready, qkv_stride=ready.stride(0), rotary=None, q_norm=None, k_norm=None)
    return tokens | {"tokens": given, "SHAPE": plain}


@triton.jit
def _ready_queries(tokens, ready, SHAPE: tl.constexpr, MEMBERS: tl.constexpr, PDL: tl.constexpr):
    head = tl.program_id(0)
    row = tl.program_id(1)
    position = tl.load(tokens.positions + row * tokens.state_stride)
    if position >= tl.load(tokens.limits + row * tokens.state_stride):
        wait_before_return(head == 0, PDL)
        return
    turned = turn(tokens.rotary, position, SHAPE)
    m = tl.arange(0, MEMBERS)[:, None]
    q_weights = weight_halves(tokens.q_norm, head * SHAPE.GROUP + m, m < SHAPE.GROUP, SHAPE)
    if PDL:
        wait()
    q_halves = query_halves(tokens, row, head * SHAPE.GROUP + m, m < SHAPE.GROUP, SHAPE)
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    place = ready + row.to(tl.int64) * (SHAPE.HEADS * SHAPE.D) + (head * SHAPE.GROUP + m) * SHAPE.D + d
    q = normed_and_rotated(q_halves, q_weights, turned, SHAPE)
    tl.store(place, q, mask=(m < SHAPE.GROUP) & (d < SHAPE.D))
