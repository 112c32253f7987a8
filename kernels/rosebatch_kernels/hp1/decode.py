"""HP1 decode attention over the paged cache in Triton: one query token for each sequence, whose K and V it appends.

One program serves one sequence, one K/V head with all query heads that share it, and one part (split) of the keys, see
``rosebatch_kernels.common.decode_step``. It walks over the keys in runs (``rosebatch_kernels.hp1.walk``). Nothing is
rescaled; the last split of a head to finish adds up the partial results (source of the plain sum, and of the overlap at
a split: article S4).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from math import gcd

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.decode_step import (
    first_line,
    is_last,
    new_key,
    query_halves,
    result_arguments,
    token_arguments,
)
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.head_norms import HeadNorm
from rosebatch_kernels.common.heads import normed_and_rotated, turn, weight_halves
from rosebatch_kernels.common.kv_tiles import pages_of_own, place_of, store
from rosebatch_kernels.common.launch import launch_options, wait, wait_before_return
from rosebatch_kernels.common.shared_keys import MAX_PARTS, SharedKeys
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.hp1.attend_shared import attend_shared
from rosebatch_kernels.hp1.gate import Gate
from rosebatch_kernels.hp1.runs import load_taps
from rosebatch_kernels.hp1.sizes import Sizes, runs_and_keys
from rosebatch_kernels.hp1.walk import first_group, keys_before, states_before, walk, weights_of_new

_SHARED_PARTS = tl.constexpr(MAX_PARTS)


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
    sizes: Sizes,
    device: Device,
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
        keys: that rows share, attended to once for all of them by a kernel before this one.

    Returns:
        ``[B, heads · D]``.
    """
    batch = len(qkv)
    kv_heads, block_size = cache.shape[2:4]
    splits = workspace.num_splits(batch)
    tokens = token_arguments(
        qkv,
        cache,
        block_table,
        positions,
        limits,
        num_heads=num_heads,
        rotary=rotary,
        qk_norm=qk_norm,
        append=append,
    )
    out, results = result_arguments(qkv, cache, workspace, keys, num_heads=num_heads)
    if keys is not None:
        attend_shared(tokens, results["shared"].sums, keys, gate, scale=scale, sizes=sizes, device=device)
    shape = tokens["SHAPE"]
    runs, group_keys = runs_and_keys(shape.WIDTH, shape.GROUP, cache.dtype, sizes=sizes)
    _gated_decode[(kv_heads, batch, splits)](
        **tokens,
        **results,
        taps=gate.taps,
        gamma=gate.gamma,
        scale=scale,
        minimum=sizes.min_keys,
        RUNS=runs,
        # So that a group of keys lies in one block.
        KEYS=gcd(group_keys, block_size),
        SPLITS=splits,
        MERGED=sizes.merged,
        APPEND=append,
        GATE=gate.form(scale),
        SPARSE=sparse,
        num_warps=sizes.warps,
        **launch_options(device),
    )
    return out


