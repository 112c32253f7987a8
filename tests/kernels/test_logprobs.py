"""Log-probabilities and likeliest tokens against their definition: fp64, and a sort in Python."""

import pytest
import torch
from torch import inf, nan

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.logprobs import kernel as module
from rosebatch_kernels.logprobs import layout, reference
from tests.helpers.sizes import change_table

kernel = Launchers("logprobs.kernel")
IMPLEMENTATIONS = {"reference": reference, "kernel": kernel}

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

# A part of a segment, whole ones, several programs with a last one that is not full.
SIZES = [1, 7, 128, 1030, 4096, 9001]
ROOM = 20
# By name, so that the interpreter has its turn with bf16: nothing is rounded to it, see ``is_cut_off``.
STORED = ["float32", "float16", "bfloat16"]


def read(rows, limit, room=ROOM):
    """Log-probabilities ``[S]``, ranks, ids ``[S, limit]`` and their log-probabilities; no number beside these."""
    rows = rows.cpu()
    assert rows.dtype == torch.int32 and rows.shape == (len(rows), 2 + 2 * room)
    ids, values = rows[:, 2 : 2 + room], rows[:, 2 + room :]
    assert not ids[:, limit:].any() and not values[:, limit:].any()
    real = values[:, :limit].contiguous().view(torch.float32)
    return rows[:, 0].contiguous().view(torch.float32), rows[:, 1].tolist(), ids[:, :limit].tolist(), real


