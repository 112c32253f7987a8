"""HP1 decode attention over the paged cache in Triton: one query token for each sequence, K and V appended on the way.

One program serves one sequence, one K/V head with all query heads that share it, and one part (split) of the keys.
What it does before the first key is that of softmax decode (see ``rosebatch_kernels.paged_attention.decode``).

The gate is applied in registers, see ``rosebatch_kernels.hp1.runs``. Most weights are exactly zero: V is read only
where some head of the group gives it weight.

Nothing is rescaled, and partial results are simply added up, by the last split of a head to finish (source of the
plain sum, of the overlap at a split and of the sparse values: article S4).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.dependent_launch import launch_options, wait
from rosebatch_kernels.hp1.gate import Gate
from rosebatch_kernels.hp1.runs import filtered, gated, nearest, places, two_pages
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
    gate: Gate,
    *,
    num_heads: int,
    scale: float,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: QKNorm | None = None,
    append: bool = True,
    sparse: bool = True,
) -> Tensor:
    """Attention of one new token for each sequence, see ``rosebatch_kernels.hp1.reference``.

    Args:
        qkv: ``[B, (heads + 2 · kv_heads) · D]``, q then k then v, as the projection leaves them.
        cache: ``[2, blocks, kv_heads, block_size, D]``; with ``append`` the new K and V are written into it.
        block_table: ``[B, M]`` int32 block ids, rows at any stride.
        positions: ``[B]`` int32 at any stride, of the new token.
        limits: ``[B]`` int32 at the same stride; a row with ``position >= limit`` is skipped, its output undefined.
        workspace: for partial results.
        gate: of the layer.
        num_heads: query heads, a multiple of kv_heads.
        scale: factor on q·k, positive.
        rotary: ``(cos, sin)``, ``[max_len, D]`` each in qkv's dtype, both halves of cos alike, the first of sin
            negated; None where q and k are rotated already, or never.
        qk_norm: of each head before the rotation.
        append: False where the new K and V are in the cache already; q is then taken as it is.
        sparse: False reads V of all keys.

    Returns:
        ``[B, heads · D]``.
    """
    batch = len(qkv)
    _, blocks, kv_heads, block_size, size = cache.shape
    group = num_heads // kv_heads
    out = torch.empty(batch, num_heads * size, dtype=qkv.dtype, device=qkv.device)
    splits = workspace.num_splits(batch)
    tile, warps, stages = _config(cache.dtype)
    cos, sin = rotary if append and rotary is not None else (qkv, qkv)
    norm, q_weight, k_weight, q_number, k_number = norm_arguments(qk_norm if append else None, qkv)
    _gated_decode[(kv_heads, batch, splits)](
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
        gate.taps,
        gate.gamma,
        workspace.sums,
        workspace.arrived,
        scale,
        q_number,
        k_number,
        blocks,
        qkv.stride(0),
        block_table.stride(0),
        positions.stride(0),
        least_keys(batch, kv_heads, warps),
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        MEMBERS=triton.next_power_of_2(group),
        ROWS=max(16, triton.next_power_of_2(group)),
        D=size,
        WIDTH=max(16, triton.next_power_of_2(size)),
        BLOCK=block_size,
        TILE=tile,
        SPLITS=splits,
        APPEND=append,
        ROTARY=append and rotary is not None,
        NORM=norm,
        RELU_PRE=gate.relu_pre,
        # Of scores before the scale, which is applied to sums of values: fewer of them.
        CLIP_MIN=gate.clip_min / scale,
        CLIP_MAX=gate.clip_max / scale,
        SPARSE=sparse,
        STAGES=stages,
        num_warps=warps,
        **launch_options(),
    )
    return out


def _config(dtype: torch.dtype) -> tuple[int, int, int]:
    """Keys in a tile, warps, pipeline stages."""
    return (16, 4, 1) if dtype.itemsize == 4 else (32, 2, 3)


@triton.jit(do_not_specialize=["num_blocks", "least"])
def _gated_decode(
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
    taps,
    gamma,
    sums,
    arrived,
    scale,
    q_number,
    k_number,
    num_blocks,
    qkv_stride,
    table_stride,
    state_stride,
    least,
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
    RELU_PRE: tl.constexpr,
    CLIP_MIN: tl.constexpr,
    CLIP_MAX: tl.constexpr,
    SPARSE: tl.constexpr,
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
    # Cached keys: [0, end). With APPEND the new token is kept in registers instead.
    end = position if APPEND else position + 1
    used = tl.maximum(tl.minimum(end // least, SPLITS), 1)
    # Keys of a column. Rounded up, the runs may leave nothing for the last split.
    run = tl.cdiv(end, used * TILE)
    used = tl.maximum(tl.cdiv(end, tl.maximum(run * TILE, 1)), 1)
    if split >= used:
        return
    table_row = block_table + row * table_stride
    last_key = tl.maximum(end - 1, 0)
    page_size: tl.constexpr = BLOCK * D
    stride: tl.constexpr = KV_HEADS * page_size
    first = (split * TILE + tl.arange(0, TILE)) * run
    cosine, sine = turn(cos, sin, position, D, WIDTH, ROTARY)
    q_weights = weight_halves(q_weight, D, WIDTH, ROTARY, NORM)
    k_weights = weight_halves(k_weight, D, WIDTH, ROTARY, NORM)
    # A matrix product wants more rows than a group has heads: copies cost nothing, and are made last.
    copies: tl.constexpr = ROWS // MEMBERS
    g = tl.arange(0, ROWS) // copies
    own_head = (g < GROUP) & (tl.arange(0, ROWS) % copies == 0)
    tap = taps + (head * GROUP + g) * 3
    tap_0 = tl.load(tap, mask=g < GROUP, other=0.0)[:, None]
    tap_1 = tl.load(tap + 1, mask=g < GROUP, other=0.0)[:, None]
    tap_2 = tl.load(tap + 2, mask=g < GROUP, other=0.0)[:, None]
    factor = tl.load(gamma + head * GROUP + g, mask=g < GROUP, other=0.0)[:, None] * scale
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
    v_distance = num_blocks.to(tl.int64) * stride
    keys = cache + head * page_size
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    if APPEND:  # noqa: SIM102 (the first is decided when the kernel is compiled)
        if split == 0:
            k_new = normed_and_rotated(k_halves, k_weights, cosine, sine, D, k_number, ROTARY, NORM)
            newest = tl.load(table_row + position // BLOCK).to(tl.int64)
            place = keys + newest * stride + (position % BLOCK) * D + d
            tl.store(place, k_new, mask=real)
            tl.store(place + v_distance, v_new, mask=real)
            # The two keys before it are in the cache, if there are any.
            n = position - 2 + tl.arange(0, 2)
            page, start, page_step = two_pages(table_row, n, last_key, BLOCK, stride)
            k = tl.load(keys + places(nearest(n, last_key), page, start, page_step, d, D, BLOCK), mask=real, other=0.0)
            wide = q.to(tl.float32)
            passed = filtered(tl.sum(wide[:, None, :] * k.to(tl.float32)[None], 2), RELU_PRE)
            earlier, before = tl.split(tl.where((n >= 0)[None, :], passed, 0.0))
            score = tl.sum(wide * k_new.to(tl.float32), 1)
            own_tap = taps + (head * GROUP + tl.arange(0, MEMBERS)) * 3
            exists = tl.arange(0, MEMBERS) < GROUP
            new_tap_0 = tl.load(own_tap, mask=exists, other=0.0)
            new_tap_1 = tl.load(own_tap + 1, mask=exists, other=0.0)
            new_tap_2 = tl.load(own_tap + 2, mask=exists, other=0.0)
            due = new_tap_1 * before + new_tap_2 * earlier
            weight, _, _ = gated(score, due, due, new_tap_0, new_tap_1, new_tap_2, RELU_PRE, CLIP_MIN, CLIP_MAX)
            acc += _copied(weight[:, None], copies) * v_new.to(tl.float32)
    q = _copied(q, copies)

    # --- the cached ones: of each run first the two keys in front of it, for their scores alone ---
    due = tl.zeros([ROWS, TILE], tl.float32)
    due_later = tl.zeros([ROWS, TILE], tl.float32)
    weights = tl.zeros([ROWS, TILE], dtype)
    v = tl.zeros([TILE, WIDTH], dtype)
    for piece in range(-2, run, BLOCK):
        page, start, page_step = two_pages(table_row, first + piece, last_key, BLOCK, stride)
        for i in tl.range(piece, tl.minimum(piece + BLOCK, run), num_stages=STAGES):
            n = first + i
            counts = (n < end) & (i >= 0)
            offsets = places(nearest(n, last_key), page, start, page_step, d, D, BLOCK)
            k = tl.load(keys + offsets, mask=real, other=0.0)
            scores = tl.where((n >= 0)[None, :], tl.dot(q, tl.trans(k), input_precision="ieee"), 0.0)
            p, due, due_later = gated(scores, due, due_later, tap_0, tap_1, tap_2, RELU_PRE, CLIP_MIN, CLIP_MAX)
            p = tl.where(counts[None, :], p, 0.0)
            if SPARSE:
                # Of the iteration before: what is asked for now is on its way meanwhile.
                acc = tl.dot(weights, v, acc, input_precision="ieee")
                some = tl.max(tl.abs(p), 0) > 0.0
                v = tl.load(keys + v_distance + offsets, mask=some[:, None] & real, other=0.0)
                weights = p.to(dtype)
            else:
                v_now = tl.load(keys + v_distance + offsets, mask=counts[:, None] & real, other=0.0)
                acc = tl.dot(p.to(dtype), v_now, acc, input_precision="ieee")
    if SPARSE:
        acc = tl.dot(weights, v, acc, input_precision="ieee")
    acc *= factor

    place = out + row.to(tl.int64) * (HEADS * D) + (head * GROUP + g)[:, None] * D + d
    wanted = real & own_head[:, None]
    if used == 1:
        tl.store(place, acc.to(dtype), mask=wanted)
        return

    # --- the last split to arrive adds all up ---
    part = (row * KV_HEADS + head) * SPLITS * GROUP
    mine = part + split * GROUP + g
    tl.store(sums + mine.to(tl.int64)[:, None] * D + d, acc, mask=wanted)
    tl.debug_barrier()
    arrivals = tl.atomic_add(arrived + row * KV_HEADS + head, 1, sem="acq_rel", scope="gpu")
    if arrivals == used - 1:
        tl.store(arrived + row * KV_HEADS + head, 0)
        s = tl.arange(0, SPLITS)
        for member in tl.static_range(GROUP):
            lines = part + s * GROUP + member
            values = tl.load(
                sums + lines.to(tl.int64)[:, None] * D + d,
                mask=(s < used)[:, None] & real,
                other=0.0,
                cache_modifier=".cg",
            )
            target = out + row.to(tl.int64) * (HEADS * D) + (head * GROUP + member) * D + d
            tl.store(target, tl.sum(values, 0)[None, :].to(dtype), mask=real)


@triton.jit
def _copied(x, copies: tl.constexpr):
    """Each row of ``[R, N]`` so many times."""
    if copies > 1:
        x = tl.reshape(
            tl.broadcast_to(x[:, None, :], [x.shape[0], copies, x.shape[1]]), [x.shape[0] * copies, x.shape[1]]
        )
    return x
