"""Sampling against plain loops over the tokens, and the random numbers against published vectors."""

import math
import random
from collections import defaultdict

import numpy as np
import pytest
import torch

from rosebatch_kernels.common.tokens import NOT_FINITE
from rosebatch_kernels.sampling import reference, torch_sampling
from rosebatch_kernels.sampling.philox import philox, uniform

MASK = 0xFFFFFFFF
VOCABS = [1, 63, 1000, 5000]
# Of tokens with probabilities 0.1, 0.2, 0.1, 0.3, 0.2, 0.1.
TIES = [
    ({"top_k": 2}, [1, 3, 4]),
    ({"top_k": 3}, [1, 3, 4]),
    ({"top_k": 4}, [0, 1, 2, 3, 4, 5]),
    ({"top_p": 0.4}, [1, 3, 4]),
    ({"top_p": 0.69}, [1, 3, 4]),
    ({"top_p": 0.71}, [0, 1, 2, 3, 4, 5]),
    ({"min_p": 0.6}, [1, 3, 4]),
    # Top-p is of the three that top-k keeps, 0.7.
    ({"top_k": 2, "top_p": 0.42}, [3]),
    ({"top_k": 2, "top_p": 0.44}, [1, 3, 4]),
]
# A token may differ from the loop's only where a rounding error decides: this close, relative to the sum.
CLOSE = 1e-6


def weights_of(logits, temperature):
    """Unnormalised probabilities, the largest 1."""
    scaled = logits.astype(np.float64) / temperature
    return np.exp(scaled - scaled.max())


def pick(weights, ids, u):
    """The token at ``u`` of the sum, and whether a rounding error could make it another one."""
    total = sum(weights)
    passed = 0.0
    for weight, token in zip(weights, ids, strict=True):
        before, passed = passed, passed + weight
        if passed > u * total:
            near = min(passed - u * total, u * total - before if before else math.inf)
            return token, near < CLOSE * total
    raise AssertionError("the sum was never passed")


def naive_sample(logits, temperature, u):
    weights = weights_of(logits, temperature)
    return pick(weights.tolist(), range(len(weights)), u)


def naive_filtered(logits, temperature, u, top_k, top_p, min_p):
    """Top-k, then top-p of what is left, then min-p: the token, whether it is uncertain, how many were kept."""
    weights = weights_of(logits, temperature)
    ranked = sorted(logits, reverse=True)
    border = ranked[min(top_k or len(ranked), len(ranked)) - 1]
    ids = [i for i in range(len(logits)) if logits[i] >= border]
    total = sum(weights[i] for i in ids)
    # Tokens that tie are in or out together: what counts is the sum of the strictly likelier ones.
    allowed, before, uncertain = set(), 0.0, False
    ties = defaultdict(list)
    for i in ids:
        ties[logits[i]].append(i)
    for _, tied in sorted(ties.items(), reverse=True):
        if top_p < 1 and allowed:
            uncertain |= abs(before - top_p * total) < CLOSE * total
            if before >= top_p * total:
                break
        allowed.update(tied)
        before += sum(weights[i] for i in tied)
    uncertain |= any(abs(weights[i] - min_p) < CLOSE for i in allowed) and min_p not in (0, 1)
    kept = [i for i in sorted(allowed) if weights[i] >= min_p]
    token, near = pick([weights[i] for i in kept], kept, u)
    return token, uncertain or near, len(kept)


def test_greedy_takes_the_likeliest(dtype, randn):
    for vocab in VOCABS:
        logits = randn(63, vocab, dtype=dtype)
        expected = [max(range(vocab), key=lambda i, row=row: (row[i], -i)) for row in logits.tolist()]
        assert torch_sampling.greedy(logits).tolist() == expected


@pytest.mark.parametrize("vocab", [2, 63, 64, 1000, 49152])
def test_greedy_tie_takes_the_lowest_id(vocab, dtype):
    """Wherever the likeliest stand: vectorised code meets them in another order."""
    numbers = random.Random(vocab)
    for _ in range(20):
        tied = sorted(numbers.sample(range(vocab), k=min(vocab, numbers.randint(2, 5))))
        logits = torch.full((3, vocab), -1.0, dtype=dtype)
        logits[:, tied] = 2.5
        assert torch_sampling.greedy(logits).tolist() == [tied[0]] * 3
    assert torch_sampling.greedy(torch.zeros(2, vocab, dtype=dtype)).tolist() == [0, 0]


