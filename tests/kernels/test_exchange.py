"""The sum over ranks inside of the norm, of one rank whose neighbours have already put their parts."""

import pytest
import torch

from rosebatch_kernels.common.exchange import Exchange
from rosebatch_kernels.norm import kernel, reference

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
    programs = -(-rows // max(1, kernel.TUNED.tile // (1 << (size - 1).bit_length())))
    # The others have arrived.
    signals[rank].view(-1, ranks)[:programs] = torch.tensor([int(r != rank) for r in range(ranks)], device=device)
    exchange = Exchange(tuple(buffers), tuple(signals), rank)
    found = kernel.add_rms_norm(own if parts else own[0], residual, weight, EPS, bias, exchange=exchange)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other)
    assert not signals[rank].any()
    for other in range(ranks):
        if other != rank:
            told = signals[other].view(-1, ranks)
            assert told[:programs, rank].all()
            assert told.sum() == programs
