"""The distribution of drawn tokens: ours against FlashInfer's kernels, and against a formula in float64."""

import importlib
import math
import sys
from types import ModuleType

import pytest
import torch

import rosebatch_kernels.sampling as sampling_package
from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.tokens import NOT_FINITE
from rosebatch_kernels.sampling import reference
from tests.helpers.host_reads import HostReads

kernel = Launchers("sampling.kernel")

TEMPERATURE = 0.8
# Top-k, top-p and min-p; the last one shows their order.
MODES = [(50, 1.0, 0.0), (0, 0.9, 0.0), (50, 0.9, 0.0), (0, 1.0, 0.1), (50, 0.9, 0.1)]
TINY_MODES = [(0, 1.0, 0.0), (8, 1.0, 0.0), (0, 0.8, 0.0), (8, 0.8, 0.0), (0, 1.0, 0.1), (8, 0.8, 0.2)]
# From 65536 on, their top-k goes another way. The more tokens, the steeper, so that none is near a border.
STEEPNESS = {24: 1.0, 1000: 2.0, 50257: 3.0, 151936: 3.75}
DRAWS = 20000
# A filter's border this close to a token would leave it to the rounding of fp32 sums whether the token is kept.
CLOSE = 1e-5
# Expected draws of a cell of the statistic, at least.
MINIMUM = 10
# A statistic of right samplers is above its bound with a chance of exp(-14), one in a million; seeds are fixed.
RARE = 14.0


def make_logits(vocab, seed=0):
    """``[V]`` fp32 on the CPU, no two alike where a filter could part them."""
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed + vocab)) * STEEPNESS[vocab]


def exact(logits, top_k, top_p, min_p):
    """Probabilities ``[V]`` in float64 of what the filters keep, one after the other."""
    ranked, ids = (logits.double() / TEMPERATURE).softmax(-1).sort(descending=True)
    ranked[top_k or len(ranked) :] = 0
    ranked /= ranked.sum()
    kept = ranked.clone()
    if top_p < 1:
        before = ranked.cumsum(0) - ranked
        assert (before - top_p).abs().min() > CLOSE
        kept[before >= top_p] = 0
    if min_p > 0:
        assert (ranked / ranked[0] - min_p).abs().min() > CLOSE
        kept[ranked < min_p * ranked[0]] = 0
    return torch.zeros_like(kept).scatter_(0, ids, kept / kept.sum())


def draw(sampler, logits, mode, device):
    """How often our sampler takes each token ``[V]``, with one seed and a position for each draw."""
    top_k, top_p, min_p = mode
    reals = torch.tensor([TEMPERATURE, top_p, min_p]).to(device).expand(DRAWS, -1)
    integers = torch.tensor([top_k, 1234, -5678], dtype=torch.int32).to(device).expand(DRAWS, -1)
    tokens = sampler.sample_rows(
        logits.to(device).expand(DRAWS, -1),
        temperature=reals[:, 0],
        top_k=integers[:, 0],
        top_p=reals[:, 1],
        min_p=reals[:, 2],
        seeds=integers[:, 1:],
        positions=torch.arange(DRAWS, dtype=torch.int32, device=device),
    )
    return torch.bincount(tokens.cpu().long(), minlength=len(logits))


def in_cells(expected, *counts):
    """The numbers of draws in cells of at least ``MINIMUM`` expected ones: likely tokens alone, all others in one."""
    order = expected.sort(descending=True).indices
    alone = int((expected >= MINIMUM).sum()) - 1
    assert alone >= 2, "else nothing is tested"
    return [torch.cat([c[order[:alone]], c[order[alone:]].sum()[None]]).double() for c in (expected, *counts)]


def bound(cells):
    """What chi-squared exceeds with a probability of at most exp(-RARE): d + 2 sqrt(d t) + 2 t at d degrees of freedom.

    Source: Laurent and Massart, "Adaptive estimation of a quadratic functional by model selection" (2000), lemma 1.
    """
    degrees = len(cells) - 1
    return degrees + 2 * math.sqrt(degrees * RARE) + 2 * RARE


def follows(counts, probabilities):
    """Whether the counts ``[V]`` are those of draws with these probabilities, by chi-squared."""
    expected, seen = in_cells(probabilities * counts.sum(), counts)
    return bool(((seen - expected) ** 2 / expected).sum() < bound(expected))


