"""HP1 decode attention that lists the keys with weight first, and then reads and adds the values of these alone.

A variant for measurements (source of the idea: article S4, section 7.4); ``rosebatch_kernels.hp1.variants`` times it
beside ``rosebatch_kernels.hp1.decode``. Nothing else calls it. That kernel leaves out the load of a value without
weight too, but walks over every key.

Each run of keys has a list of its own, in the memory that belongs to its keys. So nothing is counted between threads,
and the order of additions is that of the keys.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, operator"

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.arrivals import arrive
from rosebatch_kernels.common.heads import turn, weight_halves
from rosebatch_kernels.common.launch import launch_options, wait, wait_before_return
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.hp1 import decode as walking
from rosebatch_kernels.hp1.decode import (
    _add_up,
    _added,
    _before,
    _filters,
    _first_group,
    _group,
    _heads,
    _new_token,
    _row,
    _run_length,
    _states,
    _store,
    _zeros,
)
from rosebatch_kernels.hp1.gate import Gate
from rosebatch_kernels.hp1.runs import gated


def decode(
    qkv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    limits: Tensor,
    workspace: DecodeWorkspace,
    gate: Gate,
    *,
    num_heads: int,
    scale: float,
) -> Tensor:
    """As ``rosebatch_kernels.hp1.decode.decode`` with ``append=False``."""
    batch = len(qkv)
    _, blocks, kv_heads, block_size, size = cache.shape
    group = num_heads // kv_heads
    out = torch.empty(batch, num_heads * size, dtype=qkv.dtype, device=qkv.device)
    splits = workspace.num_splits(batch)
    width = max(16, triton.next_power_of_2(size))
    runs, keys = walking._runs_and_keys(width, group, cache.dtype)
    # So that a group of keys lies in one block.
    keys = gcd(keys, block_size)
    # The last run may begin behind the last key, and runs are whole groups.
    slots = block_table.shape[1] * block_size + splits * runs * keys
    places = torch.empty(batch, kv_heads, slots, dtype=torch.int64, device=qkv.device)
    weights = torch.empty(batch, num_heads, slots, dtype=torch.float32, device=qkv.device)
    clip_min, clip_max = gate.bounds(scale)
    _compacted_decode[(kv_heads, batch, splits)](
        out,
        qkv,
        cache,
        block_table,
        positions,
        limits,
        gate.taps,
        gate.gamma,
        places,
        weights,
        workspace.sums,
        workspace.arrived,
        scale,
        blocks,
        slots,
        qkv.stride(0),
        block_table.stride(0),
        positions.stride(0),
        walking.TUNED.least_keys,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=size,
        WIDTH=width,
        BLOCK=block_size,
        RUNS=runs,
        KEYS=keys,
        SPLITS=splits,
        MERGED=walking.TUNED.merged,
        TAPS=gate.taps.shape[1],
        RELU_PRE=gate.relu_pre,
        CLIP_MIN=clip_min,
        CLIP_MAX=clip_max,
        num_warps=walking.TUNED.warps,
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["num_blocks", "least"])
def _compacted_decode(
    out,
    qkv,
    cache,
    block_table,
    positions,
    limits,
    taps,
    gamma,
    places,
    weights,
    sums,
    arrived,
    scale,
    num_blocks,
    slots,
    qkv_stride,
    table_stride,
    state_stride,
    least,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
    TAPS: tl.constexpr,
    RELU_PRE: tl.constexpr,
    CLIP_MIN: tl.constexpr,
    CLIP_MAX: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(positions + row * state_stride)
    if position >= tl.load(limits + row * state_stride):
        wait_before_return(split == 0, PDL)
        return
    end = position + 1
    run, used = _run_length(end, least, RUNS, KEYS, SPLITS)
    if split >= used:
        return
    table = block_table + row * table_stride
    stride: tl.constexpr = KV_HEADS * BLOCK * D
    v_distance = num_blocks.to(tl.int64) * stride
    d = tl.arange(0, WIDTH)[None, :]
    real = d < D
    rows = cache + head * (BLOCK * D) + d
    first = (split * RUNS + tl.arange(0, RUNS)) * run
    last_group = tl.maximum(end - 1, 0) // KEYS * KEYS
    if PDL:
        wait()
    flight = _first_group(rows, table, first, last_group, real, D, BLOCK, KEYS, stride)
    begin = tl.minimum(first, end)
    before = _before(rows, table, begin, real, BLOCK, D, stride, TAPS)
    filters, factors = _filters(taps, gamma, head, scale, GROUP, TAPS)
    q_halves, _, _ = _new_token(qkv, qkv_stride, row, head, HEADS, KV_HEADS, GROUP, D, WIDTH, False, False)
    unused = weight_halves(qkv, 0.0, D, WIDTH, False, None)
    q = _heads(q_halves, unused, turn(qkv, qkv, position, D, WIDTH, False), GROUP, D, False, None)
    states = _states(q, before, begin, filters, GROUP, TAPS, RELU_PRE)
    own_places = places + (row * KV_HEADS + head).to(tl.int64) * slots + first
    own_weights = weights + (row * KV_HEADS + head).to(tl.int64) * GROUP * slots + first
    lists = own_places, own_weights, slots
    runs = first, run, end, last_group
    count = _listed(
        q,
        flight,
        rows,
        table,
        real,
        runs,
        states,
        filters,
        lists,
        GROUP,
        D,
        BLOCK,
        KEYS,
        stride,
        TAPS,
        RELU_PRE,
        CLIP_MIN,
        CLIP_MAX,
    )
    # The threads of a run read what one of them wrote.
    tl.debug_barrier()
    acc = _added_from_lists(rows + v_distance, lists, count, real, WIDTH, GROUP, KEYS)
    target = out + row.to(tl.int64) * (HEADS * D) + head * GROUP * D + d
    part = sums + ((row * KV_HEADS + head) * SPLITS * GROUP).to(tl.int64) * D + d
    _store(target, part, acc, (), (), factors, split, used, real, GROUP, D, False)
    if used == 1:
        return
    if arrive(arrived + row * KV_HEADS + head) == used - 1:
        tl.store(arrived + row * KV_HEADS + head, 0)
        _add_up(target, part, used, real, GROUP, D, WIDTH, MERGED)


@triton.jit
def _listed(
    q,
    flight,
    rows,
    table,
    real,
    runs,
    states,
    filters,
    lists,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    STRIDE: tl.constexpr,
    TAPS: tl.constexpr,
    RELU_PRE: tl.constexpr,
    CLIP_MIN: tl.constexpr,
    CLIP_MAX: tl.constexpr,
):
    """Write each run's list: the place and each head's weight of every key with weight. Returns their number."""
    k, place, group, block = flight
    first, run, end, last_group = runs
    count = tl.zeros_like(first)
    for i in range(0, run, KEYS):
        next_place = block.to(tl.int64) * STRIDE + group % BLOCK * D
        next_k = _group(rows + next_place[:, None], real, D, KEYS)
        group = tl.minimum(first + i + 2 * KEYS, last_group)
        block = tl.load(table + group // BLOCK)
        count, states = _list_group(
            q,
            k,
            place,
            first,
            i,
            end,
            count,
            states,
            filters,
            lists,
            GROUP,
            KEYS,
            D,
            TAPS,
            RELU_PRE,
            CLIP_MIN,
            CLIP_MAX,
        )
        k = next_k
        place = next_place
    return count


@triton.jit
def _list_group(
    q,
    k,
    place,
    first,
    i,
    end,
    count,
    states,
    filters,
    lists,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    TAPS: tl.constexpr,
    RELU_PRE: tl.constexpr,
    CLIP_MIN: tl.constexpr,
    CLIP_MAX: tl.constexpr,
):
    """Append one group of keys to the lists; returns the numbers of entries and the filters' states after them."""
    places, weights, slots = lists
    for key in tl.static_range(KEYS):
        exists = first + i + key < end
        wanted = first < 0
        wide = k[key].to(tl.float32)
        found = ()
        next_states = ()
        for g in tl.static_range(GROUP):
            scores = tl.sum(q[g] * wide, 1)
            p, state = gated(scores, states[g], filters[g], TAPS, RELU_PRE, CLIP_MIN, CLIP_MAX)
            p = tl.where(exists, p, 0.0)
            wanted |= p != 0.0
            found += (p,)
            next_states += (state,)
        states = next_states
        tl.store(places + count, place + key * D, mask=wanted)
        for g in tl.static_range(GROUP):
            tl.store(weights + g * slots + count, found[g], mask=wanted)
        count += wanted.to(tl.int32)
    return count, states


