"""The gated delta rule: decode steps and packed chunks against the recurrence in float64, one token after the other."""

from itertools import pairwise

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.chunks import TILE_ROWS, max_tiles, pack_chunks
from rosebatch_kernels.gated_delta import prefill as prefill_module
from rosebatch_kernels.gated_delta import reference
from rosebatch_kernels.gated_delta.layout import DeltaState, DeltaWeights
from tests.helpers.interpreter import add_up_exactly
from tests.helpers.sizes import change_table

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

EPS = 1e-6
# Key heads, value heads, key size, value size: none a power of two, equal heads, a group of three, a real model's.
HEADS = [(1, 2, 24, 40), (2, 2, 16, 16), (1, 3, 20, 8), (1, 2, 128, 128)]


@pytest.fixture(params=["reference", "kernel"])
def implementation(request):
    """Names of the three operators in either."""
    if request.param == "reference":
        return reference

    def settled(name):
        """A decode step reads S while the kernel in front still runs: in a model, that one has not written it."""
        function = getattr(Launchers(f"gated_delta.{name}"), name)

        def run(x, *args):
            out = function(x, *args)
            if x.is_cuda:
                torch.cuda.synchronize()
            return out

        return staticmethod(run)

    return type("kernel", (), {name: settled(name) for name in NAMES})


NAMES = ("decode", "prefill", "gated_norm")


class Case:
    """A layer, its states, and the inputs of sequences; ``exact`` is what one token after the other gives.

    With ``by_channel``, each channel of a key has a decay of its own.
    """

    def __init__(self, randn, dtype, device, heads, slots=4, taps=4, biased=True, max_beta=1.0, by_channel=False):
        self.heads, self.dtype, self.device, self.randn = heads, dtype, device, randn
        key_heads, value_heads, key_dim, value_dim = heads
        self.channels = 2 * key_heads * key_dim + value_heads * value_dim
        # A rate that forgets half within a few tokens, and one that hardly forgets.
        log_rate = torch.linspace(-4, 0.5, value_heads)
        bias = randn(self.channels, dtype=dtype).to(device) * 0.1 if biased else None
        conv = randn(self.channels, taps, dtype=dtype).to(device) * 0.5
        self.decays = value_heads * (key_dim if by_channel else 1)
        self.weights = DeltaWeights(conv, bias, log_rate.to(device), randn(self.decays).to(device), max_beta)
        inputs = torch.full((slots, taps, self.channels), float("nan"), dtype=dtype, device=device)
        memory = torch.full((slots, value_heads, key_dim, value_dim), float("nan"), device=device)
        self.state = DeltaState(inputs, memory)

    def inputs(self, tokens):
        """qkv, a and b of packed tokens: columns of one wide projection."""
        sizes = self.channels, self.decays, self.heads[1], 5
        wide = self.randn(tokens, sum(sizes), dtype=self.dtype).to(self.device)
        return wide.split(sizes, 1)[:3]

    def exact(self, qkv, a, b):
        """Of a whole sequence from its first token: outputs and S."""
        key_heads, value_heads, key_dim, value_dim = self.heads
        *parts, max_beta = self.weights
        weights = DeltaWeights(*(None if part is None else part.double().cpu() for part in parts), max_beta)
        qkv, a, b = qkv.double().cpu(), a.double().cpu(), b.double().cpu()
        taps = weights.conv.shape[1]
        padded = torch.cat((torch.zeros(taps - 1, self.channels, dtype=torch.float64), qkv))
        mixed = sum(padded[i : i + len(qkv)] * weights.conv[:, i] for i in range(taps))
        mixed = torch.nn.functional.silu(mixed if weights.conv_bias is None else mixed + weights.conv_bias)
        mixed = mixed.to(self.dtype).double()
        q, k, v = mixed.split([key_heads * key_dim, key_heads * key_dim, value_heads * value_dim], 1)
        steps = torch.nn.functional.softplus(a + weights.dt_bias).unflatten(1, (value_heads, -1))
        decay = -weights.log_rate.exp()[:, None] * steps
        memory = torch.zeros(value_heads, key_dim, value_dim, dtype=torch.float64)
        out = torch.empty(len(qkv), value_heads, value_dim, dtype=torch.float64)
        for t in range(len(qkv)):
            for head in range(value_heads):
                group = head // (value_heads // key_heads)
                qt, kt = (x[t, group * key_dim : (group + 1) * key_dim] for x in (q, k))
                qt, kt = qt / (qt.square().sum() + EPS).sqrt() / key_dim**0.5, kt / (kt.square().sum() + EPS).sqrt()
                s = memory[head] * decay[t, head].exp()[:, None]
                change = (v[t, head * value_dim : (head + 1) * value_dim] - kt @ s) * b[t, head].sigmoid() * max_beta
                memory[head] = s + kt[:, None] * change
                out[t, head] = qt @ memory[head]
        return out.flatten(1), memory

    def copy(self):
        return DeltaState(*(part.clone() for part in self.state))


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def close(actual, exact, times=1):
    """An error of a few roundings of the largest value: rounded operands are summed before small results appear."""
    eps = {torch.float32: 2.0**-17, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-4}[actual.dtype]
    assert actual.isfinite().all()
    error, largest = float((actual.double().cpu() - exact).abs().max()), float(exact.abs().max())
    assert error <= times * eps * largest


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("biased", "max_beta"), [(True, 1.0), (False, 2.0)])
def test_prefill_and_decode_continue_each_other(implementation, heads, biased, max_beta, dtype, device, randn):
    """A prompt in two chunks, then decode steps: wrong taps at the seam or a stale state would show after it."""
    case = Case(randn, dtype, device, heads, biased=biased, max_beta=max_beta)
    qkv, a, b = case.inputs(80)
    exact, memory = case.exact(qkv, a, b)
    parts = []
    for start, stop in ((0, 5), (5, 76)):
        rows = slice(start, stop)
        packed = pack_chunks([(2, 0, start, stop - start)], device)
        parts.append(implementation.prefill(qkv[rows], a[rows], b[rows], case.state, packed, case.weights))
    for t in range(76, 80):
        where = ints([2], device), ints([t], device), ints([t + 1], device)
        parts.append(implementation.decode(*(x[t : t + 1] for x in (qkv, a, b)), case.state, *where, case.weights))
    out = torch.cat(parts)
    assert out.dtype == dtype
    close(out, exact)
    # S stays in fp32, but its terms come from operands in the inputs' dtype.
    close(case.state.memory[2].to(dtype), memory)
    assert torch.equal(case.state.inputs[2, 79 % 4], qkv[79])


