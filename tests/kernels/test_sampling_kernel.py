"""The sampling kernel against the reference in float64, and its random numbers against philox."""

import math
import random
from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.tokens import NOT_FINITE
from rosebatch_kernels.sampling import kernel as module
from rosebatch_kernels.sampling import philox, reference
from rosebatch_kernels.sampling.threshold import uniform
from tests.helpers.sizes import change_table

kernel = Launchers("sampling.kernel")

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

# A token may differ where a border stands this close to the number that decides, relative to the sum: fp32 sums.
CLOSE = 1e-5
# Temperature, top-k, top-p and min-p of rows that take each way through the kernel.
MODES = [
    (0.0, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.1),
    (1.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 50, 1.0, 0.0),
    (2.0, 50, 0.9, 0.0),
    (1.0, 10**9, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.7, 0, 0.01, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.3, 0, 0.95, 0.02),
    (2.0, 200, 0.6, 0.1),
    (2.0, 200, 0.99, 0.3),
]


def parameters(modes, seed=0):
    """Arguments of ``sample_rows`` behind the logits, each row with its own seed and position."""
    numbers = random.Random(seed)
    temperature, top_k, top_p, min_p = zip(*modes, strict=True)
    seeds = [[numbers.randrange(-(2**31), 2**31) for _ in range(2)] for _ in modes]
    positions = [numbers.randrange(2**20) for _ in modes]
    reals = [torch.tensor(values, dtype=torch.float32) for values in (temperature, top_p, min_p)]
    integers = [torch.tensor(values, dtype=torch.int32) for values in (top_k, seeds, positions)]
    return [reals[0], integers[0], *reals[1:], *integers[1:]]


def possible(logits, arguments):
    """The tokens that each row may give: the reference's, with every number a little larger and smaller."""
    temperature, top_k, top_p, min_p, seeds, positions = arguments
    results = []
    for p, share, shift in product((1, 1 - CLOSE, 1 + CLOSE), repeat=3):

        def number(seed, position, shift=shift):
            return min(max(philox.uniform(seed, position) + shift - 1, 1e-12), 1 - 1e-12)

        # At 1, top-p keeps all and min-p what equals the likeliest, whatever the rounding.
        ps, shares = torch.where(top_p < 1, top_p * p, 1), torch.where(min_p < 1, min_p * share, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "uniform_number", number)
            results.append(reference.sample_rows(logits, temperature, top_k, ps, shares, seeds, positions).tolist())
    return [set(tokens) for tokens in zip(*results, strict=True)]


def check(logits, arguments, device):
    """Sample rows with the kernel and hold them against the reference; gives back the tokens."""
    expected = possible(logits, arguments)
    # Hardly ever may it be more than one, else nothing is tested.
    assert sum(len(tokens) == 1 for tokens in expected) >= 0.8 * len(expected)
    tokens = sample(logits, arguments, device)
    wrong = [(i, t, e) for i, (t, e) in enumerate(zip(tokens, expected, strict=True)) if t not in e]
    assert not wrong, "row, token, expected"
    return tokens


def sample(logits, arguments, device):
    result = kernel.sample_rows(logits.to(device), *(a.to(device) for a in arguments))
    assert result.dtype == torch.int32
    return result.tolist()


@pytest.fixture
def little_room(monkeypatch):
    """Segments, tiles and a list so small that logits of the tests' size overflow them."""
    change_table(monkeypatch, module, segment=8, room=64, many=128, few=32)


@pytest.mark.parametrize("vocab", [1, 1000])
def test_all_modes_in_one_call(vocab, dtype, device, randn):
    check(randn(len(MODES), vocab, dtype=dtype) * 3, parameters(MODES, vocab), device)


def test_ties(dtype, device, randn):
    """Five values in all: at every border of a filter stand tokens that tie, and the likeliest ones do."""
    logits = randn(len(MODES), 63, dtype=dtype).round().clamp(-2, 2)
    tokens = check(logits, parameters(MODES), device)
    assert tokens[0] == logits[0].tolist().index(2.0)


