"""HP1 decode attention over the paged cache in Triton: one query token for each sequence, whose K and V it appends.

One program serves one sequence, one K/V head with all query heads that share it, and one part (split) of the keys.
Like softmax decode (``rosebatch_kernels.paged_attention.decode``), it reads the row of the fused QKV projection itself.

The threads that hold one row of K (16 for a head of 128 in 16 bits) walk along a run of successive keys of their own,
see ``rosebatch_kernels.hp1.runs``. They hold the same channels of that key's V, of the query and of the sum of values.
So threads exchange nothing before the end but the sum of a score. The weights are known before V is loaded: V of a key
is read only where some head of the group gives it weight. Nothing is rescaled; the last split of a head to finish adds
up the partial results (source of the plain sum, of the overlap at a split and of the sparse values: article S4).

K is loaded one group of keys ahead, and V is used one group later: both are in flight while a group is computed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, operator"

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.arrivals import arrive
from rosebatch_kernels.common.head_norms import HeadNorm, norm_arguments
from rosebatch_kernels.common.heads import halves, normed_and_rotated, turn, weight_halves
from rosebatch_kernels.common.launch import launch_options, wait, wait_before_return
from rosebatch_kernels.common.shared_keys import MAX_PARTS, SharedKeys
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.hp1.attend_shared import attend_shared
from rosebatch_kernels.hp1.gate import Gate
from rosebatch_kernels.hp1.runs import filtered, gated, load_taps, nothing_due, subtracted
from rosebatch_kernels.hp1.sizes import SIZES, Sizes, runs_and_keys


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
    qk_norm: HeadNorm | None = None,
    append: bool = True,
    sparse: bool = True,
    keys: SharedKeys | None = None,
    sizes: Sizes = SIZES.measured,
) -> Tensor:
    """Attention of one new token for each sequence, see ``rosebatch_kernels.hp1.reference``.

    Args:
        qkv: ``[B, (heads + 2 · kv_heads) · D]``, q then k then v, the projection's output.
        cache: ``[2, blocks, kv_heads, block_size, D]``; with ``append`` the new K and V are written into it.
        block_table: ``[B, M]`` int32 block ids, rows at any stride.
        positions: ``[B]`` int32 at any stride, of the new token.
        limits: ``[B]`` int32 at the same stride; a row with ``position >= limit`` is skipped, its output undefined.
        workspace: for partial results.
        gate: of the layer.
        num_heads: query heads, a multiple of kv_heads.
        scale: factor on q·k, positive.
        rotary: ``(cos, sin)``, ``[max_len, R]`` each in qkv's dtype; both halves of cos are equal, the first half of
            sin is negated. The first R of D channels are rotated. None where q and k are rotated already, or never.
        qk_norm: of each head, before the rotation.
        append: False where the new K and V are in the cache already; q is then neither normalised nor rotated.
        sparse: False reads V of all keys.
        keys: that rows share, attended to once for all of them by a kernel in front of this one.

    Returns:
        ``[B, heads · D]``.
    """
    batch = len(qkv)
    _, blocks, kv_heads, block_size, size = cache.shape
    group = num_heads // kv_heads
    out = torch.empty(batch, num_heads * size, dtype=qkv.dtype, device=qkv.device)
    splits = workspace.num_splits(batch)
    width = max(16, triton.next_power_of_2(size))
    runs, group_keys = runs_and_keys(width, group, cache.dtype, sizes=sizes)
    cos, sin = rotary if append and rotary is not None else (qkv, qkv)
    norm, q_weight, k_weight, q_number, k_number = norm_arguments(qk_norm if append else None, qkv)
    # Without shared keys, something of the same dtypes.
    begins, counts, shared_sums = workspace.arrived, workspace.arrived, workspace.sums
    if keys is not None:
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
            gate,
            num_heads=num_heads,
            scale=scale,
            rotary=rotary,
            qk_norm=qk_norm,
            append=append,
            sizes=sizes,
        )
        begins, counts, shared_sums = keys.begins, keys.counts, parts.sums
    # Of unscaled scores: the scale is applied to the sums of values, which are fewer.
    clip_min, clip_max = gate.bounds(scale)
    _gated_decode[(kv_heads, batch, splits)](
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
        taps=gate.taps,
        gamma=gate.gamma,
        sums=workspace.sums,
        arrived=workspace.arrived,
        shared_begins=begins,
        shared_counts=counts,
        shared_sums=shared_sums,
        scale=scale,
        q_number=q_number,
        k_number=k_number,
        num_blocks=blocks,
        qkv_stride=qkv.stride(0),
        table_stride=block_table.stride(0),
        state_stride=positions.stride(0),
        minimum=sizes.min_keys,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        GROUP=group,
        D=size,
        WIDTH=width,
        BLOCK=block_size,
        RUNS=runs,
        # So that a group of keys lies in one block.
        KEYS=gcd(group_keys, block_size),
        SPLITS=splits,
        MERGED=sizes.merged,
        APPEND=append,
        ROTARY=cos.shape[1] if append and rotary is not None else 0,
        NORM=norm,
        TAPS=gate.taps.shape[1],
        RELU_PRE=gate.relu_pre,
        CLIP_MIN=clip_min,
        CLIP_MAX=clip_max,
        SPARSE=sparse,
        SHARED=MAX_PARTS if keys is not None else 0,
        num_warps=sizes.warps,
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["num_blocks", "minimum"])
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
    shared_begins,
    shared_counts,
    shared_sums,
    scale,
    q_number,
    k_number,
    num_blocks,
    qkv_stride,
    table_stride,
    state_stride,
    minimum,
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
    TAPS: tl.constexpr,
    RELU_PRE: tl.constexpr,
    CLIP_MIN: tl.constexpr,
    CLIP_MAX: tl.constexpr,
    SPARSE: tl.constexpr,
    SHARED: tl.constexpr,
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
    # Cached keys: [start, end). With APPEND the new token stays in registers.
    end = position if APPEND else position + 1
    start = 0
    if SHARED:
        start = tl.load(shared_begins + row)
    run, used = _run_length(end - start, minimum, RUNS, KEYS, SPLITS)
    if split >= used:
        return
    table = block_table + row * table_stride
    stride: tl.constexpr = KV_HEADS * BLOCK * D
    v_distance = num_blocks.to(tl.int64) * stride
    d = tl.arange(0, WIDTH)[None, :]
    real = d < D
    rows = cache + head * (BLOCK * D) + d
    first = start + (split * RUNS + tl.arange(0, RUNS)) * run
    last_group = tl.maximum(end - 1, 0) // KEYS * KEYS
    if PDL and not APPEND:
        wait()
    # Keys of earlier steps are older than the kernel in front as well.
    flight = _first_group(rows, table, first, last_group, real, D, BLOCK, KEYS, stride)
    # The keys in front of each run, for their scores alone.
    begin = tl.minimum(first, end)
    before = _before(rows, table, begin, real, BLOCK, D, stride, TAPS)
    slot = _new_slot(rows, table, position, split, real, D, BLOCK, stride, TAPS, APPEND)
    turned = turn(cos, sin, position, WIDTH, ROTARY)
    one = tl.zeros([1, 1], tl.int32)
    tl.static_assert(NORM != "layer", "its weights are those of each head")
    q_weights = weight_halves(q_weight, q_number, one, one == 0, D, WIDTH, ROTARY, NORM)
    k_weights = weight_halves(k_weight, k_number, one, one == 0, D, WIDTH, ROTARY, NORM)
    filters, factors = _filters(taps, gamma, head, scale, GROUP, TAPS)
    if PDL and APPEND:
        wait()

    q_halves, k_halves, v_new = _new_token(qkv, qkv_stride, row, head, HEADS, KV_HEADS, GROUP, D, WIDTH, APPEND, ROTARY)
    q = _heads(q_halves, q_weights, turned, GROUP, D, ROTARY, NORM)
    new_weights = ()
    if APPEND:
        k_new = normed_and_rotated(k_halves, k_weights, turned, D, ROTARY, NORM)
        _append(slot, k_new, v_new, v_distance)
        new_weights = _weights_of_new(q, k_new, slot, split, filters, GROUP, TAPS, RELU_PRE, CLIP_MIN, CLIP_MAX)
    states = _states(q, before, begin, filters, GROUP, TAPS, RELU_PRE)
    cached = rows, v_distance, table, real
    runs = first, run, end, last_group
    acc = _walk(
        q,
        flight,
        cached,
        runs,
        states,
        filters,
        GROUP,
        D,
        BLOCK,
        KEYS,
        stride,
        TAPS,
        RELU_PRE,
        CLIP_MIN,
        CLIP_MAX,
        SPARSE,
    )
    target = out + row.to(tl.int64) * (HEADS * D) + head * GROUP * D + d
    part = sums + ((row * KV_HEADS + head) * SPLITS * GROUP).to(tl.int64) * D + d
    shared = ()
    if SHARED:
        shared_part = shared_sums + ((row * KV_HEADS + head) * SHARED * GROUP).to(tl.int64) * D + d
        shared = shared_part, tl.load(shared_counts + row)
    _store(target, part, acc, new_weights, v_new, shared, factors, split, used, real, GROUP, D, APPEND)
    if used == 1:
        return
    if arrive(arrived + row * KV_HEADS + head) == used - 1:
        tl.store(arrived + row * KV_HEADS + head, 0)
        _add_up(target, part, used, real, GROUP, D, WIDTH, MERGED)


@triton.jit
def _run_length(count, minimum, RUNS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr):
    """Keys of a run, whole groups, if ``count`` keys are divided; and the number of splits with keys, at least one."""
    used = tl.maximum(tl.minimum(count // minimum, SPLITS), 1)
    run = tl.cdiv(count, used * RUNS * KEYS) * KEYS
    # Rounded up, the runs may leave nothing for the last split.
    used = tl.maximum(tl.cdiv(count, tl.maximum(run * RUNS, 1)), 1)
    return run, used


@triton.jit
def _first_group(
    rows, table, first, last_group, real, D: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, STRIDE: tl.constexpr
):
    """What the walk begins with: K of each run's first group, its place, the next group, and its block."""
    group = tl.minimum(first, last_group)
    place = _place(table, group, BLOCK, D, STRIDE)
    group = tl.minimum(first + KEYS, last_group)
    block = tl.load(table + group // BLOCK)
    return _group(rows + place[:, None], real, D, KEYS), place, group, block


@triton.jit
def _new_slot(
    rows,
    table,
    position,
    split,
    real,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    TAPS: tl.constexpr,
    APPEND: tl.constexpr,
):
    """Where the first split writes the new K, the mask of that, the keys before it, and its position.

    Nothing without APPEND. The other splits' masks are false.
    """
    slot = ()
    if APPEND:
        n = position + tl.zeros([1], tl.int32)
        mask = real & ((split + tl.zeros([1, 1], tl.int32)) == 0)
        before = _before(rows, table, n, mask, BLOCK, D, STRIDE, TAPS)
        slot = rows + _place(table, n, BLOCK, D, STRIDE)[:, None], mask, before, n
    return slot


@triton.jit
def _heads(x, weights, turned, GROUP: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr):
    """q of each head of a group, ``[1, WIDTH]`` fp32, from its halves."""
    q = ()
    for g in tl.static_range(GROUP):
        q += (normed_and_rotated(x[g], weights, turned, D, ROTARY, NORM).to(tl.float32),)
    return q


@triton.jit
def _walk(
    q,
    flight,
    cached,
    runs,
    states,
    filters,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    STRIDE: tl.constexpr,
    TAPS: tl.constexpr,
    RELU_PRE: tl.constexpr,
    CLIP_MIN: tl.constexpr,
    CLIP_MAX: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Each head's weighted sum of the values of all runs, ``[RUNS, WIDTH]``, group by group."""
    k, place, group, block = flight
    rows, v_distance, table, real = cached
    first, run, end, last_group = runs
    acc = _zeros(k[0].shape, tl.float32, GROUP)
    weights = _zeros(first.shape, tl.float32, GROUP * KEYS)
    v = _zeros(k[0].shape, k[0].dtype, KEYS)
    for i in range(0, run, KEYS):
        next_place = block.to(tl.int64) * STRIDE + group % BLOCK * D
        next_k = _group(rows + next_place[:, None], real, D, KEYS)
        group = tl.minimum(first + i + 2 * KEYS, last_group)
        block = tl.load(table + group // BLOCK)
        v_rows = rows + v_distance + place[:, None]
        next_weights, next_v, states = _weights_and_values(
            q,
            k,
            v_rows,
            first,
            i,
            end,
            states,
            filters,
            real,
            GROUP,
            KEYS,
            D,
            TAPS,
            RELU_PRE,
            CLIP_MIN,
            CLIP_MAX,
            SPARSE,
        )
        acc = _added(acc, weights, v, GROUP, KEYS)
        weights = next_weights
        v = next_v
        k = next_k
        place = next_place
    return _added(acc, weights, v, GROUP, KEYS)


@triton.jit
def _filters(taps, gamma, head, scale, GROUP: tl.constexpr, TAPS: tl.constexpr):
    """The taps of each head of a group, and the factor on its sum of values."""
    filters = ()
    factors = ()
    for g in tl.static_range(GROUP):
        filters += (load_taps(taps, head * GROUP + g, TAPS),)
        factors += (tl.load(gamma + head * GROUP + g) * scale,)
    return filters, factors


@triton.jit
def _new_token(
    qkv,
    stride,
    row,
    head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    APPEND: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """Halves of each head's q and of the new k, and the new v; nothing instead of these two without APPEND.

    All loads are issued before the first use of any.
    """
    d = tl.arange(0, WIDTH)[None, :]
    one = tl.zeros([1, 1], tl.int32)
    q_row = qkv + row.to(tl.int64) * stride
    k = ()
    v = ()
    if APPEND:
        k = halves(q_row + (HEADS + head) * D + one, one == 0, D, WIDTH, ROTARY)
        v = tl.load(q_row + (HEADS + KV_HEADS + head) * D + d, mask=d < D, other=0.0)
    q = ()
    for g in tl.static_range(GROUP):
        q += (halves(q_row + (head * GROUP + g) * D + one, one == 0, D, WIDTH, ROTARY),)
    return q, k, v


@triton.jit
def _append(slot, k, v, v_distance):
    """Write the new K and V ``[1, WIDTH]`` of one head."""
    place, mask, _, _ = slot
    tl.store(place, k, mask=mask)
    tl.store(place + v_distance, v, mask=mask)


@triton.jit
def _weights_of_new(
    q,
    k,
    slot,
    split,
    filters,
    GROUP: tl.constexpr,
    TAPS: tl.constexpr,
    RELU_PRE: tl.constexpr,
    CLIP_MIN: tl.constexpr,
    CLIP_MAX: tl.constexpr,
):
    """The new key's weight for each head in the first split, 0 in the others, so that it counts once."""
    _, _, before, n = slot
    weights = ()
    for g in tl.static_range(GROUP):
        state = _state(q[g], before, n, filters[g], TAPS, RELU_PRE)
        score = tl.sum(q[g] * k.to(tl.float32), 1)
        weight, _ = gated(score, state, filters[g], TAPS, RELU_PRE, CLIP_MIN, CLIP_MAX)
        weights += (tl.where(split == 0, weight, 0.0),)
    return weights


@triton.jit
def _states(q, before, n, filters, GROUP: tl.constexpr, TAPS: tl.constexpr, RELU_PRE: tl.constexpr):
    """Each head's filter state in front of the keys ``n``."""
    states = ()
    for g in tl.static_range(GROUP):
        states += (_state(q[g], before, n, filters[g], TAPS, RELU_PRE),)
    return states


@triton.jit
def _weights_and_values(
    q,
    k,
    v_rows,
    first,
    i,
    end,
    states,
    filters,
    real,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    TAPS: tl.constexpr,
    RELU_PRE: tl.constexpr,
    CLIP_MIN: tl.constexpr,
    CLIP_MAX: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Weights for each head and values of the keys ``first [RUNS] + i`` and up, and the filters' states after them.

    With SPARSE, values without weight are 0.
    """
    weights = ()
    values = ()
    for key in tl.static_range(KEYS):
        exists = first + i + key < end
        # False everywhere: no head gives weight so far.
        wanted = first < 0
        wide = k[key].to(tl.float32)
        next_states = ()
        for g in tl.static_range(GROUP):
            scores = tl.sum(q[g] * wide, 1)
            p, state = gated(scores, states[g], filters[g], TAPS, RELU_PRE, CLIP_MIN, CLIP_MAX)
            p = tl.where(exists, p, 0.0)
            wanted |= p != 0.0
            weights += (p,)
            next_states += (state,)
        states = next_states
        wanted = wanted if SPARSE else exists
        values += (_row(v_rows + key * D, wanted[:, None] & real),)
    return weights, values, states


@triton.jit
def _store(
    target,
    part,
    acc,
    new_weights,
    v_new,
    shared,
    factors,
    split,
    used,
    real,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    APPEND: tl.constexpr,
):
    """Add the new value, and in the first split the sums over shared keys, to each head's sum and store it.

    That is the result, or a partial result if there are more splits.
    """
    for g in tl.static_range(GROUP):
        total = tl.sum(acc[g], 0)[None, :]
        if APPEND:
            total += new_weights[g][:, None] * v_new.to(tl.float32)
        total *= factors[g]
        if len(shared) > 0:  # noqa: SIM102 (a compile-time condition)
            if split == 0:
                for i in range(shared[1]):
                    place = shared[0] + (i * GROUP + g) * D
                    total += tl.load(place, mask=real, other=0.0, cache_modifier=".cg")
        if used == 1:
            tl.store(target + g * D, total.to(target.dtype.element_ty), mask=real)
        else:
            tl.store(part + (split * GROUP + g) * D, total, mask=real)


@triton.jit
def _add_up(target, part, used, real, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, MERGED: tl.constexpr):
    """Write to ``target`` the sum of each head's partial results, those of the ``used`` splits from ``part`` on."""
    for g in tl.static_range(GROUP):
        total = tl.zeros([1, WIDTH], tl.float32)
        for start in range(0, used, MERGED):
            s = start + tl.arange(0, MERGED)[:, None]
            parts = part + (s * GROUP + g) * D
            total += tl.sum(tl.load(parts, mask=(s < used) & real, other=0.0, cache_modifier=".cg"), 0)[None, :]
        tl.store(target + g * D, total.to(target.dtype.element_ty), mask=real)


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
    """A row of K or V. No program reads it again before the next step, so it is the first to leave the caches."""
    return tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _zeros(SHAPE: tl.constexpr, DTYPE: tl.constexpr, COUNT: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros += (tl.zeros(SHAPE, DTYPE),)
    return zeros


@triton.jit
def _before(rows, table, n, mask, BLOCK: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr):
    """The ``TAPS - 1`` keys before each of ``n [N]``, ``[N, WIDTH]`` each; something sound where there are none."""
    places = ()
    for i in tl.static_range(1, TAPS):
        places += (_place(table, tl.maximum(n - (TAPS - i), 0), BLOCK, D, STRIDE),)
    keys = ()
    for i in tl.static_range(1, TAPS):
        keys += (tl.load(rows + places[i - 1][:, None], mask=mask, other=0.0),)
    return keys


@triton.jit
def _state(q, before, n, taps, TAPS: tl.constexpr, RELU_PRE: tl.constexpr):
    """The filter's state in front of the keys ``n``, from the keys ``before`` each, where there are any."""
    due = nothing_due(0.0, TAPS)
    for i in tl.static_range(1, TAPS):
        scores = tl.sum(q * before[i - 1].to(tl.float32), 1)
        passed = tl.where(n >= TAPS - i, filtered(scores, RELU_PRE), 0.0)
        due = subtracted(passed, due, taps, TAPS)
    return due


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
