"""Decode attention over the paged cache in Triton: one query token for each sequence, whose K and V it appends.

One program serves one sequence, one K/V head with all query heads that share it, and one part (split) of the keys.
It reads the row of the fused QKV projection itself. QK norm, rotary positions and the KV append happen in registers
before it reads the first key, so a layer needs no kernel between the projection and the attention (source of the
append inside the kernel: article S0). The new token's K and V are attended from registers, not from the cache.

The batch size alone fixes the number of splits, so that a CUDA graph can hold the launch. The sequence's length decides
at run time where a split begins, and splits that a short sequence does not need return at once. Where all sequences are
short, there is another graph without splits. The last split of a head to finish merges the parts by log-sum-exp
(flash-decoding), without a second launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.arrivals import arrive
from rosebatch_kernels.common.head_norms import HeadNorm, norm_arguments
from rosebatch_kernels.common.heads import halves, normed_and_rotated, turn, weight_halves
from rosebatch_kernels.common.launch import LINE, launch_options, lines_of, prefetch, wait, wait_before_return
from rosebatch_kernels.common.scores import scaled, score_factors, sink_weights
from rosebatch_kernels.common.shared_keys import MAX_PARTS, SharedKeys
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.paged_attention.attend_shared import attend_shared
from rosebatch_kernels.paged_attention.online_softmax import attend, keys_of_tile, no_key
from rosebatch_kernels.paged_attention.sizes import (
    SIZES,
    Sizes,
    max_registers,
    program_of,
    requests_early,
    tile_rows,
    tiles_of_split,
)

_LINE_BITS = tl.constexpr(8 * LINE)


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
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: HeadNorm | None = None,
    append: bool = True,
    keys: SharedKeys | None = None,
    divided: bool = True,
    sizes: Sizes = SIZES.measured,
) -> Tensor:
    """Attention of one new token for each sequence.

    Args:
        qkv: ``[B, (heads + 2 · kv_heads) · D]``, q then k then v, the projection's output.
        cache: ``[2, blocks, kv_heads, block_size, D]``; with ``append`` the new K and V are written into it.
        block_table: ``[B, M]`` int32 block ids, rows at any stride.
        positions: ``[B]`` int32 at any stride, of the new token.
        limits: ``[B]`` int32 at the same stride; a row with ``position >= limit`` is skipped, its output undefined.
        workspace: for partial results.
        num_heads: query heads, a multiple of kv_heads.
        scale: factor on q·k.
        window: keys that the token sees, its own included; 0 for all. Blocks without such a key are not read.
        soft_cap: a score becomes ``soft_cap · tanh(score / soft_cap)``, as in Gemma 2; 0 for no cap.
        sinks: ``[heads]``, a further logit of each head's softmax, which has no value, as in gpt-oss.
        rotary: ``(cos, sin)``, ``[max_len, R]`` each in qkv's dtype; both halves of cos are equal, the first half of
            sin is negated. The first R of D channels are rotated. None where q and k are rotated already, or never.
        qk_norm: of each head, before the rotation.
        append: False where the new K and V are in the cache already; q is then neither normalised nor rotated.
        keys: that rows share, attended to once for all of them by a kernel in front of this one; None where there is a
            window.
        divided: False if no row has more than ``undivided_keys``. The result is the same, without programs for splits
            that have nothing to do.
        sizes: of programs.

    Returns:
        ``[B, heads · D]``.
    """
    batch = len(qkv)
    _, blocks, kv_heads, block_size, size = cache.shape
    group = num_heads // kv_heads
    out = torch.empty(batch, num_heads * size, dtype=qkv.dtype, device=qkv.device)
    splits = workspace.num_splits(batch) if divided else 1
    program = program_of(group, cache.dtype, sizes=sizes.decode)
    registers = program.registers
    if splits == 1 or keys is not None:
        programs = batch * kv_heads if keys is None else None
        registers = max_registers(group, cache.dtype, size, programs, qkv.device, sizes=sizes.decode)
    cos, sin = rotary if append and rotary is not None else (qkv, qkv)
    # Without shared keys, something of the same dtypes.
    begins, counts, shared_sums, shared_stats = workspace.arrived, workspace.arrived, workspace.sums, workspace.stats
    if keys is not None:
        assert not window, "the keys that a row shares have not left its window"
        parts = workspace.shared
        assert parts is not None, "there is memory for what rows share"
        attend_shared(
            qkv,
            cache,
            block_table,
            positions,
            limits,
            keys,
            parts,
            num_heads=num_heads,
            scale=scale,
            soft_cap=soft_cap,
            rotary=rotary,
            qk_norm=qk_norm,
            append=append,
            sizes=sizes.shared,
        )
        begins, counts, shared_sums, shared_stats = keys.begins, keys.counts, parts.sums, parts.stats
    scale, cap = score_factors(scale, soft_cap)
    norm, q_weight, k_weight, q_number, k_number = norm_arguments(qk_norm if append else None, qkv)
    # A tile's keys lie together within a block.
    early = keys is None and requests_early(batch, sizes=sizes.decode) and block_size % program.keys == 0
    _decode[(kv_heads, batch, splits)](
        out=out,
        qkv=qkv,
        cache=cache,
        block_table=block_table,
        positions=positions,
        limits=limits,
        cos=cos,
        sin=sin,
        q_weight=q_weight,
        k_weight=k_weight,
        sums=workspace.sums,
        stats=workspace.stats,
        arrived=workspace.arrived,
        shared_begins=begins,
        shared_counts=counts,
        shared_sums=shared_sums,
        shared_stats=shared_stats,
        scale=scale,
        q_number=q_number,
        k_number=k_number,
        num_blocks=blocks,
        qkv_stride=qkv.stride(0),
        table_stride=block_table.stride(0),
        state_stride=positions.stride(0),
        window=window,
        min_tiles=tiles_of_split(batch, kv_heads, program, sizes=sizes.decode),
        cap=cap,
        sinks=qkv if sinks is None else sinks,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        MEMBERS=triton.next_power_of_2(group),
        ROWS=tile_rows(group, cache.dtype, sizes=sizes.decode),
        D=size,
        WIDTH=max(16, triton.next_power_of_2(size)),
        BLOCK=block_size,
        TILE=program.keys,
        SPLITS=splits,
        APPEND=append,
        ROTARY=cos.shape[1] if append and rotary is not None else 0,
        NORM=norm,
        CAPPED=soft_cap > 0,
        SINKS=sinks is not None,
        SHARED=MAX_PARTS if keys is not None else 0,
        STAGES=program.stages,
        EARLY_LINES=lines_of(program.keys * size * cache.itemsize) if early else 0,
        num_warps=program.warps,
        maxnreg=registers,
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["num_blocks", "min_tiles"])
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
    shared_begins,
    shared_counts,
    shared_sums,
    shared_stats,
    scale,
    q_number,
    k_number,
    num_blocks,
    qkv_stride,
    table_stride,
    state_stride,
    window,
    min_tiles,
    cap,
    sinks,
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
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SHARED: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    # The slowest axis: splits that short sequences do not need start last.
    split = tl.program_id(2)
    # Written by the previous step's feedback, which is older than the kernel in front.
    position = tl.load(positions + row * state_stride)
    if position >= tl.load(limits + row * state_stride):
        wait_before_return(split == 0, PDL)
        return
    # Cached keys: [first, end). With APPEND the new token stays in registers.
    end = position if APPEND else position + 1
    first = _first_in_window(position, window)
    if SHARED:
        first = tl.load(shared_begins + row)
    first_tile, tiles, share, used = _shares(first, end, min_tiles, TILE, SPLITS)
    if split >= used:
        return
    start_tile = first_tile + split * share
    stop_tile = tl.minimum(start_tile + share, first_tile + tiles)
    table_row = block_table + row * table_stride
    last_block = tl.maximum(end - 1, 0) // BLOCK
    block = tl.load(table_row + tl.minimum((start_tile * TILE) // BLOCK, last_block))
    turned = turn(cos, sin, position, WIDTH, ROTARY)
    m = tl.arange(0, MEMBERS)[:, None]
    one = tl.zeros([1, 1], tl.int32)
    q_weights = weight_halves(q_weight, q_number, head * GROUP + m, m < GROUP, D, WIDTH, ROTARY, NORM)
    k_weights = weight_halves(k_weight, k_number, head + one, one == 0, D, WIDTH, ROTARY, NORM)
    # A matrix product needs more rows than a group has heads: rows are copied, after norm and rotation of each head.
    copies: tl.constexpr = ROWS // MEMBERS
    g, own_head = _heads_of_rows(GROUP, ROWS, copies)
    if SINKS:
        sink = tl.load(sinks + head * GROUP + g, mask=g < GROUP, other=0.0)
    v_distance = num_blocks.to(tl.int64) * KV_HEADS * (BLOCK * D)
    if EARLY_LINES and PDL:
        # Older steps wrote the cached keys. More tiles than the first would compete with the kernel in front.
        tile_place = (block.to(tl.int64) * KV_HEADS + head) * (BLOCK * D) + (start_tile * TILE) % BLOCK * D
        _request(cache + tile_place, TILE * D, EARLY_LINES)
        _request(cache + tile_place + v_distance, TILE * D, EARLY_LINES)
    # The kernel of the shared keys has waited for the one that wrote qkv; its own results are taken over last.
    if PDL and not SHARED:
        wait()

    d = tl.arange(0, WIDTH)[None, :]
    q_halves, k_halves, v_new = _new_token(
        qkv, qkv_stride, row, head, HEADS, KV_HEADS, GROUP, MEMBERS, D, WIDTH, APPEND, ROTARY
    )
    q = normed_and_rotated(q_halves, q_weights, turned, D, ROTARY, NORM)
    offset = tl.arange(0, TILE)
    row_max, total, acc = no_key(ROWS, WIDTH)
    if APPEND:  # noqa: SIM102 (a compile-time condition)
        if split == 0:
            k_new = normed_and_rotated(k_halves, k_weights, turned, D, ROTARY, NORM)
            _append(cache, table_row, position, head, k_new, v_new, v_distance, KV_HEADS, D, WIDTH, BLOCK)
            row_max, total, acc = _attend_new(q, k_new, v_new, total, acc, scale, cap, copies, CAPPED)
    q = _repeated(q, copies)
    for tile in tl.range(start_tile, stop_tile, num_stages=STAGES):
        n = tile * TILE + offset
        k, v, block = keys_of_tile(
            cache, table_row, block, last_block, tile, n, first, end, v_distance, head, KV_HEADS, D, WIDTH, BLOCK, TILE
        )
        row_max, total, acc = attend(q, k, v, (n < end) & (n >= first), row_max, total, acc, scale, cap, ROWS, CAPPED)
    if SHARED:  # noqa: SIM102 (a compile-time condition)
        if split == 0:
            part = (row * KV_HEADS + head) * SHARED * GROUP
            count = tl.load(shared_counts + row)
            if PDL:
                wait()
            row_max, total, acc = _take_shared(
                shared_sums, shared_stats, part, count, g, own_head, d, row_max, total, acc, GROUP, D
            )
    out_row = out + row.to(tl.int64) * (HEADS * D)
    place = out_row + (head * GROUP + g)[:, None] * D + d
    # Before the branch: computed in each of its arms, the mask costs some variants 18 to 33 registers a thread.
    wanted = (d < D) & own_head[:, None]
    if used == 1:
        if SINKS:
            total += sink_weights(sink, row_max)
        tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), mask=wanted)
        return
    part = (row * KV_HEADS + head) * SPLITS * GROUP
    _leave(sums, stats, part + split * GROUP + g, acc, row_max, total, wanted, own_head, d, D)
    if arrive(arrived + row * KV_HEADS + head) == used - 1:
        tl.store(arrived + row * KV_HEADS + head, 0)
        _merge(out_row, sums, stats, sinks, part, head, used, d, GROUP, D, SPLITS, SINKS)


@triton.jit
def _request(first, SIZE: tl.constexpr, LINES: tl.constexpr):
    """Start to bring ``SIZE`` successive elements into the L2 cache."""
    line: tl.constexpr = _LINE_BITS // first.dtype.element_ty.primitive_bitwidth
    prefetch(first + tl.minimum(tl.arange(0, LINES) * line, SIZE - 1))


@triton.jit
def _first_in_window(position, window):
    """The first key that a token sees."""
    first = 0
    if window > 0:
        first = tl.maximum(position + 1 - window, 0)
    return first


@triton.jit
def _shares(first, end, min_tiles, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """The keys ``[first, end)`` in tiles: the first tile, their number, the number of each split, and splits in use."""
    first_tile = first // TILE
    tiles = tl.cdiv(end, TILE) - first_tile
    used = tl.maximum(tl.minimum(tiles // min_tiles, SPLITS), 1)
    # At least one: without a cached key, one split still has the new one.
    share = tl.maximum(tl.cdiv(tiles, used), 1)
    # Rounded up, shares may leave nothing for the last split.
    used = tl.maximum(tl.cdiv(tiles, share), 1)
    return first_tile, tiles, share, used


@triton.jit
def _new_token(
    qkv,
    stride,
    row,
    head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    APPEND: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """Halves of a group's q and of the new k, and the new v; q instead of these two without APPEND.

    All loads are issued before the first use of any.
    """
    d = tl.arange(0, WIDTH)[None, :]
    m = tl.arange(0, MEMBERS)[:, None]
    one = tl.zeros([1, 1], tl.int32)
    q_row = qkv + row.to(tl.int64) * stride
    q = halves(q_row + (head * GROUP + m) * D, m < GROUP, D, WIDTH, ROTARY)
    k = q
    v = q[0]
    if APPEND:
        k = halves(q_row + (HEADS + head) * D + one, one == 0, D, WIDTH, ROTARY)
        v = tl.load(q_row + (HEADS + KV_HEADS + head) * D + d, mask=d < D, other=0.0)
    return q, k, v


@triton.jit
def _append(
    cache,
    table_row,
    position,
    head,
    k,
    v,
    v_distance,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the new K and V ``[1, WIDTH]`` of one head to their slot."""
    d = tl.arange(0, WIDTH)[None, :]
    block = tl.load(table_row + position // BLOCK).to(tl.int64)
    place = cache + (block * KV_HEADS + head) * (BLOCK * D) + (position % BLOCK) * D + d
    tl.store(place, k, mask=d < D)
    tl.store(place + v_distance, v, mask=d < D)


@triton.jit
def _heads_of_rows(GROUP: tl.constexpr, ROWS: tl.constexpr, COPIES: tl.constexpr):
    """The head ``[ROWS]`` of each row of copied heads, and whether the row is the first of an existing head."""
    g = tl.arange(0, ROWS) // COPIES
    return g, (g < GROUP) & (tl.arange(0, ROWS) % COPIES == 0)


@triton.jit
def _attend_new(q, k, v, total, acc, scale, cap, COPIES: tl.constexpr, CAPPED: tl.constexpr):
    """The online softmax's sums over the new key alone, from those over no key."""
    score = scaled(tl.sum(q.to(tl.float32) * k.to(tl.float32), 1), scale, cap, CAPPED)
    return _repeated(score, COPIES), total + 1.0, acc + v.to(tl.float32)


@triton.jit
def _take_shared(sums, stats, part, count, g, own_head, d, row_max, total, acc, GROUP: tl.constexpr, D: tl.constexpr):
    """The online softmax's sums with those of ``count`` partial results, which begin in row ``part``."""
    for i in range(count):
        line = part + i * GROUP + g
        # Copies and rows that stand for no head read nothing and stay finite.
        top = tl.load(stats + line * 2, mask=own_head, other=0.0, cache_modifier=".cg")
        weights = tl.load(stats + line * 2 + 1, mask=own_head, other=1.0, cache_modifier=".cg")
        wanted = own_head[:, None] & (d < D)
        values = tl.load(sums + line.to(tl.int64)[:, None] * D + d, mask=wanted, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(row_max, top)
        shrink = tl.exp2(row_max - higher)
        factor = tl.exp2(top - higher)
        total = total * shrink + weights * factor
        acc = acc * shrink[:, None] + values * factor[:, None]
        row_max = higher
    return row_max, total, acc


@triton.jit
def _repeated(x, COPIES: tl.constexpr):
    """``x`` with ``copies`` of each row, one after the other."""
    if COPIES > 1:
        if len(x.shape) == 1:
            x = tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], COPIES]), [x.shape[0] * COPIES])
        else:
            shape: tl.constexpr = [x.shape[0], COPIES, x.shape[1]]
            x = tl.reshape(tl.broadcast_to(x[:, None, :], shape), [x.shape[0] * COPIES, x.shape[1]])
    return x