def test_minus_infinity(device, randn):
    """Masked tokens, among them whole segments, more than top-k leaves over and both ends of a row."""
    modes = MODES[2::2]
    logits = randn(len(modes), 1000)
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(0)) < 0.97] = -math.inf
    logits[:, :300], logits[:, 700:] = -math.inf, -math.inf
    tokens = check(logits, parameters(modes), device)
    assert all(math.isfinite(logits[row, token]) for row, token in enumerate(tokens))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("place", [0, 170, 299])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_give_no_token(value, place, device, randn):
    """A maximum skips NaN: such rows gave tokens like any other, and empty texts with exit code 0."""
    logits = randn(2 * len(MODES), 300)
    logits[::2, place] = value
    tokens = sample(logits, parameters([mode for mode in MODES for _ in range(2)]), device)
    assert tokens[::2] == [NOT_FINITE] * len(MODES)
    assert all(0 <= token < 300 for token in tokens[1::2])


def test_nothing_but_minus_infinity_gives_no_token(device):
    assert sample(torch.full((len(MODES), 300), -math.inf), parameters(MODES), device) == [NOT_FINITE] * len(MODES)


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("steepness", [0.3, 1.5])
def test_more_candidates_than_there_is_room_for(steepness, dtype, device, randn):
    """Rows that the small tile holds, that the list holds, and that are searched themselves."""
    modes = [(1.0, 0, 0.9, 0.0), (1.0, 60, 1.0, 0.0), (1.5, 4, 0.7, 0.0), (2.0, 300, 0.95, 0.02)]
    modes += [(2.0, 60, 1.0, 0.0), (2.0, 45, 1.0, 0.0)]
    logits = randn(len(modes), 700, dtype=dtype) * steepness
    check(logits, parameters(modes), device)


@pytest.mark.usefixtures("little_room")
def test_equal_logits(device):
    """All reach every bound, and all or none tie at it."""
    modes = [(1.0, 7, 1.0, 0.0), (1.0, 0, 0.3, 0.0), (1.0, 9, 0.999, 1.0), (1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0)]
    tokens = check(torch.full((len(modes), 1000), -3.5), parameters(modes, 1), device)
    assert tokens[-1] == 0
    assert len(set(tokens)) == len(tokens)


def test_large_vocabulary(device, randn):
    """With the sizes that are in use, and one row so flat that the list has no room."""
    modes = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 50, 0.9, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 0.999, 0.0)]
    logits = randn(len(modes), 50257) * 3
    logits[-1] *= 0.2
    check(logits.half(), parameters(modes), device)


def test_extreme_parameters(device, randn):
    """Near 0 and infinite temperatures, a top-p that keeps the likeliest alone, a k of the vocabulary and above."""
    likeliest = [(1e-46, 0, 1.0, 0.0), (1e-30, 0, 1.0, 0.0), (1e-4, 9, 0.9, 0.1), (1.0, 0, 1e-46, 0.0)]
    others = [(math.inf, 0, 1.0, 0.0), (1e30, 9, 0.9, 0.0), (1.0, 200, 1.0, 0.0), (1.0, 201, 0.99, 0.0)]
    logits = randn(8, 200)
    logits[4, ::2] = -math.inf
    tokens = check(logits, parameters(likeliest + others), device)
    assert tokens[:4] == logits[:4].argmax(-1).tolist()


@pytest.mark.parametrize(("start", "stride"), [(0, 1000), (1, 1000), (8, 1008), (0, 1001), (8, 1001)])
def test_rows_within_a_wider_tensor(start, stride, device, randn):
    """Aligned or not, what stands beside a row must not leak into it: it is larger than all of it."""
    modes = [MODES[0], MODES[2], MODES[5]]
    logits = randn(len(modes), 990).half()
    wide = torch.full((len(modes), stride), 100.0).half().to(device)
    inside = wide[:, start : start + 990]
    inside.copy_(logits)
    arguments = parameters(modes, 3)
    assert sample(inside, arguments, device) == check(logits, arguments, device)


@pytest.mark.xdist_group("large_memory")
def test_rows_beyond_int32_offsets(device, randn, far_apart):
    modes = [MODES[0], MODES[2], MODES[5]]
    logits, arguments = randn(3, 100).half(), parameters(modes)
    assert sample(far_apart(logits.to(device)), arguments, device) == check(logits, arguments, device)


