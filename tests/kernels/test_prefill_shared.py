"""Chunks that share a tile over a common beginning: each row's result is that of its own sequence."""

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.tiles import TILE_ROWS
from tests.kernels.scattered import Scattered, assert_same
from tests.kernels.test_paged_prefill import SCALE, exact_rows

prefill_shared = Launchers("paged_attention.prefill_shared").prefill_shared

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def run(chunks, tiles, shared, shape, dtype, device, randn, assert_close, **options):
    """Chunks ``(prefix, length)`` in tiles ``(keys, [(chunk, first of its rows, rows)])``."""
    kv_heads, group, size, block_size = shape
    q = randn(sum(length for _, length in chunks), kv_heads * group, size, dtype=dtype)
    lengths = [sum(chunk) for chunk in chunks]
    paged = Scattered(lengths, kv_heads, size, block_size, dtype, device, randn, shared)
    lines, pieces, first_row = [], [], 0
    for keys, own in tiles:
        rows = sum(count for *_, count in own)
        assert rows <= TILE_ROWS
        lines.append((first_row, rows, keys, len(pieces), len(own)))
        begin = 0
        for chunk, start, count in own:
            pieces.append((chunk, begin, count, chunks[chunk][0] + start))
            begin += count
        first_row += rows
    lines.append((0, 0, 0, 0, 0))
    before = paged.cache.clone()
    out = prefill_shared(
        q.flatten(1).to(device),
        paged.cache,
        paged.table,
        torch.tensor(lines, dtype=torch.int32, device=device),
        torch.tensor(pieces, dtype=torch.int32, device=device),
        num_heads=kv_heads * group,
        scale=SCALE,
        **options,
    )
    assert_close(out, exact_rows(q, paged, chunks, 0, **options))
    assert_same(paged.cache, before)


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 64, 16), (2, 2, 24, 64), (1, 3, 80, 24), (1, 1, 128, 16), (1, 2, 12, 8), (1, 1, 256, 16), (1, 1, 512, 16)],
)
def test_short_chunks_in_one_tile(shape, dtype, device, randn, assert_close):
    """Right behind the shared keys, and further on; a single token; one that shares a part of its prefix."""
    keys = 48 // shape[3] * shape[3] or 64
    chunks = [(keys, 5), (keys + 3, 1), (keys + 40, 20), (keys, 30)]
    tiles = [(keys, [(0, 0, 5), (1, 0, 1), (2, 0, 20), (3, 0, 30)])]
    run(chunks, tiles, [([0, 1, 2, 3], keys)], shape, dtype, device, randn, assert_close)


def test_chunks_that_go_over_tiles(dtype, device, randn, assert_close):
    """A piece may begin inside of a chunk: it sees the chunk's earlier tokens, which other tiles hold."""
    chunks = [(32, 50), (32, 100), (0, 3), (64, 2), (70, 9)]
    tiles = [(32, [(0, 0, 50), (1, 0, 14)]), (32, [(1, 14, 64)]), (32, [(1, 78, 22)]), (0, [(2, 0, 3)])]
    tiles.append((64, [(3, 0, 2), (4, 0, 9)]))
    run(chunks, tiles, [([0, 1], 32), ([3, 4], 64)], (1, 2, 64, 16), dtype, device, randn, assert_close)


def test_soft_cap_and_sinks(device, randn, assert_close):
    options = {"soft_cap": 1.5, "sinks": torch.linspace(-2, 4, 4).to(device)}
    chunks, tiles = [(32, 5), (48, 20)], [(32, [(0, 0, 5), (1, 0, 20)])]
    run(chunks, tiles, [([0, 1], 32)], (2, 2, 24, 16), torch.float32, device, randn, assert_close, **options)


def test_shared_keys_are_read_through_the_first_piece(device, randn, assert_close):
    """Keys that are no whole number of a tile's: the other chunks' own keys begin inside of a tile of keys."""
    chunks, tiles = [(8, 5), (24, 20)], [(8, [(0, 0, 5), (1, 0, 20)])]
    run(chunks, tiles, [([0, 1], 8)], (1, 1, 24, 8), torch.float32, device, randn, assert_close)
