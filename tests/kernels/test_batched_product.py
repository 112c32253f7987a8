"""On a CPU, one head of K and V of one sequence has the bits that it has beside others.

With two threads or three, MKL adds up a single product of 1000 keys in parts. A row alone in the step differed so,
where a model, or one of its ranks, has a single head.
"""

import pytest
import torch

from rosebatch_kernels.common.batched_product import batched_product
from rosebatch_kernels.common.gather import gather_rows
from rosebatch_kernels.hp1 import torch_attention as hp1
from rosebatch_kernels.paged_attention import torch_attention as paged
from tests.kernels.hp1_exact import make_gate

pytestmark = pytest.mark.usefixtures("threads")

KEYS, SIZE, BLOCK = 1024, 64, 64


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_a_product_alone_is_that_of_a_batch(rows, randn):
    """Values weighted by many keys, and scores of many keys."""
    weights, values, queries = randn(3, 1, rows, KEYS), randn(3, 1, KEYS, SIZE), randn(3, 1, rows, SIZE)
    for a, b in ((weights, values), (queries, values.transpose(-1, -2))):
        assert torch.equal(batched_product(a[:1], b[:1]), batched_product(a, b)[:1])


@pytest.mark.parametrize("kind", ["soft cap", "hp1"])
def test_one_head_of_one_long_row(kind, randn):
    """Attention that is our own, of generated tokens and of a prompt's tile."""
    blocks = KEYS // BLOCK
    cache, table = randn(2, 3 * blocks, 1, BLOCK, SIZE), torch.arange(3 * blocks).view(3, blocks)
    module, last = (paged, (5.0,)) if kind == "soft cap" else (hp1, (make_gate(1, randn, "cpu"),))
    for attend, tile in ((module.decode, 1), (module.prefill, 64)):
        q = randn(3 * tile, 1, SIZE)
        mask = torch.zeros(3, 1, 1, KEYS) if tile == 1 else torch.zeros(tile, KEYS)

        def first_of(count, *, attend=attend, tile=tile, q=q, mask=mask):
            own = mask[:count] if tile == 1 else mask
            rows = gather_rows(table[:count], 3 * blocks, 1)
            return attend(q[: count * tile], cache, rows, own, 0.1, *last)[:tile]

        assert torch.equal(first_of(1), first_of(3))