@pytest.mark.parametrize("transposed", [False, True])
def test_parameters_in_one_state_matrix(transposed, device, randn):
    """Columns or rows of one int32 matrix, real numbers as their bits."""
    modes = MODES[::3]
    logits, arguments = randn(len(modes), 200), parameters(modes, 4)
    state = torch.full((len(modes), 11), -1, dtype=torch.int32)
    places = [1, 2, 4, 5, slice(7, 9), 9]
    for place, value in zip(places, arguments, strict=True):
        state[:, place] = value.view(torch.int32)
    state = (state.t().contiguous().t() if transposed else state).to(device)
    views = [state[:, place].view(a.dtype) for place, a in zip(places, arguments, strict=True)]
    assert sample(logits, views, device) == sample(logits, arguments, device)


def test_rows_do_not_touch_each_other(device, randn):
    """Alone and in another order: the same token, to the last bit of the sums."""
    order = [3, 0, 4, 2, 1]
    logits, arguments = randn(5, 301), parameters([MODES[i] for i in (0, 2, 5, 7, 9)], 5)
    together = sample(logits, arguments, device)
    assert sample(logits[order], [a[order] for a in arguments], device) == [together[i] for i in order]
    for i in range(5):
        assert sample(logits[i : i + 1], [a[i : i + 1] for a in arguments], device) == together[i : i + 1]


@pytest.mark.parametrize("mode", [(1.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.01)])
def test_frequencies_are_the_probabilities(mode, device):
    """One seed and many positions, as a completion draws them: chi-squared of 6 tokens, 5 degrees of freedom."""
    n = 60 if device == "cpu" else 20000
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0, 0.5, 1.5])
    temperature, top_k, top_p, min_p, seeds, _ = parameters([mode] * n)
    arguments = [temperature, top_k, top_p, min_p, seeds[:1].expand(n, -1), torch.arange(n, dtype=torch.int32)]
    counts = np.bincount(sample(logits.expand(n, -1), arguments, device), minlength=6)
    expected = logits.double().softmax(-1).numpy() * n
    # Less in all but one of ten thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 25.7


def test_no_rows(device):
    assert sample(torch.empty(0, 50), [a[:0] for a in parameters(MODES)], device) == []


@triton.jit
def _draw(seeds, positions, numbers):
    row = tl.program_id(0)
    low = tl.load(seeds + 2 * row).to(tl.uint32, bitcast=True)
    high = tl.load(seeds + 2 * row + 1).to(tl.uint32, bitcast=True)
    tl.store(numbers + row, uniform(low, high, tl.load(positions + row).to(tl.uint32, bitcast=True)))


def test_random_numbers_are_those_of_philox(device):
    """Bit for bit, with both halves of the seed and all of the position, also those that are negative as int32."""
    numbers = random.Random(6)
    seeds = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, *(numbers.getrandbits(64) for _ in range(30))]
    positions = [0, 1, 2**31 - 1, *(numbers.getrandbits(31) for _ in seeds[3:])]
    words = torch.tensor([[s & 0xFFFFFFFF, s >> 32] for s in seeds]).int().to(device)
    result = torch.empty(len(seeds), dtype=torch.float64, device=device)
    _draw[(len(seeds),)](words, torch.tensor(positions, dtype=torch.int32, device=device), result)
    assert result.tolist() == [philox.uniform(s, p) for s, p in zip(seeds, positions, strict=True)]


@pytest.mark.gpu
def test_one_graph_serves_all_parameters(randn):
    """Captured with greedy rows and replayed with others: nothing of a row's mode may be decided on the host."""
    logits = randn(len(MODES), 5000, dtype=torch.bfloat16).cuda()
    held = [a.cuda() for a in parameters([MODES[0]] * len(MODES))]
    kernel.sample_rows(logits, *held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = kernel.sample_rows(logits, *held)
    for seed in range(3):
        for place, value in zip(held, parameters(MODES, seed), strict=True):
            place.copy_(value)
        logits.copy_(randn(*logits.shape, dtype=torch.bfloat16))
        graph.replay()
        assert tokens.tolist() == kernel.sample_rows(logits, *held).tolist()
