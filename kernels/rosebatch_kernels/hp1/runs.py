"""How the kernels walk over the keys of HP1 attention, and the gate that this serves.

The gate needs the scores of the two keys before each key. So a tile of keys is not one piece of a sequence: each of
its columns walks along a run of successive keys of its own, and what a column needs of earlier keys is what it computed
in the iterations before. Nothing is exchanged between columns, and the gate stays in registers; the price is that
every run begins with the scores of the two keys in front of it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def gated(
    scores,
    due,
    due_later,
    tap_0,
    tap_1,
    tap_2,
    RELU_PRE: tl.constexpr,
    CLIP_MIN: tl.constexpr,
    CLIP_MAX: tl.constexpr,
):
    """Weights without gamma of some keys, and the filter's state for the keys that follow.

    The state is what earlier keys subtract from the next scores (``due``) and from those behind (``due_later``): the
    transposed form of the filter. With the passed scores themselves as the state, one of them would be handed on
    unchanged, and the compiler pipelines no such loop. Scores may be in any unit that the clip bounds are in as well:
    the scale can be applied later.
    """
    passed = filtered(scores, RELU_PRE)
    z = scores - tap_0 * passed - due
    due, due_later = subtracted(passed, due_later, tap_1, tap_2)
    return tl.minimum(tl.maximum(z, CLIP_MIN), CLIP_MAX), due, due_later


@triton.jit
def filtered(scores, RELU_PRE: tl.constexpr):
    """What the filter sees of scores."""
    return tl.maximum(scores, 0.0) if RELU_PRE else scores


@triton.jit
def subtracted(passed, due_later, tap_1, tap_2):
    """The filter's state behind these keys."""
    return tap_1 * passed + due_later, tap_2 * passed


@triton.jit
def nearest(n, last):
    """The keys ``n``, or the nearest that there are: what is loaded there has to be sound, though nobody uses it."""
    return tl.minimum(tl.maximum(n, 0), last)


@triton.jit
def two_pages(table, n, last, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """Of the keys ``n [N]`` the page, where in the cache it begins, and how far from there the next one: ``[N]`` each.

    A piece of a run as long as a page lies in these two. So a loop over it loads no block numbers, which would be a
    link of its software pipeline.
    """
    page = nearest(n, last) // BLOCK
    this = tl.load(table + page).to(tl.int64) * STRIDE
    following = tl.load(table + tl.minimum(page + 1, last // BLOCK)).to(tl.int64) * STRIDE
    return page, this, following - this


@triton.jit
def places(n, page, start, step, d, D: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets ``[N, WIDTH]`` of keys that lie in two pages, for ``d [1, WIDTH]``."""
    # Not a choice between two: the compiler would no longer see that they are multiples of D, and load one by one.
    offset = start + (n // BLOCK - page) * step + (n % BLOCK) * D
    return offset[:, None] + d