@pytest.mark.parametrize("rows", [16, 32])
def test_systems_smaller_than_a_tile(rows, dtype, device, randn, monkeypatch):
    """As GPUs with little shared memory have them; the last ones of a tile may have no tokens."""
    change_table(monkeypatch, prefill_module, rows=((0, rows),))
    case = Case(randn, dtype, device, HEADS[0])
    qkv, a, b = case.inputs(85)
    exact, memory = case.exact(qkv, a, b)
    packed = pack_chunks([(2, 0, 0, 85)], device)
    close(Launchers("gated_delta.prefill").prefill(qkv, a, b, case.state, packed, case.weights), exact)
    close(case.state.memory[2].to(dtype), memory)


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
    inputs = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    out = implementation.prefill(*inputs, case.state, packed, case.weights)
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
    qkv, a, b = case.inputs(1)
    where = ints([1], device), ints([0], device), ints([1], device)
    decoded = implementation.decode(qkv, a, b, case.state, *where, case.weights)
    prefilled = implementation.prefill(qkv, a, b, case.state, pack_chunks([(2, 0, 0, 1)], device), case.weights)
    exact, _ = case.exact(qkv, a, b)
    close(decoded, exact)
    close(prefilled, exact)


def test_equal_keys(implementation, dtype, device, randn):
    """One token again and again, written whole and never forgotten: a series for the triangular inverse explodes."""
    case = Case(randn, dtype, device, HEADS[0])
    qkv, a, b = (x[:1].repeat(128, 1) for x in case.inputs(1))
    a, b = a - 30, b + 10
    out = implementation.prefill(qkv, a, b, case.state, pack_chunks([(0, 0, 0, 128)], device), case.weights)
    exact, memory = case.exact(qkv, a, b)
    close(out, exact)
    close(case.state.memory[0].to(dtype), memory)