@triton.jit(do_not_specialize=["num_blocks", "minimum"])
def _gated_decode(
    out,
    tokens,
    cache,
    block_table,
    taps,
    gamma,
    partials,
    shared,
    scale,
    num_blocks,
    table_stride,
    minimum,
    SHAPE: tl.constexpr,
    RUNS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
    APPEND: tl.constexpr,
    GATE: tl.constexpr,
    SPARSE: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    # The slowest axis: splits that short sequences do not need start last.
    split = tl.program_id(2)
    # Written by the previous step's feedback, which is older than this kernel's predecessor.
    position = tl.load(tokens.positions + row * tokens.state_stride)
    if position >= tl.load(tokens.limits + row * tokens.state_stride):
        wait_before_return(split == 0, PDL)
        return
    # Cached keys: [start, end). With APPEND the new token stays in registers.
    end = position if APPEND else position + 1
    start = 0
    if shared is not None:
        start = tl.load(shared.begins + row)
    run, used = _run_length(end - start, minimum, RUNS, KEYS, SPLITS)
    if split >= used:
        return
    pages = pages_of_own(cache, num_blocks, block_table + row * table_stride, head, SHAPE)
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    real = d < SHAPE.D
    first = start + (split * RUNS + tl.arange(0, RUNS)) * run
    last_group = tl.maximum(end - 1, 0) // KEYS * KEYS
    if PDL and not APPEND:
        wait()
    # Keys of earlier steps are older than this kernel's predecessor as well.
    flight = first_group(pages, first, last_group, real, SHAPE, KEYS)
    # The keys before each run, for their scores alone.
    begin = tl.minimum(first, end)
    before = keys_before(pages, begin, real, SHAPE, GATE)
    if APPEND:
        new = position + tl.zeros([1], tl.int32)
        # Of the first split alone.
        own = real & ((split + tl.zeros([1, 1], tl.int32)) == 0)
        before_new = keys_before(pages, new, own, SHAPE, GATE)
        slot = place_of(pages, new, SHAPE)[:, None]
    turned = turn(tokens.rotary, position, SHAPE)
    one = tl.zeros([1, 1], tl.int32)
    tl.static_assert(SHAPE.NORM != "layer", "its weights are those of each head")
    q_weights = weight_halves(tokens.q_norm, one, one == 0, SHAPE)
    k_weights = weight_halves(tokens.k_norm, one, one == 0, SHAPE)
    filters, factors = _filters(taps, gamma, head, scale, SHAPE, GATE)
    if PDL and APPEND:
        wait()

    # All loads are issued before the first use of any.
    if APPEND:
        k_halves, v_new = new_key(tokens, row, head, SHAPE)
    q = _queries(tokens, row, head, q_weights, turned, SHAPE)
    added = ()
    if APPEND:
        k_new = normed_and_rotated(k_halves, k_weights, turned, SHAPE)
        store(pages, slot, k_new, v_new, own, SHAPE.D)
        added = weights_of_new(q, k_new, before_new, new, split, filters, SHAPE, GATE), v_new
    states = states_before(q, before, begin, filters, SHAPE, GATE)
    runs = first, run, end, last_group
    acc = walk(q, flight, pages, real, runs, states, filters, SHAPE, GATE, KEYS, SPARSE)
    target = out + row.to(tl.int64) * (SHAPE.HEADS * SHAPE.D) + head * SHAPE.GROUP * SHAPE.D + d
    part = partials.sums + first_line(row, head, SPLITS, SHAPE).to(tl.int64) * SHAPE.D + d
    taken = ()
    if shared is not None:
        place = shared.sums + first_line(row, head, _SHARED_PARTS, SHAPE).to(tl.int64) * SHAPE.D + d
        taken = place, tl.load(shared.counts + row)
    _store(target, part, acc, added, taken, factors, split, used, real, SHAPE)
    if used == 1:
        return
    if is_last(partials, row, head, used, SHAPE):
        _add_up(target, part, used, real, SHAPE, MERGED)


@triton.jit
def _run_length(count, minimum, RUNS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr):
    """Keys of a run, whole groups, if ``count`` keys are divided; and the number of splits with keys, at least one."""
    used = tl.maximum(tl.minimum(count // minimum, SPLITS), 1)
    run = tl.cdiv(count, used * RUNS * KEYS) * KEYS
    # Rounded up, the runs may leave nothing for the last split.
    used = tl.maximum(tl.cdiv(count, tl.maximum(run * RUNS, 1)), 1)
    return run, used


@triton.jit
def _filters(taps, gamma, head, scale, SHAPE: tl.constexpr, GATE: tl.constexpr):
    """The taps of each head of a group, and the factor on its sum of values."""
    filters = ()
    factors = ()
    for g in tl.static_range(tl.constexpr(SHAPE.GROUP)):
        filters += (load_taps(taps, head * SHAPE.GROUP + g, GATE),)
        factors += (tl.load(gamma + head * SHAPE.GROUP + g) * scale,)
    return filters, factors


@triton.jit
def _queries(tokens, row, head, weights, turned, SHAPE: tl.constexpr):
    """q of each head of a group, ``[1, WIDTH]`` fp32."""
    one = tl.zeros([1, 1], tl.int32)
    loaded = ()
    for g in tl.static_range(tl.constexpr(SHAPE.GROUP)):
        loaded += (query_halves(tokens, row, head * SHAPE.GROUP + g + one, one == 0, SHAPE),)
    q = ()
    for g in tl.static_range(tl.constexpr(SHAPE.GROUP)):
        q += (normed_and_rotated(loaded[g], weights, turned, SHAPE).to(tl.float32),)
    return q


@triton.jit
def _store(target, part, acc, added, taken, factors, split, used, real, SHAPE: tl.constexpr):
    """Complete each head's sum of values and store it: as the result, or as a partial result if there are more splits.

    Args:
        target, part: where.
        acc: each head's sums of all runs.
        added: the new key's weight for each head, and its value; nothing if it is among the runs' keys.
        taken: where the sums over shared keys are, which the first split adds, and their number; nothing without such.
        factors: on the sums of values, but for the shared keys'.
        split, used: this one, and all.
        real: channels.
    """
    for g in tl.static_range(tl.constexpr(SHAPE.GROUP)):
        total = tl.sum(acc[g], 0)[None, :]
        if len(added) > 0:
            total += added[0][g][:, None] * added[1].to(tl.float32)
        total *= factors[g]
        if len(taken) > 0:  # noqa: SIM102 (a compile-time condition)
            if split == 0:
                for i in range(taken[1]):
                    place = taken[0] + (i * SHAPE.GROUP + g) * SHAPE.D
                    total += tl.load(place, mask=real, other=0.0, cache_modifier=".cg")
        if used == 1:
            tl.store(target + g * SHAPE.D, total.to(target.dtype.element_ty), mask=real)
        else:
            tl.store(part + (split * SHAPE.GROUP + g) * SHAPE.D, total, mask=real)


@triton.jit
def _add_up(target, part, used, real, SHAPE: tl.constexpr, MERGED: tl.constexpr):
    """Write to ``target`` the sum of each head's partial results, those of the ``used`` splits from ``part`` on."""
    for g in tl.static_range(tl.constexpr(SHAPE.GROUP)):
        total = tl.zeros([1, tl.constexpr(SHAPE.WIDTH)], tl.float32)
        for start in range(0, used, MERGED):
            s = start + tl.arange(0, MERGED)[:, None]
            parts = part + (s * SHAPE.GROUP + g) * SHAPE.D
            total += tl.sum(tl.load(parts, mask=(s < used) & real, other=0.0, cache_modifier=".cg"), 0)[None, :]
        tl.store(target + g * SHAPE.D, total.to(target.dtype.element_ty), mask=real)
