"""Writing into the cache: exact values in exactly the right places, nothing else touched."""

import pytest
import torch
from torch import nan

from rosebatch_kernels.kv_cache import reference


def poisoned(*shape, dtype):
    return torch.full(shape, nan, dtype=dtype)


def assert_same(actual, expected):
    """Exact, with NaN equal to NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def slot_rows(slots, kv_heads, block_size):
    """Rows of ``append`` for slots ``block · block_size + offset``, from the definition."""
    return torch.tensor(
        [[(s // block_size * kv_heads + h) * block_size + s % block_size for h in range(kv_heads)] for s in slots]
    )


@pytest.mark.parametrize(
    ("kv_heads", "block_size", "size", "tokens"),
    [(1, 1, 1, 1), (3, 16, 63, 1), (2, 7, 8, 63), (5, 48, 1, 100), (1, 128, 64, 1000)],
)
def test_append_writes_each_slot_and_no_other(kv_heads, block_size, size, tokens, dtype, randn):
    blocks = -(-tokens // block_size) + 3
    cache = poisoned(2, blocks, kv_heads, block_size, size, dtype=dtype)
    expected = cache.clone()
    slots = torch.randperm(blocks * block_size)[:tokens].tolist()
    k, v = randn(tokens, kv_heads, size, dtype=dtype), randn(tokens, kv_heads, size, dtype=dtype)
    reference.append(cache, k, v, slot_rows(slots, kv_heads, block_size))
    for token, slot in enumerate(slots):
        for which, values in enumerate((k, v)):
            expected[which, slot // block_size, :, slot % block_size] = values[token]
    assert_same(cache, expected)


def test_append_takes_views_of_a_fused_projection(dtype, randn):
    fused = randn(63, 9, 8, dtype=dtype)
    _, k, v = fused.split((5, 2, 2), dim=1)
    assert not k.is_contiguous()
    rows = slot_rows(range(63), 2, 16)
    cache, same = (poisoned(2, 4, 2, 16, 8, dtype=dtype) for _ in range(2))
    reference.append(cache, k, v, rows)
    reference.append(same, k.contiguous(), v.contiguous(), rows)
    assert_same(cache, same)


def test_append_into_one_layer_of_a_larger_cache(dtype, randn):
    """A layer is a view: its writes must arrive in the whole cache, and in no other layer."""
    data = poisoned(3, 2, 4, 2, 5, 6, dtype=dtype)
    k, v = randn(1, 2, 6, dtype=dtype), randn(1, 2, 6, dtype=dtype)
    reference.append(data[1], k, v, slot_rows([13], 2, 5))
    expected = poisoned(3, 2, 4, 2, 5, 6, dtype=dtype)
    expected[1, 0, 2, :, 3], expected[1, 1, 2, :, 3] = k[0], v[0]
    assert_same(data, expected)


@pytest.mark.parametrize("pairs", [[(0, 5)], [(3, 1), (4, 0)], [(2, 0), (2, 1), (2, 6)]])
def test_copy_blocks_copies_all_layers_k_and_v(pairs, dtype, randn):
    cache = randn(3, 2, 7, 2, 5, 6, dtype=dtype)
    for _, destination in pairs:
        cache[:, :, destination] = nan
    expected = cache.clone()
    for source, destination in pairs:
        expected[:, :, destination] = cache[:, :, source]
    sources, destinations = torch.tensor(pairs).unbind(1)
    reference.copy_blocks(cache, sources, destinations)
    assert_same(cache, expected)
    assert not cache.isnan().any()