def agree(counts, others, probabilities):
    """Whether two equal numbers of draws come from one distribution, whatever it is; it only sets the cells."""
    assert counts.sum() == others.sum()
    expected, a, b = in_cells(probabilities * counts.sum(), counts, others)
    return bool(((a - b) ** 2 / (a + b).clamp_min(1)).sum() < bound(expected))


def check(counts, probabilities):
    """Support and frequencies of the counts ``[V]``."""
    assert not counts[probabilities == 0].any(), "drawn, but filtered out"
    assert counts[probabilities > 1 / 200].all(), "likely, but never drawn"
    assert follows(counts, probabilities)


# The interpreter takes up to a third of a second for a row: there, the kernel is held against the reference's tokens.
@pytest.mark.parametrize(
    ("sampler", "device"),
    [(reference, "cpu"), pytest.param(kernel, "cuda", marks=pytest.mark.gpu)],
    ids=["cpu", "cuda"],
)
@pytest.mark.parametrize("mode", TINY_MODES)
def test_draws_follow_the_formula(sampler, device, mode):
    """Tokens kept or weighed wrongly, although each single draw could be right."""
    logits = make_logits(24)
    check(draw(sampler, logits, mode, device), exact(logits, *mode))


def test_the_statistics_notice_small_mistakes():
    """A fiftieth of mass at the wrong token, and top-p of the whole in place of top-p of what top-k keeps."""
    logits = make_logits(24)
    probabilities = exact(logits, 8, 0.8, 0.0)
    counts = draw(reference, logits, (8, 0.8, 0.0), "cpu")
    moved = counts.clone()
    first, second = probabilities.sort(descending=True).indices[:2].tolist()
    moved[first] -= DRAWS // 50
    moved[second] += DRAWS // 50
    assert not follows(moved, probabilities)
    moved[first] -= DRAWS // 50
    moved[second] += DRAWS // 50
    assert not agree(counts, moved, probabilities)
    whole = draw(reference, logits, (0, 0.8, 0.0), "cpu")
    assert not follows(whole, probabilities)
    assert whole[probabilities == 0].any()


@pytest.fixture
def flashinfer():
    """Our module of their sampler; skipped where theirs is not installed, and only then."""
    pytest.importorskip("flashinfer")
    from rosebatch_kernels.sampling import flashinfer

    return flashinfer