@pytest.mark.parametrize("vocab", VOCABS)
def test_sample_equals_the_loop(vocab, randn):
    numbers = random.Random(vocab)
    logits = randn(100, vocab) * 3
    temperature = [numbers.choice([0.3, 0.8, 1.0, 2.0]) for _ in range(100)]
    u = [numbers.random() for _ in range(100)]
    tokens = torch_sampling.sample(logits, torch.tensor(temperature), torch.tensor(u, dtype=torch.float64)).tolist()
    expected = [naive_sample(logits[i].numpy(), temperature[i], u[i]) for i in range(100)]
    certain = [i for i in range(100) if not expected[i][1]]
    assert len(certain) >= 90
    assert [tokens[i] for i in certain] == [expected[i][0] for i in certain]


@pytest.mark.parametrize("top_k", [0, 1, 2, 40, 1500])
@pytest.mark.parametrize("vocab", VOCABS)
def test_sample_filtered_equals_the_loop(vocab, top_k, randn):
    """Flat and steep rows together, so that in the large vocabulary some need more than the likeliest 1024."""
    rows, numbers = (80 if vocab < 5000 else 32), random.Random(vocab + top_k)
    logits = randn(rows, vocab) * 3
    # Every other row has many tokens that tie, as 16-bit logits do, also at the borders of the filters.
    logits[::2] = (logits[::2] * 4).round() / 4
    temperature = [numbers.choice([0.3, 0.8, 1.0, 2.0, 6.0]) for _ in range(rows)]
    top_p = [numbers.choice([1.0, 0.98, 0.9, 0.5, 0.01]) for _ in range(rows)]
    min_p = [numbers.choice([0.0, 0.0, 0.02, 0.5, 1.0]) for _ in range(rows)]
    u = [numbers.random() for _ in range(rows)]
    tokens = torch_sampling.sample_filtered(
        logits,
        torch.tensor(temperature),
        torch.tensor(u, dtype=torch.float64),
        top_k,
        torch.tensor(top_p),
        torch.tensor(min_p),
    ).tolist()
    expected = [
        naive_filtered(logits[i].numpy(), temperature[i], u[i], top_k, np.float32(top_p[i]), np.float32(min_p[i]))
        for i in range(rows)
    ]
    certain = [i for i in range(rows) if not expected[i][1]]
    assert len(certain) >= 0.8 * rows
    assert [tokens[i] for i in certain] == [expected[i][0] for i in certain]
    if vocab == 5000 and not top_k:
        kept = [count for _, _, count in expected]
        assert sum(count > 1024 for count in kept) > 5
        assert sum(count < 1024 for count in kept) > 5


