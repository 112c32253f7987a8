"""The gated delta rule with a decay for each channel of a key, against the recurrence in float64."""

from itertools import pairwise

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.chunks import TILE_ROWS, max_tiles, pack_chunks
from rosebatch_kernels.gated_delta import channel_prefill, reference
from tests.helpers.interpreter import add_up_exactly
from tests.helpers.sizes import change_table
from tests.kernels.test_gated_delta import EPS, HEADS, Case, close, ints

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@pytest.fixture(params=["reference", "kernel"])
def prefill(request):
    """Either implementation of it."""
    return reference.prefill if request.param == "reference" else Launchers("gated_delta.channel_prefill").prefill


@pytest.fixture
def decode(prefill):
    """Of the same implementation."""
    if prefill is reference.prefill:
        return reference.decode
    kernel = Launchers("gated_delta.decode").decode

    def settled(qkv, *args):
        """A decode step reads S while the kernel in front still runs: in a model, that one has not written it."""
        out = kernel(qkv, *args)
        if qkv.is_cuda:
            torch.cuda.synchronize()
        return out

    return settled


@pytest.fixture
def case(randn, dtype, device):
    """Makes a layer of these heads."""

    def make(heads=HEADS[0], **options):
        return Case(randn, options.pop("dtype", dtype), device, heads, by_channel=True, **options)

    return make


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("max_beta", [1.0, 2.0])
def test_prefill_and_decode_continue_each_other(prefill, decode, heads, max_beta, dtype, device, case):
    """A prompt in two chunks, then decode steps: a channel with another's decay, or a stale state, would show."""
    layer = case(heads, biased=False, max_beta=max_beta)
    inputs = layer.inputs(80)
    exact, memory = layer.exact(*inputs)
    parts = []
    for start, stop in ((0, 5), (5, 76)):
        packed = pack_chunks([(2, 0, start, stop - start)], device)
        parts.append(prefill(*(x[start:stop] for x in inputs), layer.state, packed, layer.weights))
    for t in range(76, 80):
        where = ints([2], device), ints([t], device), ints([t + 1], device)
        parts.append(decode(*(x[t : t + 1] for x in inputs), layer.state, *where, layer.weights))
    out = torch.cat(parts)
    assert out.dtype == dtype
    close(out, exact)
    close(layer.state.memory[2].to(dtype), memory)


@pytest.mark.parametrize("rows", [16, 32])
def test_systems_smaller_than_a_tile(rows, dtype, device, case, monkeypatch):
    """As GPUs with little shared memory have them; the last ones of a tile may have no tokens."""
    change_table(monkeypatch, channel_prefill, rows=((0, rows),))
    layer = case()
    inputs = layer.inputs(85)
    exact, memory = layer.exact(*inputs)
    packed = pack_chunks([(2, 0, 0, 85)], device)
    close(Launchers("gated_delta.channel_prefill").prefill(*inputs, layer.state, packed, layer.weights), exact)
    close(layer.state.memory[2].to(dtype), memory)


def test_packed_chunks_of_any_lengths(prefill, dtype, device, case):
    """Each tile's decay has a place of its own: chunks of one token, longer ones than a tile, and padding between."""
    layer = case(slots=9)
    # Slot, tokens before the chunk, tokens of the chunk.
    plan = [(7, 0, 1), (0, 70, 2), (3, 0, 64), (5, 2, 65), (1, 0, 130), (8, 64, 3)]
    sequences = {slot: layer.inputs(before + count) for slot, before, count in plan}
    for slot, before, _ in plan:
        if before:
            packed = pack_chunks([(slot, 0, 0, before)], device)
            prefill(*(x[:before] for x in sequences[slot]), layer.state, packed, layer.weights)
    untouched = layer.copy()
    first, rows, chunks = 3, [layer.inputs(3)], []
    for slot, before, count in plan:
        chunks.append((slot, first, before, count))
        rows.append([x[before:] for x in sequences[slot]])
        first += count
    chunks.insert(2, (0, 0, 0, 0))
    packed = pack_chunks(chunks, device, tiles=max_tiles(first, len(chunks)))
    out = prefill(*(torch.cat(parts) for parts in zip(*rows, strict=True)), layer.state, packed, layer.weights)
    for slot, row, before, count in (chunk for chunk in chunks if chunk[3]):
        exact, memory = layer.exact(*sequences[slot])
        close(out[row : row + count], exact[before:])
        close(layer.state.memory[slot].to(dtype), memory)
    for slot in (2, 4, 6):
        for part, same in zip(layer.state, untouched, strict=True):
            torch.testing.assert_close(part[slot], same[slot], rtol=0, atol=0, equal_nan=True)


def test_a_slot_begins_with_zeros_at_position_0(prefill, decode, device, case):
    """The slot's last sequence left its state, NaN even: neither a first chunk nor a first decode may read it."""
    layer = case(HEADS[1])
    inputs = layer.inputs(1)
    where = ints([1], device), ints([0], device), ints([1], device)
    exact, _ = layer.exact(*inputs)
    close(decode(*inputs, layer.state, *where, layer.weights), exact)
    close(prefill(*inputs, layer.state, pack_chunks([(2, 0, 0, 1)], device), layer.weights), exact)


