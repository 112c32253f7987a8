"""The sum over ranks inside of the norm, of one rank whose neighbours have already put their parts."""

import os

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.all_reduce import AllReduce
from rosebatch_kernels.norm import kernel as module
from rosebatch_kernels.norm import reference
from tests.helpers.waiting import PATIENCE_SECONDS

kernel = Launchers("norm.kernel")

EPS = 1e-5


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("rows", "size", "parts"), [(3, 40, 0), (2, 1100, 4)])
def test_a_norm_adds_what_other_ranks_have_put(rank, rows, size, parts, device):
    """A part that is read too early, twice or not at all gives another sum; a signal that stays would end the next."""
    ranks, generator = 3, torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).to(device)

    buffers = [random(rows * size) for _ in range(ranks)]
    own = random(max(parts, 1), rows, size)
    residual, weight, bias = random(rows, size), random(size), random(size)
    whole = sum(b.view(rows, size) for r, b in enumerate(buffers) if r != rank) + own.sum(0)
    expected = reference.add_rms_norm(whole, residual, weight, EPS, bias)
    signals = [torch.zeros(rows * ranks, dtype=torch.int32, device=device) for _ in range(ranks)]
    programs = -(-rows // max(1, module.SIZES.measured.tile // (1 << (size - 1).bit_length())))
    # The others have arrived.
    signals[rank].view(-1, ranks)[:programs] = torch.tensor([int(r != rank) for r in range(ranks)], device=device)
    all_reduce = AllReduce(tuple(buffers), tuple(signals), rank)
    found = kernel.add_rms_norm(own if parts else own[0], residual, weight, EPS, bias, all_reduce=all_reduce)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other)
    assert not signals[rank].any()
    for other in range(ranks):
        if other != rank:
            told = signals[other].view(-1, ranks)
            assert told[:programs, rank].all()
            assert told.sum() == programs


def sum_often(rank, sums, residual, weight, exchanges, found):
    for turn, parts in enumerate(sums):
        all_reduce = exchanges[turn % len(exchanges)][rank]
        found[rank, turn] = kernel.add_rms_norm(parts[rank], residual, weight, EPS, all_reduce=all_reduce)[1]


def make_exchanges(ranks, rows, size, dtype, *, two_shots):
    """For each of the turns, what each rank sums with."""

    def each(count, dtype):
        return tuple(torch.zeros(count, dtype=dtype).share_memory_() for _ in range(ranks))

    exchanges = []
    for _ in range(1 if two_shots else 2):
        parts, signals = each(AllReduce.places(rows, size, ranks), dtype), each(rows * ranks, torch.int32)
        whole = each(rows * size, dtype) if two_shots else None
        exchanges.append([AllReduce(parts, signals, rank, whole) for rank in range(ranks)])
    return exchanges


def run_ranks(sums, residual, weight, exchanges):
    """``[ranks, turns, rows, size]``: what each rank made of each sum, in a process of its own."""
    turns, ranks, *shape = sums.shape
    found = torch.zeros(ranks, turns, *shape, dtype=sums.dtype).share_memory_()
    arguments = (sums, residual, weight, exchanges, found)
    options = {"nprocs": ranks, "start_method": "fork", "join": False, "daemon": True}
    processes = torch.multiprocessing.start_processes(sum_often, arguments, **options)
    try:
        assert any(processes.join(PATIENCE_SECONDS) for _ in range(ranks)), "a rank waits for ever"
    finally:
        for process in processes.processes:
            process.kill()
    return found


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="ranks are processes of the interpreter")
@pytest.mark.parametrize("two_shots", [False, True])
@pytest.mark.parametrize(("ranks", "rows", "size"), [(2, 5, 40), (3, 7, 1100), (4, 33, 200), (4, 2, 1100)])
def test_ranks_that_run_at_once_have_the_same_sums(two_shots, ranks, rows, size):
    """A rank that is ahead must not touch what another still reads: each sum of several has other parts.

    In fp32 another order of the ranks is another sum.
    """
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(5, ranks, rows, size, generator=generator).share_memory_()
    residual, weight = torch.zeros(rows, size), torch.ones(size)

    exchanges = make_exchanges(ranks, rows, size, torch.float32, two_shots=two_shots)
    found = run_ranks(sums, residual, weight, exchanges)
    assert all(torch.equal(each, found[0]) for each in found)
    expected = sums.sum(1)
    torch.testing.assert_close(found[0], expected)
    assert not any(signal.any() for turn in exchanges for all_reduce in turn for signal in all_reduce.signals)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="ranks are processes of the interpreter")
def test_few_rows_and_many_round_a_sum_alike():
    """Few rows are summed in one shot, many in two: a row had other bits in a larger batch.

    In one shot, the residual was added to a sum of fp32.
    """
    ranks, rows, size = 3, 5, 200
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(1, ranks, rows, size, generator=generator).half().share_memory_()
    residual, weight = torch.randn(rows, size, generator=generator).half(), torch.ones(size, dtype=torch.float16)
    in_one_shot, in_two_shots = (
        run_ranks(sums, residual, weight, make_exchanges(*sums.shape[1:], torch.float16, two_shots=two_shots))
        for two_shots in (False, True)
    )
    assert torch.equal(in_one_shot, in_two_shots)
