"""Decode attention over the paged cache in Triton: one query token for each sequence, K and V appended on the way.

One program serves one sequence, one K/V head with all query heads that share it, and one part (split) of the keys.
It reads the row of the fused QKV projection itself: QK norm, rotary positions and the KV append happen in registers
before the first key is read, so a layer needs no kernel between the projection and the attention (source of the
append inside the kernel: article S0). The new token's K and V never travel through the cache to be attended.

The number of splits is fixed by the batch size, so that a CUDA graph can hold the launch; where a split begins follows
from the sequence's length at run time, and splits that a short sequence does not need return at once. The last
split of a head to finish adds the parts up (flash-decoding, merged by log-sum-exp), without a second launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.dependent_launch import launch_options, wait
from rosebatch_kernels.paged_attention.splits import DecodeWorkspace, least_keys
from rosebatch_kernels.qkv.kernel import halves, normed_and_rotated, turn, weight_halves
from rosebatch_kernels.qkv.norms import QKNorm, norm_arguments


def decode(
    qkv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    limits: Tensor,
    workspace: DecodeWorkspace,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: QKNorm | None = None,
    append: bool = True,
) -> Tensor:
    """Attention of one new token for each sequence.

    Args:
        qkv: ``[B, (heads + 2 · kv_heads) · D]``, q then k then v, as the projection leaves them.
        cache: ``[2, blocks, kv_heads, block_size, D]``; with ``append`` the new K and V are written into it.
        block_table: ``[B, M]`` int32 block ids, rows at any stride.
        positions: ``[B]`` int32 at any stride, of the new token.
        limits: ``[B]`` int32 at the same stride; a row with ``position >= limit`` is skipped, its output undefined.
        workspace: for partial results.
        num_heads: query heads, a multiple of kv_heads.
        scale: factor on q·k.
        window: keys that the token sees, its own included; 0 for all.
        rotary: ``(cos, sin)``, ``[max_len, D]`` each in qkv's dtype, both halves of cos alike, the first of sin
            negated; None where q and k are rotated already, or never.
        qk_norm: of each head before the rotation.
        append: False where the new K and V are in the cache already; q is then taken as it is.

    Returns:
        ``[B, heads · D]``.
    """
    batch = len(qkv)
    _, blocks, kv_heads, block_size, size = cache.shape
    group = num_heads // kv_heads
    out = torch.empty(batch, num_heads * size, dtype=qkv.dtype, device=qkv.device)
    splits = workspace.num_splits(batch)
    tile, warps, stages = _config(group, cache.dtype)
    cos, sin = rotary if append and rotary is not None else (qkv, qkv)
    norm, q_weight, k_weight, q_number, k_number = norm_arguments(qk_norm if append else None, qkv)
    _decode[(kv_heads, batch, splits)](
        out,
        qkv,
        cache,
        block_table,
        positions,
        limits,
        cos,
        sin,
        q_weight,
        k_weight,
        workspace.sums,
        workspace.stats,
        workspace.arrived,
        scale * 1.4426950408889634,
        q_number,
        k_number,
        blocks,
        qkv.stride(0),
        block_table.stride(0),
        positions.stride(0),
        window,
        max(1, least_keys(batch, kv_heads, warps) // tile),
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        MEMBERS=triton.next_power_of_2(group),
        ROWS=1 if group == 1 else max(16, triton.next_power_of_2(group)),
        D=size,
        WIDTH=triton.next_power_of_2(size),
        BLOCK=block_size,
        TILE=tile,
        SPLITS=splits,
        APPEND=append,
        ROTARY=append and rotary is not None,
        NORM=norm,
        STAGES=stages,
        num_warps=warps,
        **launch_options(),
    )
    return out


def _config(group: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Keys in a tile, warps, pipeline stages; found by measurement on an H100."""
    if dtype.itemsize == 4:
        return 16, 4, 1
    # Without a matrix product, what the pipeline would hold back for shared memory is better kept in flight.
    return (32, 1, 1) if group == 1 else (32, 2, 3)


