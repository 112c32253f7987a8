"""A sum over the GPUs that hold a model, inside of a kernel: each reads what the others have, over NVLink (one shot).

A program puts its part where the others can read it, tells the same program of each other rank, waits for theirs, and
adds up all parts in the order of the ranks: the sum has the same bits everywhere. Two sums that follow each other need
memory of their own: a rank may still read the first one's when another rank writes the second's.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def sum_over_ranks(value, offset, inside, buffers, signals, rank: tl.constexpr):
    """The sum of ``value`` over all ranks, in fp32; ``offset`` is where it lies in the buffers, ``inside`` its mask."""
    ranks: tl.constexpr = len(buffers)
    own = buffers[rank]
    tl.store(own + offset, value.to(own.dtype.element_ty), inside)
    # One thread tells the others; all threads have stored then.
    tl.debug_barrier()
    first = tl.program_id(0) * ranks
    for other in tl.static_range(ranks):
        if other != rank:
            # Until the other rank has taken the last signal.
            while tl.atomic_cas(signals[other] + first + rank, 0, 1, sem="release", scope="sys") != 0:
                pass
    for other in tl.static_range(ranks):
        if other != rank:
            while tl.atomic_cas(signals[rank] + first + other, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    tl.debug_barrier()
    total = tl.zeros_like(value)
    for other in tl.static_range(ranks):
        total += tl.load(buffers[other] + offset, inside, other=0.0).to(tl.float32)
    return total
