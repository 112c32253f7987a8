"""How HP1 kernels with tiles of keys walk over them: each column of a tile walks along its own run, see ``runs``."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import triton
import triton.language as tl

from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.common.kv_tiles import load_rows, nearest, place_in_two, two_blocks
from rosebatch_kernels.hp1.runs import filtered, gated, nothing_due, subtracted


@triton.jit
def attend_columns(
    query,
    pages,
    begin,
    last_key,
    seen,
    taps,
    SHAPE: tl.constexpr,
    GATE: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Weighted sums of values ``[ROWS, WIDTH]`` over the keys from ``begin`` up to ``last_key``, in KEYS columns.

    Args:
        query: ``[ROWS, WIDTH]``.
        pages: of the keys.
        begin, last_key: of the keys.
        seen: the last key that a row sees, ``[ROWS, 1]`` or one for all.
        taps: of the head.
    """
    # Keys of a column. All exist, except some of the last column's.
    run = tl.cdiv(last_key + 1 - begin, KEYS)
    first = begin + tl.arange(0, KEYS) * run
    before = _keys_before(pages, first, last_key, SHAPE, GATE)
    due = _due_before(query, before, first, taps, KEYS, GATE)
    acc = tl.zeros(query.shape, tl.float32)
    for piece in range(0, run, SHAPE.BLOCK):
        blocks = two_blocks(pages, first + piece, last_key, SHAPE)
        for i in tl.range(piece, tl.minimum(piece + SHAPE.BLOCK, run), num_stages=STAGES):
            n = first + i
            place = place_in_two(nearest(n, last_key), blocks, SHAPE)
            k = load_rows(pages.cache + place, SHAPE)
            v = load_rows(pages.cache + pages.v_distance + place, SHAPE)
            scores = dot(query, tl.trans(k))
            weights, due = gated(scores, due, taps, GATE)
            weights = tl.where(n[None, :] <= seen, weights, 0.0)
            # Loads of both are waited for at once: the fence of the first product is for this one, too.
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc


@triton.jit
def _keys_before(pages, first, last, SHAPE: tl.constexpr, GATE: tl.constexpr):
    """The ``TAPS - 1`` keys before each of ``first [N]``, ``[N, WIDTH]`` each; something sound where there are none.

    All are loaded before the first is used, so that the loads are in flight together.
    """
    before = ()
    for i in tl.static_range(1, tl.constexpr(GATE.TAPS)):
        n = first - (GATE.TAPS - i)
        # Two blocks hold a block's number of keys and one more.
        if (i - 1) % (SHAPE.BLOCK + 1) == 0:
            blocks = two_blocks(pages, n, last, SHAPE)
        before += (load_rows(pages.cache + place_in_two(nearest(n, last), blocks, SHAPE), SHAPE),)
    return before


@triton.jit
def _due_before(query, before, first, taps, KEYS: tl.constexpr, GATE: tl.constexpr):
    """The filter's state before the keys ``first``, from the keys ``before`` each, where there are any."""
    due = nothing_due(tl.zeros([query.shape[0], KEYS], tl.float32), GATE)
    for i in tl.static_range(1, tl.constexpr(GATE.TAPS)):
        scores = dot(query, tl.trans(before[i - 1]))
        exists = first >= GATE.TAPS - i
        due = subtracted(tl.where(exists[None, :], filtered(scores, GATE), 0.0), due, taps, GATE)
    return due