def test_equal_keys_that_turn_a_state_around(implementation, device, randn):
    """Written twice, never forgotten: an eigenvalue of -1. A series explodes here too, and no error is forgotten.

    In 16 bits too little is left of it: the inverse is full, and all that is rounded adds up.
    """
    case = Case(randn, torch.float32, device, HEADS[0], max_beta=2.0)
    qkv, a, b = (x[:1].repeat(128, 1) for x in case.inputs(1))
    a, b = a - 30, b + 10
    out = implementation.prefill(qkv, a, b, case.state, pack_chunks([(0, 0, 0, 128)], device), case.weights)
    exact, memory = case.exact(qkv, a, b)
    # 128 products are rounded one after the other.
    close(out, exact, times=16)
    close(case.state.memory[0], memory, times=16)


def test_fast_forgetting(implementation, dtype, device, randn):
    """Decays of e^-200 a token: differences of their sums overflow on the masked side."""
    case = Case(randn, dtype, device, HEADS[0])
    qkv, a, b = case.inputs(100)
    a = a + 200
    out = implementation.prefill(qkv, a, b, case.state, pack_chunks([(0, 0, 0, 100)], device), case.weights)
    exact, _ = case.exact(qkv, a, b)
    close(out, exact)


def test_slow_forgetting_adds_up(implementation, device, randn):
    """softplus of -12 is 6e-6: rounded with the 1 of its logarithm it is off by a hundredth, in every token."""
    case = Case(randn, torch.float32, device, HEADS[1])
    weights = case.weights._replace(
        log_rate=torch.full((2,), 4.0, device=device), dt_bias=torch.zeros(2, device=device)
    )
    case.weights = weights
    qkv, a, b = case.inputs(1500)
    a, b = torch.full_like(a, -12), torch.where(torch.arange(1500, device=device)[:, None] < 3, b, b - 100)
    implementation.prefill(qkv, a, b, case.state, pack_chunks([(0, 0, 0, 1500)], device), weights)
    _, memory = case.exact(qkv, a, b)
    # 1500 products are rounded one after the other.
    close(case.state.memory[0], memory, times=16)


@pytest.mark.parametrize("taps", [2, 3])
def test_other_lengths_of_the_convolution(implementation, taps, device, randn):
    case = Case(randn, torch.float32, device, HEADS[1], taps=taps)
    qkv, a, b = case.inputs(9)
    exact, _ = case.exact(qkv, a, b)
    out = [implementation.prefill(qkv[:7], a[:7], b[:7], case.state, pack_chunks([(1, 0, 0, 7)], device), case.weights)]
    for t in (7, 8):
        where = ints([1], device), ints([t], device), ints([t + 1], device)
        out.append(implementation.decode(*(x[t : t + 1] for x in (qkv, a, b)), case.state, *where, case.weights))
    close(torch.cat(out), exact)


def test_bits_of_a_sequence_do_not_depend_on_its_neighbours(implementation, dtype, device, randn):
    case = Case(randn, dtype, device, HEADS[0], slots=3)
    qkv, a, b = case.inputs(100)
    together, alone = case.copy(), case.copy()
    packed = pack_chunks([(0, 0, 0, 3), (1, 3, 0, 70), (2, 73, 0, 27)], device)
    out = implementation.prefill(qkv, a, b, together, packed, case.weights)
    rows = slice(3, 73)
    same = implementation.prefill(
        qkv[rows], a[rows], b[rows], alone, pack_chunks([(0, 0, 0, 70)], device), case.weights
    )
    assert torch.equal(out[rows], same)
    assert torch.equal(together.memory[1], alone.memory[0])
    slots, positions = ints([2, 1], device), ints([27, 70], device)
    two = implementation.decode(qkv[:2], a[:2], b[:2], together, slots, positions, positions + 1, case.weights)
    one = implementation.decode(
        qkv[1:2], a[1:2], b[1:2], alone, slots[:1] * 0, positions[1:], positions[1:] + 1, case.weights
    )
    assert torch.equal(two[1:], one)


