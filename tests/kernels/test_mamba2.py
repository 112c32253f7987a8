"""Mamba2: decode steps and packed chunks against the recurrence in float64, one token after the other."""

from itertools import pairwise

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.chunks import TILE_ROWS, max_tiles, pack_chunks
from rosebatch_kernels.mamba2 import decode as decode_module
from rosebatch_kernels.mamba2 import prefill as prefill_module
from rosebatch_kernels.mamba2 import reference
from rosebatch_kernels.mamba2.layout import MambaState, MambaWeights
from tests.helpers.interpreter import add_up_exactly
from tests.helpers.sizes import change_table

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

EPS = 1e-6
# Heads, their size, groups, rows of B: no power of two, a head for each group, one for all, a real model's.
HEADS = [(4, 24, 2, 40), (2, 16, 2, 16), (3, 8, 1, 20), (2, 64, 1, 128)]
NAMES = ("decode", "prefill", "gate_norm")


@pytest.fixture(params=["reference", "kernel"])
def implementation(request):
    """Names of the three operators in either."""
    if request.param == "reference":
        return reference

    def settled(name):
        """A decode step reads S while the kernel in front still runs: in a model, that one has not written it."""
        function = getattr(Launchers(f"mamba2.{name}"), name)

        def run(x, *args):
            out = function(x, *args)
            if x.is_cuda:
                torch.cuda.synchronize()
            return out

        return staticmethod(run)

    return type("kernel", (), {name: settled(name) for name in NAMES})


class Case:
    """A layer, its states, and the inputs of sequences; ``exact`` is what one token after the other gives."""

    def __init__(self, randn, dtype, device, heads, slots=4, taps=4, biased=True):
        self.heads, self.dtype, self.device, self.randn = heads, dtype, device, randn
        number, head_dim, groups, size = heads
        self.channels = number * head_dim + 2 * groups * size
        bias = randn(self.channels, dtype=dtype).to(device) * 0.1 if biased else None
        conv = randn(self.channels, taps, dtype=dtype).to(device) * 0.5
        # A rate that forgets half within a few tokens, and one that hardly forgets.
        log_rate = torch.linspace(-4, 0.5, number).to(device)
        self.weights = MambaWeights(conv, bias, log_rate, randn(number).to(device), randn(number).to(device))
        inputs = torch.full((slots, taps, self.channels), float("nan"), dtype=dtype, device=device)
        memory = torch.full((slots, number, head_dim, size), float("nan"), device=device)
        self.state = MambaState(inputs, memory)

    def inputs(self, tokens):
        """xbc and dt of packed tokens: columns of one wide projection."""
        wide = self.randn(tokens, self.channels + self.heads[0] + 5, dtype=self.dtype).to(self.device)
        return wide[:, : self.channels], wide[:, self.channels : -5]

    def exact(self, xbc, dt):
        """Of a whole sequence from its first token: outputs and S."""
        number, head_dim, groups, size = self.heads
        weights = MambaWeights(*(None if part is None else part.double().cpu() for part in self.weights))
        xbc, dt = xbc.double().cpu(), dt.double().cpu()
        taps = weights.conv.shape[1]
        padded = torch.cat((torch.zeros(taps - 1, self.channels, dtype=torch.float64), xbc))
        mixed = sum(padded[i : i + len(xbc)] * weights.conv[:, i] for i in range(taps))
        mixed = torch.nn.functional.silu(mixed if weights.conv_bias is None else mixed + weights.conv_bias)
        x, b, c = mixed.to(self.dtype).double().split([number * head_dim, groups * size, groups * size], 1)
        step = torch.nn.functional.softplus(dt + weights.dt_bias)
        memory = torch.zeros(number, head_dim, size, dtype=torch.float64)
        out = torch.empty(len(xbc), number, head_dim, dtype=torch.float64)
        for t in range(len(xbc)):
            for head in range(number):
                group = head // (number // groups)
                bt, ct = (each[t, group * size : (group + 1) * size] for each in (b, c))
                xt = x[t, head * head_dim : (head + 1) * head_dim]
                decay = (-weights.log_rate[head].exp() * step[t, head]).exp()
                memory[head] = memory[head] * decay + step[t, head] * torch.outer(xt, bt)
                out[t, head] = memory[head] @ ct + weights.skip[head] * xt
        return out.flatten(1), memory

    def copy(self):
        return MambaState(*(part.clone() for part in self.state))


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def close(actual, exact, times=1):
    """An error of a few roundings of the largest value: rounded operands are summed before small results appear."""
    eps = {torch.float32: 2.0**-17, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-4}[actual.dtype]
    assert actual.isfinite().all()
    error, largest = float((actual.double().cpu() - exact).abs().max()), float(exact.abs().max())
    assert error <= times * eps * largest


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_prefill_and_decode_continue_each_other(implementation, heads, biased, dtype, device, randn):
    """A prompt in two chunks, then decode steps: wrong taps at the seam or a stale state would show after it."""
    case = Case(randn, dtype, device, heads, biased=biased)
    xbc, dt = case.inputs(80)
    exact, memory = case.exact(xbc, dt)
    parts = []
    for start, stop in ((0, 5), (5, 76)):
        rows, packed = slice(start, stop), pack_chunks([(2, 0, start, stop - start)], device)
        parts.append(implementation.prefill(xbc[rows], dt[rows], case.state, packed, case.weights))
    for t in range(76, 80):
        where = ints([2], device), ints([t], device), ints([t + 1], device)
        parts.append(implementation.decode(xbc[t : t + 1], dt[t : t + 1], case.state, *where, case.weights))
    out = torch.cat(parts)
    assert out.dtype == dtype
    close(out, exact)
    # S stays in fp32, but its terms come from operands in the inputs' dtype.
    close(case.state.memory[2].to(dtype), memory)
    assert torch.equal(case.state.inputs[2, 79 % 4], xbc[79])


