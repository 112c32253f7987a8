"""K and V of preempted sequences go to the host and back on a second stream, beside kernels that write the cache."""

import pytest
import torch

from rosebatch.engine.cache import host_store
from rosebatch.engine.cache.host_store import HostStore
from rosebatch.engine.staging import Staging
from tests.helpers.running import greedy

pytestmark = pytest.mark.gpu

BLOCKS = 40


def test_blocks_keep_their_order_among_kernels(monkeypatch):
    """A buffer that is written before it was read, or blocks that are read before they are there, would show."""
    device = torch.device("cuda")
    shape = 4, 2, BLOCKS, 2, 16, 64
    tensors = [
        torch.zeros(shape, dtype=torch.bfloat16, device=device),
        torch.zeros(1, 1, BLOCKS, 2, 16, 1, device=device),
    ]
    # Three blocks at a time.
    monkeypatch.setattr(host_store, "BUFFER_BYTES", 2 * 3 * sum(data[:, :, 0].nbytes for data in tensors) + 2)
    store, staging = HostStore(tensors, device), Staging(device)
    busy = torch.rand(4096, 4096, device=device)
    for turn in range(6):
        for data in tensors:
            busy @ busy
            data.copy_((torch.arange(BLOCKS, device=device) + turn).view(1, 1, -1, 1, 1, 1).expand_as(data))
        store.save([(block, (block + turn) % BLOCKS) for block in range(BLOCKS)], staging)
        for data in tensors:
            data.fill_(-1)
        store.restore([(BLOCKS - 1 - block, (block + turn) % BLOCKS) for block in range(BLOCKS)], staging)
        wanted = torch.arange(BLOCKS - 1, -1, -1, device=device) + turn
        for data in tensors:
            assert torch.equal(data, wanted.view(1, 1, -1, 1, 1, 1).expand_as(data).to(data.dtype))


@pytest.mark.parametrize("family", ["GPT2", "Qwen3"])
def test_nothing_is_computed_twice(family, make_engine):
    """Sequences that are swapped would be computed again, or go on with another's K and V."""
    prompts = [[(7 * i + j) % 90 + 1 for j in range(3 + i)] for i in range(24)]
    roomy = make_engine(family, torch.float32, {"prefix_cache": False}, seqs=24, block_size=16)
    switches = {"prefix_cache": False, "swap": True}
    cramped = make_engine(family, torch.float32, switches, seqs=24, block_size=16, blocks=14)
    assert greedy(cramped, prompts, 40) == greedy(roomy, prompts, 40)
    assert cramped.stats.preemptions > 3
    assert cramped.stats.computed_tokens == roomy.stats.computed_tokens