@pytest.mark.thorough
def test_chunks_that_end_with_a_tile_change_no_bit(dtype, device, randn, monkeypatch):
    """With ``--batch-invariant``: from another place on, other tokens make up the triangular systems."""
    if device == "cpu":
        add_up_exactly(monkeypatch)
    kernel, tokens = Launchers("gated_delta.prefill"), 2 * TILE_ROWS + 9
    case = Case(randn, dtype, device, (1, 2, 16, 16))
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
    case = Case(randn, dtype, "cpu", (2, 4, 16, 24))
    qkv, a, b = case.inputs(60)
    whole, chunked = case.copy(), case.copy()
    out = reference.prefill(qkv, a, b, whole, pack_chunks([(0, 0, 0, 60)]), case.weights)
    cuts = [0, 1, 3, 17, 50, 60]
    parts = [
        reference.prefill(
            qkv[start:stop],
            a[start:stop],
            b[start:stop],
            chunked,
            pack_chunks([(0, 0, start, stop - start)]),
            case.weights,
        )
        for start, stop in pairwise(cuts[:-1])
    ]
    for t in range(50, 60):
        where = ints([0], "cpu"), ints([t], "cpu"), ints([t + 1], "cpu")
        parts.append(reference.decode(*(x[t : t + 1] for x in (qkv, a, b)), chunked, *where, case.weights))
    assert torch.equal(torch.cat(parts), out)
    assert torch.equal(chunked.memory[0], whole.memory[0])


@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 16), (70, 3, 40), (5, 2, 128)])
def test_gated_norm(implementation, tokens, heads, size, dtype, device, randn, assert_close):
    """The gate is a view of the wide projection's output."""
    x, weight = randn(tokens, heads, size, dtype=dtype).to(device), randn(size, dtype=dtype).to(device)
    wide = randn(tokens, heads * size + 8, dtype=dtype).to(device)
    gate = wide[:, 4:-4].view(tokens, heads, size)
    out = implementation.gated_norm(x, gate, weight, EPS)
    exact, opening = x.double(), gate.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert out.dtype == dtype
    assert_close(out, exact * opening * opening.sigmoid())


@pytest.mark.usefixtures("threads")
def test_a_rows_gated_norm_does_not_depend_on_its_neighbours(dtype, randn):
    """PyTorch's own SiLU gives other bits at the end of a tensor."""
    x, gate, weight = randn(300, 3, 24, dtype=dtype), randn(300, 3, 24, dtype=dtype), randn(24, dtype=dtype)
    out = reference.gated_norm(x, gate, weight, EPS)
    for rows in (slice(0, 1), slice(299, 300), slice(5, 68)):
        assert torch.equal(reference.gated_norm(x[rows], gate[rows], weight, EPS), out[rows])


@pytest.mark.gpu
def test_steps_in_a_graph(randn):
    """Replays with other chunks, slots and positions in the same tensors: nothing is read on the host."""
    decode, prefill = (getattr(Launchers(f"gated_delta.{name}"), name) for name in ("decode", "prefill"))

    case = Case(randn, torch.bfloat16, "cuda", (2, 4, 64, 64), slots=4)
    qkv, a, b = case.inputs(200)
    packed = pack_chunks([(0, 0, 0, 100), (1, 100, 0, 100)], "cuda", tiles=max_tiles(200, 2))
    fields = ints([[0, 1], [100, 100], [101, 101]], "cuda")
    token = [x[:2].clone() for x in (qkv, a, b)]
    for _ in range(2):
        prefill(qkv, a, b, case.state, packed, case.weights)
        torch.cuda.synchronize()
        decode(*token, case.state, *fields, case.weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill(qkv, a, b, case.state, packed, case.weights)
        # As in a model, another kernel runs between two that use the same states.
        token[0].add_(0)
        decoded = decode(*token, case.state, *fields, case.weights)
    other = pack_chunks([(3, 0, 0, 70), (2, 70, 0, 130)], "cuda", tiles=len(packed.tiles))
    for part, new in zip(packed, other, strict=True):
        part.copy_(new)
    fields.copy_(ints([[2, 3], [130, 70], [131, 71]], "cuda"))
    graph.replay()
    expected = Case.copy(case)
    same = prefill(qkv, a, b, expected, other, case.weights)
    torch.cuda.synchronize()
    assert torch.equal(decode(*token, expected, *fields, case.weights), decoded)
    assert torch.equal(same, out)
