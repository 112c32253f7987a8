"""How HP1 kernels with tiles of keys load them: each column of a tile walks along its own run, see ``runs``."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import triton
import triton.language as tl

from rosebatch_kernels.hp1.runs import filtered, nothing_due, subtracted


@triton.jit
def keys_before(
    keys,
    table,
    first,
    last,
    d,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    TAPS: tl.constexpr,
):
    """The ``TAPS - 1`` keys before each of ``first [N]``, ``[N, WIDTH]`` each; something sound where there are none.

    All are loaded before the first is used, so that the loads are in flight together.
    """
    before = ()
    for i in tl.static_range(1, TAPS):
        n = first - (TAPS - i)
        # Two pages hold a page's number of keys and one more.
        if (i - 1) % (BLOCK + 1) == 0:
            page, start, page_step = two_pages(table, n, last, BLOCK, STRIDE)
        before += (load_keys(keys + places(nearest(n, last), page, start, page_step, d, D, BLOCK), d, D, WIDTH),)
    return before


@triton.jit
def due_in_front(
    query,
    before,
    first,
    taps,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TAPS: tl.constexpr,
    RELU_PRE: tl.constexpr,
):
    """The filter's state in front of the keys ``first``, from the keys ``before`` each, where there are any."""
    due = nothing_due(tl.zeros([ROWS, KEYS], tl.float32), TAPS)
    for i in tl.static_range(1, TAPS):
        scores = tl.dot(query, tl.trans(before[i - 1]), input_precision="ieee")
        exists = first >= TAPS - i
        due = subtracted(tl.where(exists[None, :], filtered(scores, RELU_PRE), 0.0), due, taps, TAPS)
    return due


@triton.jit
def load_keys(place, d, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of K or V."""
    if D < WIDTH:
        return tl.load(place, mask=d < D, other=0.0)
    return tl.load(place)


@triton.jit
def nearest(n, last):
    """The keys ``n``, or the nearest existing ones: those loads must be valid, though their values are not used."""
    return tl.minimum(tl.maximum(n, 0), last)


@triton.jit
def two_pages(table, n, last, BLOCK: tl.constexpr, STRIDE: tl.constexpr):
    """For the keys ``n [N]``: their page, its offset in the cache, and the distance to the next page, ``[N]`` each.

    A piece of a run as long as a page lies in these two. So the loop over it loads no block numbers, which would be a
    link of its software pipeline.
    """
    page = nearest(n, last) // BLOCK
    this = tl.load(table + page).to(tl.int64) * STRIDE
    following = tl.load(table + tl.minimum(page + 1, last // BLOCK)).to(tl.int64) * STRIDE
    return page, this, following - this


@triton.jit
def places(n, page, start, step, d, D: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets ``[N, WIDTH]`` of keys that lie in two pages, for ``d [1, WIDTH]``."""
    # Not tl.where: the compiler would no longer see multiples of D, and would load the elements one by one.
    offset = start + (n // BLOCK - page) * step + (n % BLOCK) * D
    return offset[:, None] + d