@pytest.mark.parametrize("rows", [16, 32])
def test_fewer_rows_than_a_tile_and_parts_of_a_head(rows, dtype, device, randn, monkeypatch):
    """As GPUs with little shared memory have them; programs of one head share its B and C."""
    change_table(monkeypatch, prefill_module, rows=((0, rows),), numbers=1024)
    change_table(monkeypatch, decode_module, numbers=512)
    case = Case(randn, dtype, device, HEADS[0])
    xbc, dt = case.inputs(86)
    exact, memory = case.exact(xbc, dt)
    packed = pack_chunks([(2, 0, 0, 85)], device)
    out = [Launchers("mamba2.prefill").prefill(xbc[:85], dt[:85], case.state, packed, case.weights)]
    where = ints([2], device), ints([85], device), ints([86], device)
    out.append(Launchers("mamba2.decode").decode(xbc[85:], dt[85:], case.state, *where, case.weights))
    close(torch.cat(out), exact)
    close(case.state.memory[2].to(dtype), memory)
    assert torch.equal(case.state.inputs[2, 85 % 4], xbc[85])


def test_packed_chunks_of_any_lengths(implementation, dtype, device, randn):
    """Chunks that start and continue, shorter than the convolution and longer than a tile, with padding between."""
    case = Case(randn, dtype, device, HEADS[0], slots=9)
    # Slot, tokens before the chunk, tokens of the chunk.
    plan = [(7, 0, 1), (0, 70, 2), (3, 0, 64), (5, 2, 65), (1, 0, 130), (8, 64, 3)]
    sequences = {slot: case.inputs(before + count) for slot, before, count in plan}
    for slot, before, _ in plan:
        if before:
            packed = pack_chunks([(slot, 0, 0, before)], device)
            implementation.prefill(*(x[:before] for x in sequences[slot]), case.state, packed, case.weights)
    untouched = case.copy()
    first, rows, chunks = 3, [case.inputs(3)], []
    for slot, before, count in plan:
        chunks.append((slot, first, before, count))
        rows.append([x[before:] for x in sequences[slot]])
        first += count
    chunks.insert(2, (0, 0, 0, 0))
    rows.append(case.inputs(11))
    packed = pack_chunks(chunks, device, tiles=max_tiles(first, len(chunks)))
    assert len(packed.tiles) >= sum(-(-count // TILE_ROWS) for *_, count in chunks)
    out = implementation.prefill(
        *(torch.cat(parts) for parts in zip(*rows, strict=True)), case.state, packed, case.weights
    )
    for slot, row, before, count in (chunk for chunk in chunks if chunk[3]):
        exact, memory = case.exact(*sequences[slot])
        close(out[row : row + count], exact[before:])
        close(case.state.memory[slot].to(dtype), memory)
    for slot in (2, 4, 6):
        for part, same in zip(case.state, untouched, strict=True):
            torch.testing.assert_close(part[slot], same[slot], rtol=0, atol=0, equal_nan=True)


def test_rows_that_are_not_live_leave_their_state(implementation, device, randn):
    """A graph replays all rows: one whose sequence has ended must not touch the slot, another may own it by then."""
    case = Case(randn, torch.float16, device, HEADS[0], slots=5)
    packed = pack_chunks([(slot, 6 * slot, 0, 6) for slot in range(5)], device)
    implementation.prefill(*case.inputs(30), case.state, packed, case.weights)
    before = case.copy()
    # Every third number, as in a table of fields.
    table = ints([[3, 6, 7], [0, 6, 6], [1, 0, 1], [4, 9, 0]], device)
    implementation.decode(*case.inputs(4), case.state, *table.t(), case.weights)
    for slot, changes in ((0, False), (1, True), (2, False), (3, True), (4, False)):
        for part, same in zip(case.state, before, strict=True):
            assert torch.equal(part[slot], same[slot]) != changes


def test_a_slot_begins_with_zeros_at_position_0(implementation, dtype, device, randn):
    """The slot's last sequence left its state, NaN even: neither a first chunk nor a first decode may read it."""
    case = Case(randn, dtype, device, HEADS[1])
    xbc, dt = case.inputs(1)
    where = ints([1], device), ints([0], device), ints([1], device)
    decoded = implementation.decode(xbc, dt, case.state, *where, case.weights)
    prefilled = implementation.prefill(xbc, dt, case.state, pack_chunks([(2, 0, 0, 1)], device), case.weights)
    exact, _ = case.exact(xbc, dt)
    close(decoded, exact)
    close(prefilled, exact)


def test_fast_forgetting(implementation, dtype, device, randn):
    """Decays of e^-50 a token: differences of their sums overflow on the masked side."""
    case = Case(randn, dtype, device, HEADS[0])
    case.weights = case.weights._replace(log_rate=torch.full((4,), 4.0, device=device))
    xbc, dt = case.inputs(100)
    out = implementation.prefill(xbc, dt, case.state, pack_chunks([(0, 0, 0, 100)], device), case.weights)
    exact, _ = case.exact(xbc, dt)
    close(out, exact)


def test_slow_forgetting_adds_up(implementation, device, randn):
    """softplus of -12 is 6e-6: rounded with the 1 of its logarithm it is off by a hundredth, in every token."""
    case = Case(randn, torch.float32, device, HEADS[1])
    high, none = (torch.full((2,), value, device=device) for value in (4.0, 0.0))
    case.weights = case.weights._replace(log_rate=high, dt_bias=none)
    xbc, dt = case.inputs(1500)
    # What is written within three tokens is forgotten in those that follow.
    dt = torch.where(torch.arange(1500, device=device)[:, None] < 3, dt, torch.full_like(dt, -12))
    implementation.prefill(xbc, dt, case.state, pack_chunks([(0, 0, 0, 1500)], device), case.weights)
    _, memory = case.exact(xbc, dt)
    # 1500 products are rounded one after the other.
    close(case.state.memory[0], memory, times=16)


@pytest.mark.parametrize("taps", [2, 3])
def test_other_lengths_of_the_convolution(implementation, taps, device, randn):
    case = Case(randn, torch.float32, device, HEADS[1], taps=taps)
    xbc, dt = case.inputs(9)
    exact, _ = case.exact(xbc, dt)
    out = [implementation.prefill(xbc[:7], dt[:7], case.state, pack_chunks([(1, 0, 0, 7)], device), case.weights)]
    for t in (7, 8):
        where = ints([1], device), ints([t], device), ints([t + 1], device)
        out.append(implementation.decode(xbc[t : t + 1], dt[t : t + 1], case.state, *where, case.weights))
    close(torch.cat(out), exact)


def test_bits_of_a_sequence_do_not_depend_on_its_neighbours(implementation, dtype, device, randn):
    case = Case(randn, dtype, device, HEADS[0], slots=3)
    xbc, dt = case.inputs(100)
    together, alone = case.copy(), case.copy()
    packed = pack_chunks([(0, 0, 0, 3), (1, 3, 0, 70), (2, 73, 0, 27)], device)
    out = implementation.prefill(xbc, dt, together, packed, case.weights)
    rows = slice(3, 73)
    same = implementation.prefill(xbc[rows], dt[rows], alone, pack_chunks([(0, 0, 0, 70)], device), case.weights)
    assert torch.equal(out[rows], same)
    assert torch.equal(together.memory[1], alone.memory[0])
    slots, positions = ints([2, 1], device), ints([27, 70], device)
    two = implementation.decode(xbc[:2], dt[:2], together, slots, positions, positions + 1, case.weights)
    one = implementation.decode(xbc[1:2], dt[1:2], alone, slots[:1] * 0, positions[1:], positions[1:] + 1, case.weights)
    assert torch.equal(two[1:], one)


@pytest.mark.thorough
def test_chunks_that_end_with_a_tile_change_no_bit(dtype, device, randn, monkeypatch):
    """With ``--batch-invariant``: from another place on, other tokens make up the products."""
    if device == "cpu":
        add_up_exactly(monkeypatch)
    kernel, tokens = Launchers("mamba2.prefill"), 2 * TILE_ROWS + 9
    case = Case(randn, dtype, device, (2, 16, 1, 16))
    inputs = case.inputs(tokens)

    def run(*cuts):
        state, outs = case.copy(), []
        for start, stop in pairwise((0, *cuts, tokens)):
            packed = pack_chunks([(0, 0, start, stop - start)], device)
            outs.append(kernel.prefill(*(each[start:stop] for each in inputs), state, packed, case.weights))
        return torch.cat(outs), state.memory[0]

    whole = run()
    assert all(map(torch.equal, run(TILE_ROWS), whole)) and all(map(torch.equal, run(2 * TILE_ROWS), whole))
    assert not all(map(torch.equal, run(TILE_ROWS - 1), whole))


@pytest.mark.usefixtures("threads")
def test_bits_on_a_cpu_do_not_depend_on_chunks(dtype, randn):
    """A completion must not depend on how its prompt was divided: here even decode steps give a chunk's bits."""
    case = Case(randn, dtype, "cpu", (4, 16, 2, 24))
    xbc, dt = case.inputs(60)
    whole, chunked = case.copy(), case.copy()
    out = reference.prefill(xbc, dt, whole, pack_chunks([(0, 0, 0, 60)]), case.weights)
    parts = [
        reference.prefill(
            xbc[start:stop], dt[start:stop], chunked, pack_chunks([(0, 0, start, stop - start)]), case.weights
        )
        for start, stop in pairwise([0, 1, 3, 17, 50])
    ]
    for t in range(50, 60):
        where = ints([0], "cpu"), ints([t], "cpu"), ints([t + 1], "cpu")
        parts.append(reference.decode(xbc[t : t + 1], dt[t : t + 1], chunked, *where, case.weights))
    assert torch.equal(torch.cat(parts), out)
    assert torch.equal(chunked.memory[0], whole.memory[0])


@pytest.mark.parametrize(("tokens", "groups", "size"), [(1, 1, 16), (70, 3, 40), (5, 1, 640)])
@pytest.mark.parametrize("normed", [True, False])
def test_gate_norm(implementation, tokens, groups, size, normed, dtype, device, randn, assert_close):
    """The gate is a view of the wide projection's output; a norm over all groups together is another one."""
    x = randn(tokens, groups * size, dtype=dtype).to(device)
    weight = randn(groups * size, dtype=dtype).to(device) if normed else None
    gate = randn(tokens, groups * size + 8, dtype=dtype).to(device)[:, 4:-4]
    out = implementation.gate_norm(x, gate, weight, groups, EPS)
    exact = x.double() * gate.double() * gate.double().sigmoid()
    if normed:
        by_group = exact.unflatten(1, (groups, size))
        exact = (by_group / (by_group.square().mean(-1, keepdim=True) + EPS).sqrt()).flatten(1) * weight.double()
    assert out.dtype == dtype
    assert_close(out, exact)


@pytest.mark.usefixtures("threads")
def test_a_rows_gate_norm_does_not_depend_on_its_neighbours(dtype, randn):
    """PyTorch's own SiLU gives other bits at the end of a tensor."""
    x, gate, weight = randn(300, 72, dtype=dtype), randn(300, 72, dtype=dtype), randn(72, dtype=dtype)
    out = reference.gate_norm(x, gate, weight, 3, EPS)
    for rows in (slice(0, 1), slice(299, 300), slice(5, 68)):
        assert torch.equal(reference.gate_norm(x[rows], gate[rows], weight, 3, EPS), out[rows])


@pytest.mark.gpu
def test_steps_in_a_graph(randn):
    """Replays with other chunks, slots and positions in the same tensors: nothing is read on the host."""
    decode, prefill = (getattr(Launchers(f"mamba2.{name}"), name) for name in ("decode", "prefill"))

    case = Case(randn, torch.bfloat16, "cuda", (4, 64, 2, 64), slots=4)
    xbc, dt = case.inputs(200)
    packed = pack_chunks([(0, 0, 0, 100), (1, 100, 0, 100)], "cuda", tiles=max_tiles(200, 2))
    fields = ints([[0, 1], [100, 100], [101, 101]], "cuda")
    token = [x[:2].clone() for x in (xbc, dt)]
    for _ in range(2):
        prefill(xbc, dt, case.state, packed, case.weights)
        torch.cuda.synchronize()
        decode(*token, case.state, *fields, case.weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill(xbc, dt, case.state, packed, case.weights)
        # As in a model, another kernel runs between two that use the same states.
        token[0].add_(0)
        decoded = decode(*token, case.state, *fields, case.weights)
    other = pack_chunks([(3, 0, 0, 70), (2, 70, 0, 130)], "cuda", tiles=len(packed.tiles))
    for part, new in zip(packed, other, strict=True):
        part.copy_(new)
    fields.copy_(ints([[2, 3], [130, 70], [131, 71]], "cuda"))
    graph.replay()
    expected = case.copy()
    same = prefill(xbc, dt, expected, other, case.weights)
    torch.cuda.synchronize()
    assert torch.equal(decode(*token, expected, *fields, case.weights), decoded)
    assert torch.equal(same, out)
