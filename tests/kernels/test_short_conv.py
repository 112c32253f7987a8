"""Short convolutions: packed chunks and decode steps against whole sequences in float64."""

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.chunks import TILE_ROWS, max_tiles, pack_chunks
from rosebatch_kernels.short_conv import reference

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

# Channels and taps: no power of two, more than a program's, one tap, more than a tile of some.
SHAPES = [(48, 3), (100, 4), (300, 1), (20, 16)]


@pytest.fixture(params=["reference", "kernel"])
def implementation(request):
    return reference if request.param == "reference" else Launchers("short_conv.kernel")


def exact(x, weight):
    """Of a whole sequence from its first token."""
    before, after, own = x.chunk(3, 1)
    taps = weight.shape[1]
    values = torch.nn.functional.pad((before * own).double(), (0, 0, taps - 1, 0))
    total = sum(values[tap : tap + len(x)] * weight[:, tap].double() for tap in range(taps))
    return after.double() * total.to(x.dtype).double()


def state_of(slots, weight):
    """NaN, as the slots' last sequences may have left them."""
    return torch.full((slots, *weight.T.shape), float("nan"), dtype=weight.dtype, device=weight.device)


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def close(actual, expected):
    """Two roundings of a result, and those of a sum's terms."""
    eps = {torch.float32: 2.0**-20, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=eps, atol=eps * float(expected.abs().max()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_and_decode_steps_continue_each_other(implementation, shape, dtype, device, randn):
    """Wrong taps at a seam, a slot's old numbers before the first token, a ring that is overwritten too early."""
    channels, taps = shape
    wide = randn(90, 3 * channels + 5, dtype=dtype).to(device)
    x, weight = wide[:, : 3 * channels], randn(channels, taps, dtype=dtype).to(device)
    state, parts = state_of(4, weight), []
    for start, stop in ((0, 1), (1, 3), (3, 86)):
        packed = pack_chunks([(2, 0, start, stop - start)], device)
        parts.append(implementation.prefill(x[start:stop], state, packed, weight))
    for t in range(86, 90):
        where = ints([2], device), ints([t], device), ints([t + 1], device)
        parts.append(implementation.decode(x[t : t + 1], state, *where, weight))
    close(torch.cat(parts), exact(x, weight))
    assert state[[0, 1, 3]].isnan().all()


def test_packed_chunks_of_several_sequences(implementation, dtype, device, randn):
    """Each from its own slot and position; padding tiles and chunks touch nothing."""
    channels, taps, lengths = 70, 3, (1, TILE_ROWS, 2 * TILE_ROWS + 7, 2)
    weight = randn(channels, taps, dtype=dtype).to(device)
    state = state_of(6, weight)
    sequences = [randn(9 + length, 3 * channels, dtype=dtype).to(device) for length in lengths]
    slots = (5, 0, 3, 2)
    for slot, sequence in zip(slots, sequences, strict=True):
        implementation.prefill(sequence[:9], state, pack_chunks([(slot, 0, 0, 9)], device), weight)
    chunks, first = [], 0
    for slot, length in zip(slots, lengths, strict=True):
        chunks.append((slot, first, 9, length))
        first += length
    x = torch.cat([sequence[9:] for sequence in sequences])
    packed = pack_chunks([*chunks, (0, 0, 0, 0)], device, max_tiles(first, len(chunks)))
    out = implementation.prefill(x, state, packed, weight)
    expected = torch.cat([exact(sequence, weight)[9:] for sequence in sequences])
    close(out, expected)
    assert state[[1, 4]].isnan().all()


def test_rows_at_their_limit_change_nothing(implementation, dtype, device, randn):
    """A padding row of a graph would write into the slot of another sequence."""
    channels, taps = 33, 4
    weight = randn(channels, taps, dtype=dtype).to(device)
    state = randn(3, taps, channels, dtype=dtype).to(device)
    x, kept = randn(3, 3 * channels, dtype=dtype).to(device), state.clone()
    where = ints([1, 1, 0], device), ints([7, 7, 4], device), ints([9, 7, 4], device)
    out = implementation.decode(x, state, *where, weight)
    assert torch.equal(state[[0, 2]], kept[[0, 2]]) and not torch.equal(state[1], kept[1])
    before, after, own = x[0].chunk(3)
    past = [kept[1, place % taps].double() for place in (4, 5, 6)]
    total = sum(value * weight[:, tap].double() for tap, value in enumerate([*past, (before * own).double()]))
    close(out[:1], (after.double() * total.to(dtype).double())[None])


def test_bits_depend_neither_on_chunks_nor_on_the_batch(implementation, dtype, device, randn):
    """A token's sum has the same order in a chunk, in another chunk and in a decode step."""
    channels, taps = 48, 3
    x, weight = randn(70, 3 * channels, dtype=dtype).to(device), randn(channels, taps, dtype=dtype).to(device)
    state = state_of(2, weight)
    whole = implementation.prefill(x, state, pack_chunks([(0, 0, 0, 70)], device), weight)
    parts = [
        implementation.prefill(x[a:b], state, pack_chunks([(1, 0, a, b - a)], device), weight)
        for a, b in ((0, 33), (33, 35), (35, 69))
    ]
    where = ints([1], device), ints([69], device), ints([70], device)
    parts.append(implementation.decode(x[69:], state, *where, weight))
    assert torch.equal(torch.cat(parts), whole)
