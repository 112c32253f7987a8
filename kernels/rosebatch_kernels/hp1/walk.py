"""How HP1 decode walks over the keys of a sequence in runs, see ``rosebatch_kernels.hp1.runs``.

Some threads hold one row of K: 16 for a head of 128 in 16 bits. They walk along a run of successive keys of their own.
They hold the same channels of that key's V, of the query and of the sum of values. So threads exchange nothing before
the end but the sum of a score. The weights are known before V is loaded: V of a key is read only where some head of the
group gives it weight (source of the sparse values: article S4).

K is loaded one group of keys ahead, and V is used one group later: both are in flight while a group is computed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, operator"

import triton
import triton.language as tl

from rosebatch_kernels.common.kv_tiles import load_once, place_in, place_of
from rosebatch_kernels.hp1.runs import filtered, gated, nothing_due, subtracted


@triton.jit
def first_group(pages, first, last_group, real, SHAPE: tl.constexpr, KEYS: tl.constexpr):
    """What the walk begins with: K of each run's first group, its place, the next group, and its block."""
    place = place_of(pages, tl.minimum(first, last_group), SHAPE)
    group = tl.minimum(first + KEYS, last_group)
    block = tl.load(pages.table + group // SHAPE.BLOCK)
    return _keys_of_group(pages, place, real, SHAPE, KEYS), place, group, block


@triton.jit
def keys_before(pages, n, mask, SHAPE: tl.constexpr, GATE: tl.constexpr):
    """The ``TAPS - 1`` keys before each of ``n [N]``, ``[N, WIDTH]`` each; something sound where there are none."""
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    places = ()
    for i in tl.static_range(1, tl.constexpr(GATE.TAPS)):
        places += (place_of(pages, tl.maximum(n - (GATE.TAPS - i), 0), SHAPE),)
    keys = ()
    for i in tl.static_range(1, tl.constexpr(GATE.TAPS)):
        keys += (tl.load(pages.cache + d + places[i - 1][:, None], mask=mask, other=0.0),)
    return keys


@triton.jit
def states_before(q, before, n, filters, SHAPE: tl.constexpr, GATE: tl.constexpr):
    """Each head's filter state before the keys ``n``, from the keys ``before`` each."""
    states = ()
    for g in tl.static_range(tl.constexpr(SHAPE.GROUP)):
        states += (_state(q[g], before, n, filters[g], GATE),)
    return states


@triton.jit
def weights_of_new(q, k, before, n, split, filters, SHAPE: tl.constexpr, GATE: tl.constexpr):
    """The weight of the new key at ``n [1]`` for each head in the first split, 0 in the others: it counts once."""
    weights = ()
    for g in tl.static_range(tl.constexpr(SHAPE.GROUP)):
        state = _state(q[g], before, n, filters[g], GATE)
        weight, _ = gated(tl.sum(q[g] * k.to(tl.float32), 1), state, filters[g], GATE)
        weights += (tl.where(split == 0, weight, 0.0),)
    return weights


@triton.jit
def walk(
    q,
    flight,
    pages,
    real,
    runs,
    states,
    filters,
    SHAPE: tl.constexpr,
    GATE: tl.constexpr,
    KEYS: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Each head's weighted sum of the values of all runs, ``[RUNS, WIDTH]``, group by group.

    Args:
        q: of each head, ``[1, WIDTH]`` fp32.
        flight: from ``first_group``.
        pages: of the sequence.
        real: channels.
        runs: the first key of each ``[RUNS]``, their length, the key after the last, and the last group.
        states: from ``states_before``.
        filters: taps of each head.
    """
    k, place, group, block = flight
    first, run, end, last_group = runs
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    acc = _zeros(k[0].shape, tl.float32, SHAPE.GROUP)
    weights = _zeros(first.shape, tl.float32, SHAPE.GROUP * KEYS)
    v = _zeros(k[0].shape, k[0].dtype, KEYS)
    for i in range(0, run, KEYS):
        next_place = place_in(pages, block, group, SHAPE)
        next_k = _keys_of_group(pages, next_place, real, SHAPE, KEYS)
        group = tl.minimum(first + i + 2 * KEYS, last_group)
        block = tl.load(pages.table + group // SHAPE.BLOCK)
        v_rows = pages.cache + d + pages.v_distance + place[:, None]
        next_weights, next_v, states = _weights_and_values(
            q, k, v_rows, first + i, end, states, filters, real, SHAPE, GATE, KEYS, SPARSE
        )
        acc = _added(acc, weights, v, SHAPE, KEYS)
        weights = next_weights
        v = next_v
        k = next_k
        place = next_place
    return _added(acc, weights, v, SHAPE, KEYS)


@triton.jit
def _weights_and_values(
    q,
    k,
    v_rows,
    first,
    end,
    states,
    filters,
    real,
    SHAPE: tl.constexpr,
    GATE: tl.constexpr,
    KEYS: tl.constexpr,
    SPARSE: tl.constexpr,
):
    """Weights for each head and values of the keys ``first [RUNS]`` and up, and the filters' states after them.

    With SPARSE, values without weight are 0.
    """
    weights = ()
    values = ()
    for key in tl.static_range(KEYS):
        exists = first + key < end
        # False everywhere: no head gives weight so far.
        wanted = first < 0
        wide = k[key].to(tl.float32)
        next_states = ()
        for g in tl.static_range(tl.constexpr(SHAPE.GROUP)):
            p, state = gated(tl.sum(q[g] * wide, 1), states[g], filters[g], GATE)
            p = tl.where(exists, p, 0.0)
            wanted |= p != 0.0
            weights += (p,)
            next_states += (state,)
        states = next_states
        wanted = wanted if SPARSE else exists
        values += (load_once(v_rows + key * SHAPE.D, wanted[:, None] & real),)
    return weights, values, states


@triton.jit
def _state(q, before, n, taps, GATE: tl.constexpr):
    """The filter's state before the keys ``n``, from the keys ``before`` each, where there are any."""
    due = nothing_due(0.0, GATE)
    for i in tl.static_range(1, tl.constexpr(GATE.TAPS)):
        scores = tl.sum(q * before[i - 1].to(tl.float32), 1)
        passed = tl.where(n >= GATE.TAPS - i, filtered(scores, GATE), 0.0)
        due = subtracted(passed, due, taps, GATE)
    return due


@triton.jit
def _keys_of_group(pages, place, real, SHAPE: tl.constexpr, KEYS: tl.constexpr):
    """So many successive keys of each run, ``[RUNS, WIDTH]`` each."""
    rows = pages.cache + tl.arange(0, SHAPE.WIDTH)[None, :] + place[:, None]
    keys = ()
    for key in tl.static_range(KEYS):
        keys += (load_once(rows + key * SHAPE.D, real),)
    return keys


@triton.jit
def _added(acc, weights, values, SHAPE: tl.constexpr, KEYS: tl.constexpr):
    """Sums of values of each head with a group's weighted values added."""
    for key in tl.static_range(KEYS):
        v = values[key].to(tl.float32)
        more = ()
        for g in tl.static_range(tl.constexpr(SHAPE.GROUP)):
            more += (acc[g] + weights[key * SHAPE.GROUP + g][:, None] * v,)
        acc = more
    return acc


@triton.jit
def _zeros(SHAPE: tl.constexpr, DTYPE: tl.constexpr, COUNT: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros += (tl.zeros(SHAPE, DTYPE),)
    return zeros