@triton.jit
def _added_from_lists(v_rows, lists, count, real, WIDTH: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr):
    """Each head's weighted sum of the values in the lists, ``[RUNS, WIDTH]``; values are used one group later."""
    shape: tl.constexpr = [count.shape[0], WIDTH]
    acc = _zeros(shape, tl.float32, GROUP)
    weights = _zeros(count.shape, tl.float32, GROUP * KEYS)
    v = _zeros(shape, v_rows.dtype.element_ty, KEYS)
    for i in range(0, tl.max(count, 0), KEYS):
        next_weights, next_v = _entries(v_rows, lists, i, count, real, GROUP, KEYS)
        acc = _added(acc, weights, v, GROUP, KEYS)
        weights = next_weights
        v = next_v
    return _added(acc, weights, v, GROUP, KEYS)


@triton.jit
def _entries(v_rows, lists, i, count, real, GROUP: tl.constexpr, KEYS: tl.constexpr):
    """Weights and values of a group of successive entries; zeros behind a list's end."""
    places, weights, slots = lists
    found = ()
    values = ()
    for key in tl.static_range(KEYS):
        exists = i + key < count
        place = tl.load(places + i + key, mask=exists, other=0)
        for g in tl.static_range(GROUP):
            found += (tl.load(weights + g * slots + i + key, mask=exists, other=0.0),)
        values += (_row(v_rows + place[:, None], exists[:, None] & real),)
    return found, values
