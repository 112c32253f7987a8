"""Attention over scattered blocks against a loop over keys in float64; blocks of others are NaN throughout."""

import math

import pytest
import torch
from torch import nan

from rosebatch_kernels.common.gather import gather, gather_rows, padded_keys
from rosebatch_kernels.paged_attention import torch_attention

SHAPES = [(1, 1, 8), (2, 3, 24), (3, 1, 64), (1, 4, 63)]
BLOCK_SIZES = [1, 7, 16, 48, 128]
# The library's attention, and our own for what it does not have.
OPTIONS = [{}, {"soft_cap": 1.5, "sinks": torch.linspace(-2, 4, 9)}]


class Paged:
    """Sequences of random K and V, scattered over a cache whose every other block is poisoned."""

    def __init__(self, lengths, kv_heads, size, block_size, dtype, randn):
        self.lengths, self.kv_heads = lengths, kv_heads
        self.k = [randn(n, kv_heads, size, dtype=dtype) for n in lengths]
        self.v = [randn(n, kv_heads, size, dtype=dtype) for n in lengths]
        counts = [-(-n // block_size) for n in lengths]
        self.num_blocks = sum(counts) + 5
        self.cache = torch.full((2, self.num_blocks, kv_heads, block_size, size), nan, dtype=dtype)
        scattered = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(sum(lengths))).tolist()
        self.tables = [[scattered.pop() for _ in range(count)] for count in counts]
        for table, k, v in zip(self.tables, self.k, self.v, strict=True):
            # A sequence's own last block is zeros past its end, as in a new cache.
            self.cache[:, table] = 0
            for position in range(len(k)):
                block, offset = table[position // block_size], position % block_size
                self.cache[0, block, :, offset], self.cache[1, block, :, offset] = k[position], v[position]
        self.block_size = block_size

    def rows(self, keys):
        """Past a sequence's end the table repeats its first block: any valid one will do."""
        width = -(-keys // self.block_size)
        padded = [(table + [table[0]] * width)[:width] for table in self.tables]
        return gather_rows(torch.tensor(padded), self.num_blocks, self.kv_heads)

    def exact(self, sequence, position, q, scale, window=0, soft_cap=0.0, sinks=None):
        """Attention of ``q [heads, D]`` at ``position``, key by key."""
        group = len(q) // self.kv_heads
        first = max(0, position + 1 - window) if window else 0
        out = []
        for head, query in enumerate(q.double()):
            k = self.k[sequence][first : position + 1, head // group].double()
            v = self.v[sequence][first : position + 1, head // group].double()
            scores = [scale * float(query @ key) for key in k]
            if soft_cap:
                scores = [soft_cap * math.tanh(score / soft_cap) for score in scores]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            total = sum(weights) + (0 if sinks is None else math.exp(float(sinks[head]) - top))
            out.append(sum(w / total * value for w, value in zip(weights, v, strict=True)))
        return torch.cat(out)


def mask(positions, keys, window, dtype):
    key = torch.arange(keys)
    position = torch.tensor(positions)[:, None]
    seen = (key <= position) & (key > position - (window or keys))
    return torch.zeros(len(positions), keys, dtype=dtype).masked_fill(~seen, -math.inf)


@pytest.mark.parametrize(
    ("length", "keys"),
    [(1, 64), (63, 64), (64, 64), (65, 128), (512, 512), (513, 640), (1000, 1024), (1024, 1024), (1025, 1280)],
)
def test_padded_keys(length, keys):
    assert padded_keys(length) == keys


def test_padded_keys_never_fall_short_and_waste_little():
    padded = [padded_keys(n) for n in range(1, 20000)]
    assert all(p >= n for n, p in enumerate(padded, 1))
    assert all(p % 64 == 0 for p in padded)
    assert sorted(padded) == padded
    assert all(p - n < max(64, n / 4) for n, p in enumerate(padded, 1))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_gather_puts_a_sequence_in_order(block_size, dtype, randn):
    paged = Paged([70, 1, 63], 3, 5, block_size, dtype, randn)
    k, v = gather(paged.cache, paged.rows(128), batch=3, keys=128)
    assert k.shape == v.shape == (3, 3, 128, 5)
    for i, n in enumerate(paged.lengths):
        assert torch.equal(k[i, :, :n].transpose(0, 1), paged.k[i])
        assert torch.equal(v[i, :, :n].transpose(0, 1), paged.v[i])
    # Nobody else's block was read.
    assert not k.isnan().any()
    assert not v.isnan().any()


@pytest.mark.parametrize("window", [0, 1, 7, 64])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_decode(block_size, window, dtype, randn, assert_close):
    lengths = [1, 63, 64, 65, 100]
    for kv_heads, group, size in SHAPES:
        paged = Paged(lengths, kv_heads, size, block_size, dtype, randn)
        q, scale = randn(5, kv_heads * group, size, dtype=dtype), size**-0.5
        masks = mask([n - 1 for n in lengths], 128, window, dtype)[:, None, None]
        out = torch_attention.decode(q, paged.cache, paged.rows(128), masks, scale)
        assert out.dtype == dtype
        exact = [paged.exact(i, n - 1, q[i], scale, window) for i, n in enumerate(lengths)]
        assert_close(out, torch.stack(exact))


@pytest.mark.parametrize("window", [0, 1, 7, 64])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prefill(block_size, window, dtype, randn, assert_close):
    """Two sequences' tiles at the same positions, 50 to 72, the last keys of the shorter one past its end."""
    positions = list(range(50, 73))
    for kv_heads, group, size in SHAPES:
        paged = Paged([73, 90], kv_heads, size, block_size, dtype, randn)
        q, scale = randn(46, kv_heads * group, size, dtype=dtype), size**-0.5
        out = torch_attention.prefill(q, paged.cache, paged.rows(128), mask(positions, 128, window, dtype), scale)
        assert out.dtype == dtype
        rows = (0, 1, 13, 22)
        exact = [paged.exact(i, positions[r], q[i * 23 + r], scale, window) for i in range(2) for r in rows]
        assert_close(out[[i * 23 + r for i in range(2) for r in rows]], torch.stack(exact))


@pytest.mark.parametrize("block_size", [7, 16])
@pytest.mark.parametrize(("soft_cap", "with_sinks"), [(1.5, False), (0.0, True), (1.5, True)])
def test_soft_cap_and_sinks(soft_cap, with_sinks, block_size, dtype, randn, assert_close):
    """The library's attention has neither: a head of another's sink, or a cap of masked scores, would show."""
    lengths, positions, scale = [1, 63, 100], list(range(50, 73)), 0.6
    for kv_heads, group, size in SHAPES:
        heads = kv_heads * group
        options = {"soft_cap": soft_cap, "sinks": torch.linspace(-2, 4, heads).to(dtype) if with_sinks else None}
        paged = Paged(lengths, kv_heads, size, block_size, dtype, randn)
        q, masks = randn(3, heads, size, dtype=dtype), mask([n - 1 for n in lengths], 128, 9, dtype)[:, None, None]
        out = torch_attention.decode(q, paged.cache, paged.rows(128), masks, scale, **options)
        assert out.dtype == dtype
        exact = [paged.exact(i, n - 1, q[i], scale, 9, **options) for i, n in enumerate(lengths)]
        assert_close(out, torch.stack(exact))
        paged = Paged([73, 90], kv_heads, size, block_size, dtype, randn)
        q, masks = randn(46, heads, size, dtype=dtype), mask(positions, 128, 9, dtype)
        out = torch_attention.prefill(q, paged.cache, paged.rows(128), masks, scale, **options)
        rows = (0, 13, 22)
        exact = [paged.exact(i, positions[r], q[i * 23 + r], scale, 9, **options) for i in range(2) for r in rows]
        assert_close(out[[i * 23 + r for i in range(2) for r in rows]], torch.stack(exact))


def test_scale_is_used(randn, assert_close):
    """GPT-2 may scale by layer: the default of the library must not slip in."""
    paged = Paged([20], 2, 8, 16, torch.float32, randn)
    q = randn(1, 4, 8)
    masks = mask([19], 64, 0, torch.float32)
    expected = paged.exact(0, 19, q[0], 1.7)[None]
    assert_close(torch_attention.decode(q, paged.cache, paged.rows(64), masks[:, None, None], 1.7), expected)
    assert_close(torch_attention.prefill(q, paged.cache, paged.rows(64), masks, 1.7), expected)


def test_strided_queries(dtype, randn):
    """q is a view of the fused projection: its heads lie apart."""
    paged = Paged([20, 30], 2, 8, 16, dtype, randn)
    fused = randn(2, 9, 8, dtype=dtype)
    q = fused[:, 1:5]
    masks = mask([19, 29], 64, 0, dtype)[:, None, None]
    rows = paged.rows(64)
    same = torch_attention.decode(q.contiguous(), paged.cache, rows, masks, 0.3)
    assert torch.equal(torch_attention.decode(q, paged.cache, rows, masks, 0.3), same)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [16, 64])
def test_bits_of_a_decode_do_not_depend_on_the_others(size, options, dtype, randn):
    lengths = [65 + 3 * i for i in range(20)]
    paged = Paged(lengths, 3, size, 16, dtype, randn)
    q = randn(20, 9, size, dtype=dtype)
    masks = mask([n - 1 for n in lengths], 128, 0, dtype)[:, None, None]
    rows = paged.rows(128).view(2, 20, -1)
    whole = torch_attention.decode(q, paged.cache, paged.rows(128), masks, 0.2, **options)
    for some in ([0], [19], [7, 3], list(range(19, -1, -1))):
        part = torch_attention.decode(q[some], paged.cache, rows[:, some].reshape(-1), masks[some], 0.2, **options)
        assert torch.equal(part, whole[some])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", [16, 64])
def test_bits_of_a_tile_do_not_depend_on_the_others(size, options, dtype, randn):
    paged = Paged([128] * 12, 3, size, 16, dtype, randn)
    q = randn(12 * 64, 9, size, dtype=dtype)
    tile = mask(list(range(64, 128)), 128, 0, dtype)
    rows = paged.rows(128).view(2, 12, -1)
    whole = torch_attention.prefill(q, paged.cache, paged.rows(128), tile, 0.2, **options).view(12, 64, -1)
    for some in ([0], [11], [7, 3], list(range(11, -1, -1))):
        tiles = q.view(12, 64, 9, size)[some].reshape(-1, 9, size)
        part = torch_attention.prefill(tiles, paged.cache, rows[:, some].reshape(-1), tile, 0.2, **options)
        assert torch.equal(part.view(len(some), 64, -1), whole[some])