def check(implementation, logits, tokens, limit, device, room=ROOM):
    """Hold rows of logits against the definition."""
    on_device = logits.to(device), torch.tensor(tokens, dtype=torch.int32, device=device)
    count = min(limit, logits.shape[1])
    own, ranks, ids, values = read(implementation.logprob_rows(*on_device, limit, room), count, room)
    rows, exact = logits.tolist(), logits.double().log_softmax(-1)
    assert ranks == [1 + sum(x > row[token] for x in row) for row, token in zip(rows, tokens, strict=True)]
    assert ids == [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:count] for row in rows]
    torch.testing.assert_close(own.double(), exact[range(len(rows)), tokens], rtol=1e-6, atol=1e-5)
    likeliest = exact.gather(1, torch.tensor(ids, dtype=torch.int64).view(len(rows), count))
    torch.testing.assert_close(values.double(), likeliest, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("limit", [0, 1, 5, 20])
@pytest.mark.parametrize("size", SIZES)
def test_random_rows(implementation, size, limit, stored, device, randn):
    """A column that no program reads, or one behind the end; another row's token; ids in another order."""
    logits = (randn(5, size) * 3).to(getattr(torch, stored))
    check(implementation, logits, [0, size - 1, size // 2, size // 3, size // 5], limit, device)


@pytest.mark.parametrize("limit", [1, 5, 20])
def test_equal_logits_come_by_their_ids(implementation, limit, device):
    """The order of equal logits followed from the device and its number of threads."""
    logits = torch.zeros(5, 1030)
    # Within a segment, over several, at the border of the k-th, and zeros of both signs.
    logits[1, [3, 200, 130, 129, 1029, 700]] = 2.0
    logits[2, 100:120] = 1.0
    logits[2, [5, 1000]] = 3.0
    logits[3] = torch.arange(1030) // 4 * -0.25
    logits[4, ::2] = -0.0
    check(implementation, logits, [9, 700, 119, 2, 1], limit, device)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("size", [9, 130, 1030])
def test_few_finite_logits(implementation, size, stored, device):
    """Tokens of -inf follow by their ids; what stands behind the end of a row is -inf as well, and no token."""
    logits = torch.full((4, size), -inf)
    logits[0, size - 1] = 1.0
    logits[1, [2, size - 2]] = torch.tensor([-3.0, 4.0])
    logits[2, : size - 1] = 0.0
    logits[3, 0] = -60000.0
    check(implementation, logits.to(getattr(torch, stored)), [size - 1, 0, size - 1, 0], 20, device)


def test_more_likeliest_tokens_than_the_vocabulary_has(implementation, device, randn):
    """The places that no token has are 0."""
    check(implementation, randn(3, 4), [0, 1, 3], 20, device)


def test_extreme_logits(implementation, device):
    """An exponential that overflows, or a sum of nothing but zeros."""
    largest = torch.finfo(torch.float32).max
    logits = torch.full((3, 300), -largest / 4)
    logits[0, 299], logits[1, 7], logits[2] = largest / 4, 1e-30, torch.linspace(-1e4, 1e4, 300)
    check(implementation, logits, [0, 7, 299], 5, device)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [nan, -nan, inf])
@pytest.mark.parametrize("place", [0, 200, 1029])
def test_rows_that_are_not_finite(implementation, place, bad, device, randn):
    """A number where there is none, or an id that is no token; the row beside it."""
    logits = randn(2, 1030)
    logits[0, place] = bad
    tokens = torch.tensor([4, 4], device=device)
    own, ranks, ids, values = read(implementation.logprob_rows(logits.to(device), tokens, 5, ROOM), 5)
    assert own[0].isnan() and values[0].isnan().all()
    assert len(set(ids[0])) == 5 and all(0 <= i < 1030 for i in ids[0])
    check(implementation, logits[1:], [4], 5, device)
    assert own[1].isfinite() and values[1].isfinite().all() and ranks[1] == 1 + int((logits[1] > logits[1, 4]).sum())


def test_row_without_a_token(implementation, device, randn):
    """-1 stands for logits that gave no token: what it would read lies before the row."""
    logits, tokens = randn(2, 300), [-1, 3]
    rows = implementation.logprob_rows(logits.to(device), torch.tensor(tokens, device=device), 5, ROOM)
    check(implementation, logits[1:], [3], 5, device)
    one = implementation.logprob_rows(logits[1:].to(device), torch.tensor([3], device=device), 5, ROOM)
    assert torch.equal(rows[1:], one)


@pytest.mark.parametrize(("start", "stride"), [(0, 1030), (0, 1088), (3, 1040), (8, 1040)])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_rows_within_a_wider_tensor(implementation, integer, start, stride, device, randn):
    """Rows at any address; what stands beside a row leaks into it."""
    wide = torch.full((4, stride + 16), nan, dtype=torch.float16)
    wide[:, start : start + 1030] = randn(4, 1030)
    logits, tokens = wide.to(device)[:, start : start + 1030], torch.tensor([0, 5, 1029, 77])
    rows = implementation.logprob_rows(logits, tokens.to(device, integer), 5, ROOM)
    same = implementation.logprob_rows(logits.contiguous(), tokens.to(device), 5, ROOM)
    # Rows are read in groups or one by one, so sums have another order.
    numbers = slice(layout.RANK, layout.IDS + ROOM)
    assert torch.equal(rows[:, numbers], same[:, numbers])
    for own, other in ((rows[:, :1], same[:, :1]), (rows[:, numbers.stop :], same[:, numbers.stop :])):
        found, expected = (each.contiguous().view(torch.float32) for each in (own, other))
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 if device == "cuda" else 0)
    check(implementation, wide[:, start : start + 1030].contiguous(), tokens.tolist(), 5, device)


@pytest.mark.parametrize("room", [0, 1, 3, 33])
def test_room(implementation, room, device, randn):
    """Places of rows of another width."""
    check(implementation, randn(3, 300), [1, 2, 3], min(room, 2), device, room)


def test_no_rows(implementation, device):
    """A grid of no programs is refused."""
    out = implementation.logprob_rows(torch.empty(0, 7, device=device), torch.empty(0, device=device).int(), 5, ROOM)
    assert out.shape == (0, layout.width(ROOM))


@pytest.mark.parametrize("segment", [16, 256])
@pytest.mark.parametrize("summed", [1, 4])
def test_sizes(segment, summed, device, randn, monkeypatch):
    """Sizes that no table has today."""
    change_table(monkeypatch, module, segment=segment, summed=summed)
    logits = randn(2, 1030)
    logits[1, 15:700:3] = 5.0
    check(kernel, logits, [7, 18], 20, device)


@pytest.mark.parametrize("stored", STORED)
def test_rows_do_not_touch_each_other(stored, device, randn):
    """To the bit: a completion's log-probabilities depended on the rows beside it."""
    logits = randn(5, 9001).to(device, getattr(torch, stored))
    tokens = torch.tensor([0, 9000, 5, 5, 70], device=device)
    rows = kernel.logprob_rows(logits, tokens, 20, ROOM)
    for number in range(5):
        own = slice(number, number + 1)
        assert torch.equal(kernel.logprob_rows(logits[own].clone(), tokens[own].clone(), 20, ROOM), rows[own])


@pytest.mark.gpu
def test_a_graph_holds_it(randn):
    """A step's graph replays it for other logits and tokens."""
    logits, tokens = randn(3, 9001).cuda(), torch.tensor([1, 2, 3], device="cuda").int()
    kernel.logprob_rows(logits, tokens, 5, ROOM)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.logprob_rows(logits, tokens, 5, ROOM)
    logits.copy_(randn(3, 9001))
    tokens.copy_(torch.tensor([8999, 0, 17]))
    graph.replay()
    assert torch.equal(out, kernel.logprob_rows(logits, tokens, 5, ROOM))