def filtered(logits, u, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Sample one distribution with many numbers."""
    n = len(u)
    return torch_sampling.sample_filtered(
        torch.tensor([logits]).expand(n, -1),
        torch.full((n,), temperature),
        torch.tensor(u, dtype=torch.float64),
        top_k,
        torch.full((n,), top_p),
        torch.full((n,), min_p),
    ).tolist()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 1}, [3]),
        ({"top_k": 100}, [0, 1, 2, 3, 4]),
        # 0.4 falls short of 0.5, so the next one crosses it and is kept.
        ({"top_p": 0.5}, [1, 3]),
        ({"top_p": 0.3}, [3]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [0, 1, 3]),
        # The share is of the likeliest token, 0.4: 0.15 is 0.375 of it.
        ({"min_p": 0.3}, [0, 1, 3]),
        ({"min_p": 0.4}, [1, 3]),
        ({"min_p": 1.0}, [3]),
        # Top-p is of what top-k left, 0.7: 0.4 is 0.57 of it.
        ({"top_k": 2, "top_p": 0.55}, [3]),
        ({"top_k": 2, "top_p": 0.6}, [1, 3]),
        ({"top_k": 4, "top_p": 0.75, "min_p": 0.2}, [0, 1, 3]),
    ],
)
def test_filters_keep_these_tokens(options, kept):
    probabilities = [0.15, 0.3, 0.1, 0.4, 0.05]
    u = [(i + 0.5) / 400 for i in range(400)]
    tokens = filtered([math.log(p) for p in probabilities], u, **options)
    assert sorted(set(tokens)) == kept
    # What is left keeps its proportions.
    total = sum(probabilities[i] for i in kept)
    for i in kept:
        assert tokens.count(i) == pytest.approx(400 * probabilities[i] / total, abs=2)


def test_min_p_of_1_keeps_all_that_tie_for_the_likeliest():
    u = [(i + 0.5) / 100 for i in range(100)]
    assert sorted(set(filtered([0.0, 1.0, 1.0, -1.0], u, min_p=1.0))) == [1, 2]


def test_a_number_on_the_edge_belongs_to_the_next_token_with_any_probability():
    logits, half = torch.tensor([[0.0, -math.inf, 0.0]]), torch.tensor([0.5], dtype=torch.float64)
    assert torch_sampling.sample(logits, torch.ones(1), half).tolist() == [2]


def test_frequencies_are_the_probabilities():
    """4000 numbers one behind the other: every token must come as often as it is likely, to the count."""
    n, logits = 4000, [0.3 * (7 * i % 20) for i in range(20)]
    u = [(i + 0.5) / n for i in range(n)]
    for temperature in (0.5, 1.0, 3.0):
        weights = weights_of(np.array(logits), temperature)
        expected = weights / weights.sum() * n
        temperatures = torch.full((n,), temperature)
        plain = torch_sampling.sample(
            torch.tensor([logits]).expand(n, -1), temperatures, torch.tensor(u).double()
        ).tolist()
        ranked = filtered(logits, u, temperature=temperature, top_k=20)
        for tokens in (plain, ranked):
            counts = np.bincount(tokens, minlength=20)
            assert np.abs(counts - expected).max() <= 2


def test_frequencies_with_the_engines_own_numbers():
    """The same with what a completion uses, one seed and 5000 positions: within five deviations."""
    n, logits = 5000, [0.0, 1.0, 2.0, 3.0]
    weights = weights_of(np.array(logits), 1.0)
    expected = weights / weights.sum()
    counts = np.bincount(filtered(logits, [uniform(17, i) for i in range(n)]), minlength=4)
    assert (np.abs(counts - n * expected) < 5 * np.sqrt(n * expected * (1 - expected))).all()


@pytest.mark.parametrize("u", [0.5 / 2**32, 1 - 0.5 / 2**32])
def test_extreme_numbers_never_pick_what_has_no_probability(u):
    """At both ends of the sum stand tokens of weight zero: neither they nor one past the end may come out."""
    minus = -math.inf
    logits = [minus, minus, 0.0, minus, 1.0, minus, minus]
    end = 2 if u < 0.5 else 4
    number, one = torch.tensor([u], dtype=torch.float64), torch.ones(1)
    assert torch_sampling.sample(torch.tensor([logits]), one, number).tolist() == [end]
    for options in ({"top_k": 5}, {"top_p": 0.999}, {"min_p": 0.01}):
        assert filtered(logits, [u], **options) == [end]


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_rows_that_are_not_finite_give_no_token(value):
    """They gave the first token, or one past the end of the vocabulary; the row beside them is sampled as ever."""
    logits = torch.linspace(0, 1, 50).repeat(2, 1)
    logits[0] = value if value == -math.inf else logits[0].clone().index_fill_(0, torch.tensor([7]), value)
    one, u = torch.ones(2), torch.tensor([0.2, 0.9], dtype=torch.float64)
    beside = torch_sampling.sample(logits[1:], one[1:], u[1:]).tolist()
    assert torch_sampling.sample(logits, one, u).tolist() == [NOT_FINITE, *beside]
    assert torch_sampling.greedy(logits).tolist() == [NOT_FINITE, 49]
    for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.5), (50, 0.5)):
        tokens = torch_sampling.sample_filtered(logits, one, u, top_k, one * top_p, one * 0).tolist()
        assert tokens[0] == NOT_FINITE and 0 <= tokens[1] < 50


@pytest.mark.parametrize(("options", "kept"), TIES)
def test_filters_keep_or_drop_ties_together(options, kept):
    """Which of them a ranking puts first depends on its implementation."""
    logits = [math.log(p) for p in [0.1, 0.2, 0.1, 0.3, 0.2, 0.1]]
    u = [(i + 0.5) / 400 for i in range(400)]
    assert sorted(set(filtered(logits, u, **options))) == kept


@pytest.mark.parametrize("top_k", [0, 3, 40, 600, 10**12])
def test_sample_rows_gives_the_same_tokens(top_k, dtype, randn):
    """The function that the kernel is held against, and those that serve a CPU: few values, so that ties abound."""
    rows, numbers = 60, random.Random(top_k)
    logits = randn(rows, 3000, dtype=dtype) * torch.linspace(0.2, 4, rows)[:, None].to(dtype)
    logits = (logits * 2).round() / 2
    logits[:, ::7] = -math.inf
    temperature = torch.tensor([numbers.choice([0.5, 1.0, 3.0]) for _ in range(rows)])
    top_p = torch.tensor([numbers.choice([1.0, 0.999, 0.9, 0.3]) for _ in range(rows)])
    min_p = torch.tensor([numbers.choice([0.0, 0.0, 0.013, 1.0]) for _ in range(rows)])
    seeds = [numbers.getrandbits(64) for _ in range(rows)]
    halves = torch.tensor([[s & MASK, s >> 32] for s in seeds]).int()
    u = torch.tensor([uniform(s, i) for i, s in enumerate(seeds)], dtype=torch.float64)
    zero, one, positions = torch.zeros(rows), torch.ones(rows), torch.arange(rows).int()

    def from_rows(temperature, top_k, top_p, min_p):
        ks = torch.full((rows,), min(top_k, 2**31 - 1)).int()
        tokens = reference.sample_rows(logits, temperature, ks, top_p, min_p, halves, positions)
        assert tokens.dtype == torch.int32
        return tokens.tolist()

    assert from_rows(zero, top_k, top_p, min_p) == torch_sampling.greedy(logits).tolist()
    filtered_tokens = torch_sampling.sample_filtered(logits, temperature, u, top_k, top_p, min_p).tolist()
    assert from_rows(temperature, top_k, top_p, min_p) == filtered_tokens
    assert from_rows(temperature, 0, one, zero) == torch_sampling.sample(logits, temperature, u).tolist()


@pytest.mark.parametrize("vocab", [63, 1000, 5000, 20000])
def test_rows_do_not_touch_each_other(vocab, randn):
    """Alone, in company, in another order, and beside rows that need the whole vocabulary sorted."""
    rows, numbers = 12, random.Random(vocab)
    logits = randn(rows, vocab) * torch.tensor([[0.01, 1.0, 4.0][i % 3] for i in range(rows)])[:, None]
    temperature = torch.tensor([numbers.uniform(0.5, 2) for _ in range(rows)])
    u = torch.tensor([numbers.random() for _ in range(rows)], dtype=torch.float64)
    top_p = torch.tensor([numbers.choice([1.0, 0.95, 0.3]) for _ in range(rows)])
    min_p = torch.tensor([numbers.choice([0.0, 0.1]) for _ in range(rows)])

    def draw(index):
        index = torch.tensor(index)
        plain = torch_sampling.sample(logits[index], temperature[index], u[index])
        ranked = [
            torch_sampling.sample_filtered(logits[index], temperature[index], u[index], k, top_p[index], min_p[index])
            for k in (0, 50)
        ]
        return torch.stack([plain, *ranked], 1).tolist()

    together = draw(list(range(rows)))
    assert [draw([i])[0] for i in range(rows)] == together
    assert draw(list(range(rows))[::-1]) == together[::-1]
    assert draw([5, 0, 5]) == [together[5], together[0], together[5]]


def philox_block(counter, key):
    """Philox4x32-10 of the paper, all four words."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ k[0], second & MASK, first >> 32 ^ c[3] ^ k[1], first & MASK]
        k = [k[0] + 0x9E3779B9 & MASK, k[1] + 0xBB67AE85 & MASK]
    return c


def test_philox_of_zero_is_the_published_word():
    assert philox(0, 0) == 0x6627E8D5


def test_philox_equals_an_implementation_that_passes_all_published_vectors():
    """The other vectors use counters that the API cannot reach, so they vouch for the loop above (Random123's file)."""
    assert philox_block([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox_block([MASK] * 4, [MASK] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi_counter, pi_key = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert philox_block(pi_counter, pi_key) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    numbers = random.Random(0)
    seeds = [0, 1, MASK, 1 << 32, 2**64 - 1, *(numbers.getrandbits(64) for _ in range(50))]
    for seed in seeds:
        counter = numbers.getrandbits(32)
        expected = philox_block([counter, 0, 0, 0], [seed & MASK, seed >> 32])[0]
        assert philox(seed, counter) == expected


def test_uniform_lies_strictly_between_0_and_1(monkeypatch):
    numbers = [uniform(seed, position) for seed in range(50) for position in range(100)]
    assert min(numbers) > 0
    assert max(numbers) < 1
    # The ends of the range of words, which no known seed gives.
    for word in (0, MASK):
        monkeypatch.setattr("rosebatch_kernels.sampling.philox.philox", lambda seed, counter, w=word: w)
        assert 0 < uniform(0, 0) < 1


def test_uniform_is_uniform():
    n, bins = 20000, 50
    counts = np.bincount([int(uniform(3, i) * bins) for i in range(n)], minlength=bins)
    assert len(counts) == bins
    chi_squared = ((counts - n / bins) ** 2 / (n / bins)).sum()
    # 49 degrees of freedom: 20 to 94 but for one in ten thousand on either side.
    assert 20 < chi_squared < 94


def test_seeds_and_positions_give_different_numbers():
    """Neighbouring seeds, high halves of the seed, positions: all reach the number."""
    pairs = [(s, p) for s in (0, 1, 2, 1 << 32, 3 << 32, 2**64 - 1) for p in range(500)]
    words = {philox(s, p) for s, p in pairs}
    # 3000 of 2^32: a repetition has a chance of one in a thousand, and this is a fixed set.
    assert len(words) == len(pairs)
    assert uniform(5, 7) == uniform(5, 7)
