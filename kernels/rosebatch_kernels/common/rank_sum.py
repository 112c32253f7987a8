"""A sum over the GPUs that hold a model, inside of a kernel: they write to and read from each other over NVLink.

In one shot, for few rows, each rank reads the parts of all others. In two shots, for many, each row has an owner: it
gets the row's parts, adds them up and gives the sum to all, so that less crosses the links. A program signals to the
same program of another rank that it may read. That one waits for the signal and takes it.

All ranks add up in the order of the ranks, so a sum has the same bits everywhere. They write and read in orders of
their own: no rank then serves all others at once.

Two sums in one shot that follow each other need memory of their own: a rank may still read the first one's when another
rank writes the second's. In two shots nobody writes a row again before all have its sum.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import triton
import triton.language as tl


@triton.jit
def sum_over_ranks(value, offset, inside, TILE: tl.constexpr, buffers, sums, signals, RANK: tl.constexpr):
    """The sum of ``value`` over all ranks, rounded to the dtype of the parts, as NCCL's is; in fp32.

    Both ways round alike: which one it is goes by the number of rows, and a row's bits may not.

    Args:
        value: this rank's part.
        offset: where it lies in the memory of all rows, a ``TILE`` for each program; ``inside`` is its mask.
        TILE: numbers of a program.
        buffers, sums, signals, RANK: see ``AllReduce``.
    """
    if sums is None:
        total = _in_one_shot(value, offset, inside, buffers, signals, RANK)
    else:
        total = _in_two_shots(value, offset, inside, TILE, buffers, sums, signals, RANK)
    return total


@triton.jit
def _in_one_shot(value, offset, inside, buffers, signals, RANK: tl.constexpr):
    ranks: tl.constexpr = len(buffers)
    first = tl.program_id(0) * ranks
    tl.store(buffers[RANK] + offset, value.to(buffers[RANK].dtype.element_ty), inside)
    _signal_others(signals, first, RANK)
    _wait_for_others(signals, first, RANK)
    parts = (tl.load(buffers[RANK] + offset, inside, other=0.0),)
    for step in tl.static_range(1, ranks):
        parts += (tl.load(buffers[(RANK + step) % ranks] + offset, inside, other=0.0),)
    total = tl.zeros_like(value)
    for other in tl.static_range(ranks):
        total += parts[(other - RANK) % ranks].to(tl.float32)
    return total.to(buffers[RANK].dtype.element_ty).to(tl.float32)


@triton.jit
def _in_two_shots(value, offset, inside, TILE: tl.constexpr, buffers, sums, signals, RANK: tl.constexpr):
    ranks: tl.constexpr = len(buffers)
    program = tl.program_id(0)
    owner, first = program % ranks, program * ranks
    rounded = value.to(sums[RANK].dtype.element_ty)
    # The owner has as many places as there are ranks: those of this program, and of programs that other ranks own.
    places = buffers[RANK] + offset - owner * TILE
    if owner == RANK:
        _wait_for_others(signals, first, RANK)
        total = tl.zeros_like(value)
        for other in tl.static_range(ranks):
            if other == RANK:
                total += rounded.to(tl.float32)
            else:
                total += tl.load(places + other * TILE, inside, other=0.0).to(tl.float32)
        rounded = total.to(rounded.dtype)
        for step in tl.static_range(1, ranks):
            tl.store(sums[(RANK + step) % ranks] + offset, rounded, inside)
        _signal_others(signals, first, RANK)
    else:
        for other in tl.static_range(ranks):
            if other == owner:
                tl.store(buffers[other] + offset + (RANK - owner) * TILE, rounded, inside)
                tl.debug_barrier()
                _signal(signals[other] + first + RANK)
        while tl.atomic_cas(signals[RANK] + first + owner, 1, 0, sem="acquire", scope="sys") != 1:
            pass
        tl.debug_barrier()
        rounded = tl.load(sums[RANK] + offset, inside, other=0.0)
    return rounded.to(tl.float32)


@triton.jit
def _signal_others(signals, first, RANK: tl.constexpr):
    """Signal to the same program of all other ranks that it may read what this one has stored."""
    ranks: tl.constexpr = len(signals)
    each = tl.arange(0, triton.next_power_of_2(ranks))
    addresses = tl.zeros_like(each).to(tl.int64)
    for other in tl.static_range(ranks):
        addresses = tl.where(each == other, (signals[other] + first + RANK).to(tl.int64), addresses)
    # A thread signals to one of them; all threads have stored then.
    tl.debug_barrier()
    _signal(addresses.to(tl.pointer_type(tl.int32)), (each != RANK) & (each < ranks))


@triton.jit
def _wait_for_others(signals, first, RANK: tl.constexpr):
    """Wait for the same program of all other ranks."""
    ranks: tl.constexpr = len(signals)
    each = tl.arange(0, triton.next_power_of_2(ranks))
    # Nobody signals the own place.
    places = signals[RANK] + first + tl.where(each < ranks, each, RANK)
    missing = ((each != RANK) & (each < ranks)).to(tl.int32)
    told, taken = tl.full(each.shape, 1, tl.int32), tl.zeros_like(each)
    while tl.max(missing, 0) > 0:
        missing &= (tl.atomic_cas(places, told, taken, sem="acquire", scope="sys") != told).to(tl.int32)
    tl.debug_barrier()


@triton.jit
def _signal(signals, mask=None):
    """Signal ranks that have taken the last signal: they may read what this program has stored."""
    tl.atomic_add(signals, 1, mask, sem="release", scope="sys")