@pytest.mark.parametrize("shift", [200, -30])
def test_fast_and_slow_channels(prefill, shift, dtype, device, case):
    """Every second channel forgets e^-200 a token, or nothing: the difference of two sums must not overflow between."""
    layer = case()
    qkv, a, b = layer.inputs(100)
    a = a.clone()
    a[:, ::2] += shift
    exact, memory = layer.exact(qkv, a, b)
    out = prefill(qkv, a, b, layer.state, pack_chunks([(0, 0, 0, 100)], device), layer.weights)
    close(out, exact)
    close(layer.state.memory[0].to(dtype), memory)


def test_forgetting_that_comes_and_goes(prefill, device, case):
    """Tokens that erase everything stand between others: what is behind one must not see what was before."""
    layer = case(dtype=torch.float32)
    qkv, a, b = layer.inputs(100)
    a = a.clone()
    a[[3, 15, 16, 31, 32, 50, 63, 64, 90]] += 30
    exact, memory = layer.exact(qkv, a, b)
    out = prefill(qkv, a, b, layer.state, pack_chunks([(0, 0, 0, 100)], device), layer.weights)
    close(out, exact, times=4)
    close(layer.state.memory[0], memory, times=4)


def test_equal_keys(prefill, device, case):
    """One token again and again, written whole and never forgotten: a series for the triangular inverse explodes."""
    layer = case(dtype=torch.float32)
    qkv, a, b = (x[:1].repeat(128, 1) for x in layer.inputs(1))
    a, b = a - 30, b + 10
    exact, memory = layer.exact(qkv, a, b)
    close(prefill(qkv, a, b, layer.state, pack_chunks([(0, 0, 0, 128)], device), layer.weights), exact)
    close(layer.state.memory[0], memory)


def test_rows_that_are_not_live_leave_their_state(prefill, decode, device, case):
    """A graph replays all rows: one whose sequence has ended must not touch the slot, another may own it by then."""
    layer = case(slots=3, dtype=torch.float16)
    packed = pack_chunks([(slot, 6 * slot, 0, 6) for slot in range(3)], device)
    prefill(*layer.inputs(18), layer.state, packed, layer.weights)
    before = layer.copy()
    slots, positions, limits = ints([[2, 0, 1], [6, 6, 0], [7, 6, 1]], device)
    decode(*layer.inputs(3), layer.state, slots, positions, limits, layer.weights)
    for slot, changes in ((0, False), (1, True), (2, True)):
        for part, same in zip(layer.state, before, strict=True):
            assert torch.equal(part[slot], same[slot]) != changes


def test_bits_of_a_sequence_do_not_depend_on_its_neighbours(prefill, decode, device, case):
    """With ``--batch-invariant``; on a CPU always."""
    layer = case(slots=3)
    inputs = layer.inputs(100)
    together, alone = layer.copy(), layer.copy()
    packed = pack_chunks([(0, 0, 0, 3), (1, 3, 0, 70), (2, 73, 0, 27)], device)
    out = prefill(*inputs, together, packed, layer.weights)
    same = prefill(*(x[3:73] for x in inputs), alone, pack_chunks([(0, 0, 0, 70)], device), layer.weights)
    assert torch.equal(out[3:73], same)
    assert torch.equal(together.memory[1], alone.memory[0])
    slots, positions = ints([2, 1], device), ints([27, 70], device)
    two = decode(*(x[:2] for x in inputs), together, slots, positions, positions + 1, layer.weights)
    where = slots[:1] * 0, positions[1:], positions[1:] + 1
    assert torch.equal(two[1:], decode(*(x[1:2] for x in inputs), alone, *where, layer.weights))


@pytest.mark.thorough
def test_chunks_that_end_with_a_tile_change_no_bit(dtype, device, case, monkeypatch):
    """With ``--batch-invariant``: from another place on, other tokens make up the triangular systems."""
    if device == "cpu":
        add_up_exactly(monkeypatch)
    kernel, tokens = Launchers("gated_delta.channel_prefill"), 2 * TILE_ROWS + 9
    layer = case((1, 2, 16, 16))
    inputs = layer.inputs(tokens)

    def run(*cuts):
        state, outs = layer.copy(), []
        for start, stop in pairwise((0, *cuts, tokens)):
            packed = pack_chunks([(0, 0, start, stop - start)], device)
            outs.append(kernel.prefill(*(each[start:stop] for each in inputs), state, packed, layer.weights))
        return torch.cat(outs), state.memory[0]

    whole = run()
    assert all(map(torch.equal, run(TILE_ROWS), whole)) and all(map(torch.equal, run(2 * TILE_ROWS), whole))
    assert not all(map(torch.equal, run(TILE_ROWS - 1), whole))


@pytest.mark.parametrize("module", ["reference", "kernel"])
def test_the_norm_with_a_sigmoid(module, dtype, device, randn, assert_close):
    """Kimi Linear's gate: SiLU in its place would be another model."""
    x, weight = randn(70, 3, 40, dtype=dtype).to(device), randn(40, dtype=dtype).to(device)
    gate = randn(70, 128, dtype=dtype).to(device)[:, 4:-4].view(70, 3, 40)
    norm = reference.gated_norm if module == "reference" else Launchers("gated_delta.gated_norm").gated_norm
    out = norm(x, gate, weight, EPS, "sigmoid")
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert out.dtype == dtype
    assert_close(out, exact * gate.double().sigmoid())
