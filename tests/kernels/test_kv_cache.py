"""Writing into the cache: exact values in exactly the right places, nothing else touched."""

import math

import pytest
import torch
from torch import nan

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.kv_cache import reference

kernel = Launchers("kv_cache.kernel")
IMPLEMENTATIONS = {"reference": reference, "kernel": kernel}


def poisoned(*shape, dtype):
    return torch.full(shape, nan, dtype=dtype)


def assert_same(actual, expected):
    """Exact, with NaN equal to NaN."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def untouched(*shape, device):
    """Bytes that take no memory on a CPU until they are written."""
    return torch.empty(0, dtype=torch.int8, device=device).set_(
        torch.UntypedStorage(math.prod(shape), device=device), 0, shape
    )


def slot_rows(slots, kv_heads, block_size):
    """Rows of ``append`` for slots ``block · block_size + offset``, from the definition."""
    return torch.tensor(
        [[(s // block_size * kv_heads + h) * block_size + s % block_size for h in range(kv_heads)] for s in slots]
    )


@pytest.mark.parametrize(
    ("kv_heads", "block_size", "size", "tokens"),
    [(1, 1, 1, 1), (3, 16, 63, 1), (2, 7, 8, 63), (5, 48, 1, 100), (1, 128, 64, 1000), (8, 16, 128, 3)],
)
def test_append_writes_each_slot_and_no_other(implementation, kv_heads, block_size, size, tokens, dtype, device, randn):
    blocks = -(-tokens // block_size) + 3
    cache = poisoned(2, blocks, kv_heads, block_size, size, dtype=dtype).to(device)
    expected = cache.clone()
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(0))[:tokens].tolist()
    k, v = (randn(tokens, kv_heads, size, dtype=dtype).to(device) for _ in range(2))
    implementation.append(cache, k, v, slot_rows(slots, kv_heads, block_size).to(device))
    for token, slot in enumerate(slots):
        for which, values in enumerate((k, v)):
            expected[which, slot // block_size, :, slot % block_size] = values[token]
    assert_same(cache, expected)


def test_append_takes_views_of_a_fused_projection(implementation, dtype, device, randn):
    fused = randn(63, 9, 8, dtype=dtype).to(device)
    _, k, v = fused.split((5, 2, 2), dim=1)
    assert not k.is_contiguous()
    rows = slot_rows(range(63), 2, 16).to(device)
    cache, same = (poisoned(2, 4, 2, 16, 8, dtype=dtype).to(device) for _ in range(2))
    implementation.append(cache, k, v, rows)
    implementation.append(same, k.contiguous(), v.contiguous(), rows)
    assert_same(cache, same)


def test_append_of_k_and_v_with_strides_of_their_own(implementation, dtype, device, randn):
    """K may be a new tensor behind the rotation while V is still a view."""
    k, v = randn(5, 2, 8, dtype=dtype).to(device), randn(5, 3, 20, dtype=dtype).to(device)[:, 1:, 6:14]
    rows = slot_rows(range(3, 8), 2, 4).to(device)
    cache = poisoned(2, 2, 2, 4, 8, dtype=dtype).to(device)
    implementation.append(cache, k, v, rows)
    flat = cache.transpose(2, 3).reshape(2, 8, 2, 8)
    assert_same(flat[0, 3:], k)
    assert_same(flat[1, 3:], v)


def test_append_into_one_layer_of_a_larger_cache(implementation, dtype, device, randn):
    """A layer is a view: its writes must arrive in the whole cache, and in no other layer."""
    data = poisoned(3, 2, 4, 2, 5, 6, dtype=dtype).to(device)
    k, v = randn(1, 2, 6, dtype=dtype).to(device), randn(1, 2, 6, dtype=dtype).to(device)
    expected = data.clone()
    implementation.append(data[1], k, v, slot_rows([13], 2, 5).to(device))
    expected[1, 0, 2, :, 3], expected[1, 1, 2, :, 3] = k[0], v[0]
    assert_same(data, expected)


@pytest.mark.xdist_group("large_memory")
def test_append_kernel_offsets_past_int32(device, randn, far_apart):
    """In the new tokens, in the rows of the cache, and from K's half to V's; bytes, because 2^31 of them are enough."""
    k, v = ((randn(3, 2, 64) * 30).to(device, torch.int8) for _ in range(2))
    blocks = 2**20 + 2
    cache = untouched(2, blocks, 2, 16, 64, device=device)
    slots = [5, 2**19 * 16 + 3, blocks * 16 - 1]
    kernel.append(cache, far_apart(k), far_apart(v), slot_rows(slots, 2, 16).to(device))
    for token, slot in enumerate(slots):
        written = cache[:, slot // 16, :, slot % 16]
        assert torch.equal(written, torch.stack((k[token], v[token])))


@pytest.mark.parametrize("pairs", [[(0, 5)], [(3, 1), (4, 0)], [(2, 0), (2, 1), (2, 6)]])
@pytest.mark.parametrize(("kv_heads", "block_size", "size"), [(2, 5, 6), (1, 1, 1), (5, 16, 63)])
def test_copy_blocks_copies_all_layers_k_and_v(implementation, pairs, kv_heads, block_size, size, dtype, device, randn):
    cache = randn(3, 2, 7, kv_heads, block_size, size, dtype=dtype).to(device)
    for _, destination in pairs:
        cache[:, :, destination] = nan
    expected = cache.clone()
    for source, destination in pairs:
        expected[:, :, destination] = cache[:, :, source]
    # Columns of one tensor, as the cache makes them: ids do not stand next to each other.
    sources, destinations = torch.tensor(pairs, device=device).unbind(1)
    implementation.copy_blocks(cache, sources, destinations)
    assert_same(cache, expected)
    assert not cache.isnan().any()


# Of a block inside one layer's K; and of a layer, when those of blocks still fit.
@pytest.mark.parametrize(("layers", "blocks"), [(1, 2**20 + 2), (2, 2**19 + 2)])
@pytest.mark.xdist_group("large_memory")
def test_copy_blocks_kernel_offsets_past_int32(layers, blocks, device, randn):
    cache = untouched(layers, 2, blocks, 2, 16, 64, device=device)
    pairs = [(1, blocks - 1), (blocks - 2, 0)]
    for source, _ in pairs:
        cache[:, :, source] = (randn(layers, 2, 2, 16, 64) * 30).to(device, torch.int8)
    sources, destinations = torch.tensor(pairs, device=device).unbind(1)
    kernel.copy_blocks(cache, sources, destinations)
    assert torch.equal(cache[:, :, destinations], cache[:, :, sources])
