"""HP1 decode attention over the paged cache in Triton: one query token for each sequence, K and V appended on the way.

One program serves one sequence, one K/V head with all query heads that share it, and one part (split) of the keys.
It reads the row of the fused QKV projection itself, as softmax decode does (see
``rosebatch_kernels.paged_attention.decode``).

The threads that hold one row of K (16 for a head of 128 in 16 bits) walk along a run of successive keys of their own,
see ``rosebatch_kernels.hp1.runs``. They hold the same piece of that key's V, of the query and of the sum of values, so
that but for the sum of a score over its threads nothing is exchanged before the end, and what the gate lets pass is
known where V is asked for: V of a key is read only where some head of the group gives it weight. Nothing is rescaled,
and partial results are simply added up, by the last split of a head to finish (source of the plain sum, of the
overlap at a split and of the sparse values: article S4).

K is asked for one group of keys ahead, V used one group later: both are on their way while a group is computed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, operator"

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.dependent_launch import launch_options, wait
from rosebatch_kernels.hp1.gate import Gate
from rosebatch_kernels.hp1.runs import filtered, gated, subtracted
from rosebatch_kernels.paged_attention.splits import DecodeWorkspace
from rosebatch_kernels.qkv.kernel import halves, normed_and_rotated, turn, weight_halves
from rosebatch_kernels.qkv.norms import QKNorm, norm_arguments

# A warp needs no other: nothing waits at a barrier.
_WARPS = 1
# Of so many registers a thread that 8 are held by each of an H100's 132 multiprocessors.
_PROGRAMS = 1056
_MOST_SPLITS = 32
# Keys of a sequence that a split should have to be worth its merge.
_LEAST_KEYS = 32
# Splits that are added up at a time.
_MERGED = 8


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
    width = max(16, triton.next_power_of_2(size))
    runs, keys = _config(width, group, cache.dtype)
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
        _LEAST_KEYS,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=size,
        WIDTH=width,
        BLOCK=block_size,
        RUNS=runs,
        # So that a group of keys lies in one block.
        KEYS=gcd(keys, block_size),
        SPLITS=splits,
        MERGED=_MERGED,
        APPEND=append,
        ROTARY=append and rotary is not None,
        NORM=norm,
        RELU_PRE=gate.relu_pre,
        # Of scores before the scale, which is applied to sums of values: fewer of them.
        CLIP_MIN=gate.clip_min / scale,
        CLIP_MAX=gate.clip_max / scale,
        SPARSE=sparse,
        num_warps=_WARPS,
        **launch_options(),
    )
    return out


def num_splits(batch: int, kv_heads: int) -> int:
    """Parts that the keys of each sequence are divided into: so many programs as are on a GPU at once.

    They follow from the batch alone, never from lengths, so that a CUDA graph can hold them.
    """
    parts = max(1, min(_PROGRAMS // (batch * kv_heads), _MOST_SPLITS))
    return 1 << (parts.bit_length() - 1)


def _config(width: int, group: int, dtype: torch.dtype) -> tuple[int, int]:
    """Runs of a program, and keys in a group: as many as the registers hold."""
    # A thread holds 16 bytes of a row.
    return max(1, _WARPS * 32 * 16 // (width * dtype.itemsize)), 8 if group <= 2 else 4


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
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RUNS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
    APPEND: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    RELU_PRE: tl.constexpr,
    CLIP_MIN: tl.constexpr,
    CLIP_MAX: tl.constexpr,
    SPARSE: tl.constexpr,
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
    # Keys of a run, whole groups. Rounded up, the runs may leave nothing for the last split.
    run = tl.cdiv(end, used * RUNS * KEYS) * KEYS
    used = tl.maximum(tl.cdiv(end, tl.maximum(run * RUNS, 1)), 1)
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
    if PDL:  # noqa: SIM102 (as above)
        if not APPEND:
            wait()
    # Keys of earlier steps, which are older as well.
    group = tl.minimum(first, last_group)
    place = _place(table, group, BLOCK, D, stride)
    group = tl.minimum(first + KEYS, last_group)
    block = tl.load(table + group // BLOCK)
    k = _group(rows + place[:, None], real, D, KEYS)
    # The two in front of each run, for their scores alone.
    begin = tl.minimum(first, end)
    before = _before(rows, table, begin, real, BLOCK, D, stride)
    one = tl.zeros([1, 1], tl.int32)
    if APPEND:
        n = position + tl.zeros([1], tl.int32)
        mine = real & ((split + one) == 0)
        before_new = _before(rows, table, n, mine, BLOCK, D, stride)
        newest = rows + _place(table, n, BLOCK, D, stride)[:, None]
    cosine, sine = turn(cos, sin, position, D, WIDTH, ROTARY)
    q_weights = weight_halves(q_weight, D, WIDTH, ROTARY, NORM)
    k_weights = weight_halves(k_weight, D, WIDTH, ROTARY, NORM)
    tap_0 = ()
    tap_1 = ()
    tap_2 = ()
    factors = ()
    for g in tl.static_range(GROUP):
        tap = taps + (head * GROUP + g) * 3
        tap_0 += (tl.load(tap),)
        tap_1 += (tl.load(tap + 1),)
        tap_2 += (tl.load(tap + 2),)
        factors += (tl.load(gamma + head * GROUP + g) * scale,)
    if PDL:  # noqa: SIM102 (as above)
        if APPEND:
            wait()

    # --- the new token: all of it asked for at once ---
    q_row = qkv + row.to(tl.int64) * qkv_stride
    if APPEND:
        k_halves = halves(q_row + (HEADS + head) * D + one, one == 0, D, WIDTH, ROTARY)
        v_new = tl.load(q_row + (HEADS + KV_HEADS + head) * D + d, mask=real, other=0.0)
    q_halves = ()
    for g in tl.static_range(GROUP):
        q_halves += (halves(q_row + (head * GROUP + g) * D + one, one == 0, D, WIDTH, ROTARY),)
    q = ()
    for g in tl.static_range(GROUP):
        q += (normed_and_rotated(q_halves[g], q_weights, cosine, sine, D, q_number, ROTARY, NORM).to(tl.float32),)
    new_weights = ()
    if APPEND:
        k_new = normed_and_rotated(k_halves, k_weights, cosine, sine, D, k_number, ROTARY, NORM)
        tl.store(newest, k_new, mask=mine)
        tl.store(newest + v_distance, v_new, mask=mine)
        for g in tl.static_range(GROUP):
            state = _state(q[g], before_new, n, tap_1[g], tap_2[g], RELU_PRE)
            score = tl.sum(q[g] * k_new.to(tl.float32), 1)
            weight, _, _ = gated(score, state[0], state[1], tap_0[g], tap_1[g], tap_2[g], RELU_PRE, CLIP_MIN, CLIP_MAX)
            new_weights += (tl.where(split == 0, weight, 0.0),)

    # --- the cached ones ---
    due = ()
    due_later = ()
    for g in tl.static_range(GROUP):
        state = _state(q[g], before, begin, tap_1[g], tap_2[g], RELU_PRE)
        due += (state[0],)
        due_later += (state[1],)
    acc = _zeros([RUNS, WIDTH], tl.float32, GROUP)
    weights = _zeros([RUNS], tl.float32, GROUP * KEYS)
    v = _zeros([RUNS, WIDTH], dtype, KEYS)
    for i in range(0, run, KEYS):
        next_place = block.to(tl.int64) * stride + group % BLOCK * D
        next_k = _group(rows + next_place[:, None], real, D, KEYS)
        group = tl.minimum(first + i + 2 * KEYS, last_group)
        block = tl.load(table + group // BLOCK)
        new = ()
        values = ()
        for key in tl.static_range(KEYS):
            exists = first + i + key < end
            # Of no run yet.
            wanted = first < 0
            wide = k[key].to(tl.float32)
            next_due = ()
            next_due_later = ()
            for g in tl.static_range(GROUP):
                scores = tl.sum(q[g] * wide, 1)
                p, soon, later = gated(
                    scores, due[g], due_later[g], tap_0[g], tap_1[g], tap_2[g], RELU_PRE, CLIP_MIN, CLIP_MAX
                )
                p = tl.where(exists, p, 0.0)
                wanted |= p != 0.0
                new += (p,)
                next_due += (soon,)
                next_due_later += (later,)
            due = next_due
            due_later = next_due_later
            wanted = wanted if SPARSE else exists
            values += (_row(rows + v_distance + place[:, None] + key * D, wanted[:, None] & real),)
        acc = _added(acc, weights, v, GROUP, KEYS)
        weights = new
        v = values
        k = next_k
        place = next_place
    acc = _added(acc, weights, v, GROUP, KEYS)

    target = out + row.to(tl.int64) * (HEADS * D) + head * GROUP * D + d
    part = sums + ((row * KV_HEADS + head) * SPLITS * GROUP).to(tl.int64) * D + d
    for g in tl.static_range(GROUP):
        total = tl.sum(acc[g], 0)[None, :]
        if APPEND:
            total += new_weights[g][:, None] * v_new.to(tl.float32)
        total *= factors[g]
        if used == 1:
            tl.store(target + g * D, total.to(dtype), mask=real)
        else:
            tl.store(part + (split * GROUP + g) * D, total, mask=real)
    if used == 1:
        return

    # --- the last split to arrive adds all up ---
    tl.debug_barrier()
    arrivals = tl.atomic_add(arrived + row * KV_HEADS + head, 1, sem="acq_rel", scope="gpu")
    if arrivals == used - 1:
        tl.store(arrived + row * KV_HEADS + head, 0)
        for g in tl.static_range(GROUP):
            total = tl.zeros([1, WIDTH], tl.float32)
            for start in range(0, used, MERGED):
                s = start + tl.arange(0, MERGED)[:, None]
                parts = part + (s * GROUP + g) * D
                total += tl.sum(tl.load(parts, mask=(s < used) & real, other=0.0, cache_modifier=".cg"), 0)[None, :]
            tl.store(target + g * D, total.to(dtype), mask=real)


@triton.jit
def _place(table, n, BLOCK: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr):
    """Offsets ``[N]`` of the keys ``n [N]`` in the cache."""
    return tl.load(table + n // BLOCK).to(tl.int64) * STRIDE + n % BLOCK * D


@triton.jit
def _group(places, real, D: tl.constexpr, KEYS: tl.constexpr):
    """So many successive keys of each run, ``[RUNS, WIDTH]`` each."""
    keys = ()
    for key in tl.static_range(KEYS):
        keys += (_row(places + key * D, real),)
    return keys


@triton.jit
def _row(place, mask):
    """Of K or V, which nobody reads again before the next step: the first to leave the caches."""
    return tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _zeros(shape: tl.constexpr, dtype: tl.constexpr, COUNT: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros += (tl.zeros(shape, dtype),)
    return zeros


@triton.jit
def _before(rows, table, n, mask, BLOCK: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr):
    """The two keys before each of ``n [N]``, ``[N, WIDTH]`` each; something sound where there are none."""
    second = _place(table, tl.maximum(n - 2, 0), BLOCK, D, STRIDE)
    nearest = _place(table, tl.maximum(n - 1, 0), BLOCK, D, STRIDE)
    return tl.load(rows + second[:, None], mask=mask, other=0.0), tl.load(rows + nearest[:, None], mask=mask, other=0.0)


@triton.jit
def _state(q, before, n, tap_1, tap_2, RELU_PRE: tl.constexpr):
    """The filter's state in front of the keys ``n``, from the two ``before`` each, where there are any."""
    passed = tl.where(n >= 2, filtered(tl.sum(q * before[0].to(tl.float32), 1), RELU_PRE), 0.0)
    _, due_later = subtracted(passed, 0.0, tap_1, tap_2)
    passed = tl.where(n >= 1, filtered(tl.sum(q * before[1].to(tl.float32), 1), RELU_PRE), 0.0)
    return subtracted(passed, due_later, tap_1, tap_2)


@triton.jit
def _added(acc, weights, values, GROUP: tl.constexpr, KEYS: tl.constexpr):
    """Sums of values of each head with a group's weighted values added."""
    for key in tl.static_range(KEYS):
        v = values[key].to(tl.float32)
        more = ()
        for g in tl.static_range(GROUP):
            more += (acc[g] + weights[key * GROUP + g][:, None] * v,)
        acc = more
    return acc