@triton.jit
def _leave(sums, stats, line, acc, row_max, total, wanted, own_head, d, D: tl.constexpr):
    """Leave a split's results for the split that merges, those of each head in row ``line [ROWS]``."""
    tl.store(sums + line.to(tl.int64)[:, None] * D + d, acc, mask=wanted)
    tl.store(stats + line * 2, row_max, mask=own_head)
    tl.store(stats + line * 2 + 1, total, mask=own_head)


@triton.jit
def _merge(
    out_row,
    sums,
    stats,
    sinks,
    part,
    head,
    used,
    d,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Write the heads of group ``head`` to a row of the result, from the ``used`` splits' results at row ``part``."""
    s = tl.arange(0, SPLITS)
    there = s < used
    for member in tl.static_range(GROUP):
        lines = part + s * GROUP + member
        tops = tl.load(stats + lines * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        parts = tl.load(stats + lines * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        row_max = tl.max(tops, 0)
        factors = tl.exp2(tops - row_max)
        total = tl.sum(parts * factors, 0)
        if SINKS:
            total += sink_weights(tl.load(sinks + head * GROUP + member), row_max)
        values = tl.load(
            sums + lines.to(tl.int64)[:, None] * D + d,
            mask=there[:, None] & (d < D),
            other=0.0,
            cache_modifier=".cg",
        )
        merged = tl.sum(values * factors[:, None], 0) / total
        place = out_row + (head * GROUP + member) * D + d
        tl.store(place, merged[None, :].to(out_row.dtype.element_ty), mask=d < D)