class Theirs:
    """Stands in for ``flashinfer.sampling`` on a CPU: each call takes the likeliest token and is noted."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(numbers, *args, **options):
            self.calls.append((name, numbers, args, options))
            if name in ("softmax", "top_k_renorm_probs", "top_p_renorm_probs"):
                return numbers.softmax(-1)
            return numbers.argmax(-1).int()

        return call


@pytest.fixture
def theirs(monkeypatch):
    """Our module with the stand-in, whether or not theirs is installed."""
    fake = Theirs()
    package = ModuleType("flashinfer")
    package.sampling = fake
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.delitem(sys.modules, "rosebatch_kernels.sampling.flashinfer", raising=False)
    ours = importlib.import_module("rosebatch_kernels.sampling.flashinfer")
    yield ours, fake
    # Others import the true one.
    sys.modules.pop("rosebatch_kernels.sampling.flashinfer")
    del sampling_package.flashinfer


@pytest.mark.parametrize(
    ("top_k", "min_p", "last"),
    [
        (5, False, "top_k_top_p_sampling_from_logits"),
        (0, False, "top_p_sampling_from_probs"),
        (2**70, False, "top_p_sampling_from_probs"),
        (5, True, "min_p_sampling_from_probs"),
    ],
)
def test_the_host_waits_for_nothing(theirs, top_k, min_p, last):
    """Whether any row has a min-p was read from the device, once a step, before their kernel was launched."""
    ours, fake = theirs
    logits = torch.stack([make_logits(1000, seed) for seed in range(4)])
    wide = torch.full((4, 1008), 100.0)[:, :1000].copy_(logits)
    wide[0, 3], wide[1, 5] = float("nan"), float("-inf")
    ones, numbers = torch.ones(4), torch.rand(4, dtype=torch.float64)
    with HostReads() as reads:
        tokens = ours.sample_filtered(wide, ones * 1e-30, numbers, top_k, ones, ones if min_p else None)
        plain = ours.sample(wide, ones * 1e30, numbers)
    assert reads.reads == []
    assert [plain[1:].tolist(), tokens[1:].tolist()] == [logits[1:].argmax(-1).tolist()] * 2
    assert (plain[0], tokens[0]) == (NOT_FINITE, NOT_FINITE)
    names = [name for name, *_ in fake.calls]
    assert names[-3] == last and names[-2:] == ["softmax", "sampling_from_probs"]
    for _, given, args, options in fake.calls:
        assert given.is_contiguous() and not given.isnan().any()
        assert all(value.dtype == torch.int64 for name, value in options.items() if name in ("seed", "offset"))
        assert all(k < 1000 for k in args if isinstance(k, int))


def their_probabilities(theirs, logits, top_k, top_p, min_p):
    """``[V]`` float64 on the CPU. They have no kernel for what min-p keeps: their sampler finds it as it draws."""
    probabilities = theirs.softmax(logits.cuda()[None], torch.full((1,), TEMPERATURE, device="cuda"))
    if top_k:
        probabilities = theirs.top_k_renorm_probs(probabilities, top_k)
    if top_p < 1:
        probabilities = theirs.top_p_renorm_probs(probabilities, top_p)
    probabilities = probabilities[0].cpu()
    probabilities[probabilities < min_p * probabilities.max()] = 0
    return probabilities.double() / probabilities.double().sum()


def their_draws(flashinfer, logits, top_k, top_p, min_p):
    """How often their sampler takes each token ``[V]``, over several calls, which have a seed each."""
    rows, counts = 1000, torch.zeros(len(logits), dtype=torch.int64)
    generator = torch.Generator().manual_seed(7)
    wide = logits.cuda().expand(rows, -1)
    for _ in range(DRAWS // rows):
        uniform = torch.rand(rows, generator=generator, dtype=torch.float64).cuda()
        temperature, p, share = (torch.full((rows,), value, device="cuda") for value in (TEMPERATURE, top_p, min_p))
        if top_k or top_p < 1 or min_p:
            tokens = flashinfer.sample_filtered(wide, temperature, uniform, top_k, p, share if min_p else None)
        else:
            tokens = flashinfer.sample(wide, temperature, uniform)
        counts += torch.bincount(tokens.cpu(), minlength=len(logits))
    return counts


@pytest.mark.gpu
@pytest.mark.xdist_group("large_memory")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("mode", [*MODES, (0, 1.0, 0.0)])
@pytest.mark.parametrize("vocab", list(STEEPNESS)[1:])
def test_draws_agree_with_theirs(flashinfer, vocab, mode):
    """What two implementations that share no line keep and how often they draw it: guards the order of the filters."""
    logits = make_logits(vocab)
    probabilities = their_probabilities(flashinfer.theirs, logits, *mode)
    torch.testing.assert_close(probabilities, exact(logits, *mode), rtol=1e-4, atol=0)
    ours = draw(kernel, logits, mode, "cuda")
    check(ours, probabilities)
    theirs = their_draws(flashinfer, logits, *mode)
    check(theirs, probabilities)
    assert agree(ours, theirs, probabilities)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_their_samples_follow_from_the_first_number(flashinfer):
    """The same batch again gives the same tokens, another first number others: neither is left to a global state."""
    logits = make_logits(1000).cuda().expand(64, -1)
    ones = torch.ones(64, device="cuda")
    numbers = torch.rand(2, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).cuda()
    first, other = (flashinfer.sample(logits, ones, number).tolist() for number in numbers)
    assert flashinfer.sample(logits, ones, numbers[0]).tolist() == first
    assert first != other
    assert len(set(first)) > 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_their_rows_within_a_wider_tensor(flashinfer, dtype):
    """Their kernels know no strides, and the logits of a padded head have gaps between their rows."""
    wide = torch.full((3, 1008), 100.0, dtype=dtype, device="cuda")
    logits = wide[:, :1000]
    logits.copy_(torch.stack([make_logits(1000, seed) for seed in range(3)]))
    likeliest = [999, 0, 500]
    logits[range(3), likeliest] = 20.0
    numbers = torch.rand(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).cuda()
    ones = torch.ones(3, device="cuda")
    assert flashinfer.sample(logits, ones * 1e-30, numbers).tolist() == likeliest
    assert flashinfer.sample_filtered(logits, ones, numbers, 1, ones, None).tolist() == likeliest
    assert flashinfer.sample_filtered(logits, ones, numbers, 0, ones, ones).tolist() == likeliest