@triton.jit(do_not_specialize=["num_blocks", "least_tiles"])
def _decode(
    out,
    qkv,
    cache,
    block_table,
    positions,
    limits,
    cos,
    sin,
    q_weight,
    k_weight,
    sums,
    stats,
    arrived,
    scale,
    q_number,
    k_number,
    num_blocks,
    qkv_stride,
    table_stride,
    state_stride,
    window,
    least_tiles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    APPEND: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    # The slowest axis, so that splits which short sequences do not need are started last.
    split = tl.program_id(2)
    # What the feedback of the step before wrote is older than the kernel that may still be running.
    position = tl.load(positions + row * state_stride)
    if position >= tl.load(limits + row * state_stride):
        # It is enough that one program of each row waits: the kernel is not complete before.
        if PDL:  # noqa: SIM102 (the first is decided when the kernel is compiled)
            if split == 0:
                wait()
        return
    dtype = qkv.dtype.element_ty
    # Cached keys: [first, end). With APPEND the new token is kept in registers instead.
    end = position if APPEND else position + 1
    first = 0
    if window > 0:
        first = tl.maximum(position + 1 - window, 0)
    first_tile = first // TILE
    tiles = tl.cdiv(end, TILE) - first_tile
    used = tl.maximum(tl.minimum(tiles // least_tiles, SPLITS), 1)
    # Without a cached key, one split still has the new one. Rounded up, shares may leave nothing for the last.
    share = tl.maximum(tl.cdiv(tiles, used), 1)
    used = tl.maximum(tl.cdiv(tiles, share), 1)
    if split >= used:
        return
    start_tile = first_tile + split * share
    stop_tile = tl.minimum(start_tile + share, first_tile + tiles)
    table_row = block_table + row * table_stride
    last_block = tl.maximum(end - 1, 0) // BLOCK
    block = tl.load(table_row + tl.minimum((start_tile * TILE) // BLOCK, last_block))
    cosine, sine = turn(cos, sin, position, D, WIDTH, ROTARY)
    q_weights = weight_halves(q_weight, D, WIDTH, ROTARY, NORM)
    k_weights = weight_halves(k_weight, D, WIDTH, ROTARY, NORM)
    if PDL:
        wait()

    # --- the new token: all of it asked for at once ---
    d = tl.arange(0, WIDTH)[None, :]
    real = d < D
    m = tl.arange(0, MEMBERS)[:, None]
    one = tl.zeros([1, 1], tl.int32)
    q_row = qkv + row.to(tl.int64) * qkv_stride
    q_halves = halves(q_row + (head * GROUP + m) * D, m < GROUP, D, WIDTH, ROTARY)
    if APPEND:
        k_halves = halves(q_row + (HEADS + head) * D + one, one == 0, D, WIDTH, ROTARY)
        v_new = tl.load(q_row + (HEADS + KV_HEADS + head) * D + d, mask=real, other=0.0)
    q = normed_and_rotated(q_halves, q_weights, cosine, sine, D, q_number, ROTARY, NORM)
    # A matrix product wants more rows than a group has heads: copies cost nothing, and are made last.
    copies: tl.constexpr = ROWS // MEMBERS
    g = tl.arange(0, ROWS) // copies
    own_head = (g < GROUP) & (tl.arange(0, ROWS) % copies == 0)
    offset = tl.arange(0, TILE)
    page = BLOCK * D
    v_distance = num_blocks.to(tl.int64) * KV_HEADS * page
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    if APPEND:  # noqa: SIM102 (the first is decided when the kernel is compiled)
        if split == 0:
            k_new = normed_and_rotated(k_halves, k_weights, cosine, sine, D, k_number, ROTARY, NORM)
            newest = tl.load(table_row + position // BLOCK).to(tl.int64)
            place = cache + (newest * KV_HEADS + head) * page + (position % BLOCK) * D + d
            tl.store(place, k_new, mask=real)
            tl.store(place + v_distance, v_new, mask=real)
            most = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), 1) * scale
            if copies > 1:
                most = tl.reshape(tl.broadcast_to(most[:, None], [MEMBERS, copies]), [ROWS])
            total += 1.0
            acc += v_new.to(tl.float32)
    if copies > 1:
        q = tl.reshape(tl.broadcast_to(q[:, None, :], [MEMBERS, copies, WIDTH]), [ROWS, WIDTH])

    # --- the cached ones ---
    for tile in tl.range(start_tile, stop_tile, num_stages=STAGES):
        n = tile * TILE + offset
        seen = n < end
        if BLOCK % TILE == 0:
            k_rows = (
                cache
                + (block.to(tl.int64) * KV_HEADS + head) * page
                + ((tile * TILE) % BLOCK) * D
                + offset[:, None] * D
            )
            # Loaded an iteration ahead: loaded with the keys, the number would be a link of their software pipeline,
            # which then waits for all it has under way before every tile.
            block = tl.load(table_row + tl.minimum(((tile + 1) * TILE) // BLOCK, last_block))
        else:
            blocks = tl.load(table_row + n // BLOCK, mask=seen, other=0).to(tl.int64)
            k_rows = cache + ((blocks * KV_HEADS + head) * page + (n % BLOCK) * D)[:, None]
        present = seen[:, None] & real
        k = tl.load(k_rows + d, mask=present, other=0.0)
        v = tl.load(k_rows + v_distance + d, mask=present, other=0.0)
        counts = seen & (n >= first)
        if ROWS == 1:
            scores = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[None, :] * scale
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(counts[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(most - higher)
        total = total * shrink + tl.sum(weights, 1)
        if ROWS == 1:
            acc = acc * shrink[:, None] + tl.sum(tl.trans(weights) * v.to(tl.float32), 0)[None, :]
        else:
            acc = tl.dot(weights.to(dtype), v, acc * shrink[:, None], input_precision="ieee")
        most = higher

    place = out + row.to(tl.int64) * (HEADS * D) + (head * GROUP + g)[:, None] * D + d
    wanted = real & own_head[:, None]
    if used == 1:
        tl.store(place, (acc / total[:, None]).to(dtype), mask=wanted)
        return

    # --- the last split to arrive merges all ---
    part = (row * KV_HEADS + head) * SPLITS * GROUP
    mine = part + split * GROUP + g
    tl.store(sums + mine.to(tl.int64)[:, None] * D + d, acc, mask=wanted)
    tl.store(stats + mine * 2, most, mask=own_head)
    tl.store(stats + mine * 2 + 1, total, mask=own_head)
    tl.debug_barrier()
    before = tl.atomic_add(arrived + row * KV_HEADS + head, 1, sem="acq_rel", scope="gpu")
    if before == used - 1:
        tl.store(arrived + row * KV_HEADS + head, 0)
        s = tl.arange(0, SPLITS)
        there = s < used
        for member in tl.static_range(GROUP):
            lines = part + s * GROUP + member
            tops = tl.load(stats + lines * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            parts = tl.load(stats + lines * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            factors = tl.exp2(tops - tl.max(tops, 0))
            values = tl.load(
                sums + lines.to(tl.int64)[:, None] * D + d,
                mask=there[:, None] & real,
                other=0.0,
                cache_modifier=".cg",
            )
            merged = tl.sum(values * factors[:, None], 0) / tl.sum(parts * factors, 0)
            target = out + row.to(tl.int64) * (HEADS * D) + (head * GROUP + member) * D + d
            tl.store(target, merged[None, :].to(dtype), mask=real)
