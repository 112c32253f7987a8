"""The processes that hold a model, over gloo."""

import pytest
import torch
from torch import multiprocessing

from rosebatch.launch.group import TorchGroup, open_store
from rosebatch.ops.shard import Shard

ROWS = 64


def sum_rows(rank, ranks, store, found):
    """Of all rows together, and of each alone."""
    group = TorchGroup(Shard(rank, ranks), open_store(str(store), ranks), torch.device("cpu"))
    part = torch.randn(ROWS, 24, generator=torch.Generator().manual_seed(rank)).bfloat16()
    together = group.sum_in_order_(part.clone())
    alone = [group.sum_in_order_(row.clone()) for row in part.split(1)]
    found[rank] = torch.stack([together, torch.cat(alone)])
    group.close()


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rows_sum_over_three_ranks_does_not_depend_on_its_neighbours(ranks, tmp_path):
    """gloo adds up a number in an order that goes by its place in the tensor: with -tp 3 rows had other bits alone."""
    found = torch.zeros(ranks, 2, ROWS, 24, dtype=torch.bfloat16).share_memory_()
    multiprocessing.spawn(sum_rows, (ranks, tmp_path / "store", found), nprocs=ranks)
    assert found[0].any()
    assert all(torch.equal(each, found[0, 0]) for each in found.flatten(0, 1))
