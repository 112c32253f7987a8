"""QK norm, rotation and KV append of packed tokens against float64: q in place, K and V in their slots, no more."""

import pytest
import torch
from torch import nan

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.qkv import reference
from tests.kernels.scattered import (
    EPS,
    NORMS,
    Scattered,
    assert_same,
    assert_values,
    normed_and_rotated,
    rms_norm,
    rotary_tables,
    untouched,
)

kernel = Launchers("qkv.kernel")
IMPLEMENTATIONS = {"reference": reference, "kernel": kernel}
# Row of the block table and position of each token, in no order: new ones, and a block's first and last.
TOKENS = [(2, 20), (0, 70), (1, 3), (0, 64), (0, 0), (1, 0), (0, 63), (2, 15)]
LENGTHS = [70, 3, 20]
# A token that is skipped has no row, and a position that no table reaches.
SKIPPED = (-1, 2**20)


def columns(tokens, device):
    return torch.tensor(tokens, dtype=torch.int32).t().contiguous().to(device)


def check(prepare, qkv, tokens, paged, heads, assert_close, tables=None, norm=None, packed=None):
    """Run it, in ``packed`` if given; compare q, the new slots, and all that must have stayed as it was."""
    device, size = paged.cache.device, qkv.shape[-1]
    if packed is None:
        packed = torch.empty_like(qkv.flatten(1), device=device)
    packed.copy_(qkv.flatten(1))
    before = paged.cache.clone()
    options = {"num_heads": heads}
    if tables is not None:
        options["rotary"] = tuple(table.to(device) for table in tables)
    if norm is not None:
        options["qk_norm"] = norm[0]
    assert prepare(packed, paged.cache, paged.table, *columns(tokens, device), **options) is None
    after = packed.cpu().view_as(qkv)
    # K and V are read, not written.
    assert torch.equal(after[:, heads:], qkv[:, heads:])
    q_norm, k_norm = (None, None) if norm is None else norm[1]
    for token, (row, position) in enumerate(tokens):
        q, k, v = qkv[token].split((heads, paged.kv_heads, paged.kv_heads))
        if row < 0:
            assert torch.equal(after[token], qkv[token])
            continue
        slot = paged.slot(row, position)
        written = paged.cache[slot]
        assert written.shape == (2, paged.kv_heads, size)
        assert_values(written[1], v, None if norm is None else norm[0], assert_close)
        if tables is None and norm is None:
            assert torch.equal(after[token, :heads], q)
            assert torch.equal(written[0].cpu(), k)
        else:
            assert_close(after[token, :heads], normed_and_rotated(q, position, q_norm, tables))
            assert_close(written[0], normed_and_rotated(k, position, k_norm, tables))
        before[slot] = written
    assert_same(paged.cache, before)


@pytest.mark.parametrize(
    ("rotary", "qk_norm"),
    [
        (False, None),
        (True, None),
        (False, "rms"),
        (True, "rms"),
        (False, "rms_values"),
        (True, "rms_values"),
        (False, "uclip"),
        (False, "uclip_each"),
        (True, "uclip"),
        (True, "uclip_each"),
        (False, "layer"),
        (True, "layer"),
    ],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size"), [(3, 3, 64, 16), (7, 1, 24, 64), (4, 2, 80, 24), (8, 4, 128, 16)]
)
def test_prepare(
    implementation, heads, kv_heads, size, block_size, rotary, qk_norm, dtype, device, randn, assert_close
):
    tokens = [*TOKENS[:3], SKIPPED, *TOKENS[3:], SKIPPED]
    paged = Scattered(LENGTHS, kv_heads, size, block_size, dtype, device, randn)
    qkv = randn(len(tokens), heads + 2 * kv_heads, size, dtype=dtype)
    tables = rotary_tables(71, size, dtype) if rotary else None
    norm = NORMS[qk_norm](size, dtype, device, randn, (heads, kv_heads)) if qk_norm else None
    check(implementation.prepare, qkv, tokens, paged, heads, assert_close, tables, norm)


@pytest.mark.parametrize("qk_norm", [None, "rms", "layer", "uclip_each"])
@pytest.mark.parametrize(("size", "rotated"), [(64, 16), (96, 24), (80, 20), (80, 32), (12, 4), (24, 22), (256, 64)])
def test_rotation_of_the_first_channels(implementation, size, rotated, qk_norm, dtype, device, randn, assert_close):
    """The others pass through, normed; pairs lie half of the rotated channels apart, whatever the head's size."""
    paged = Scattered(LENGTHS, 2, size, 16, dtype, device, randn)
    qkv = randn(len(TOKENS), 10 + 2 * 2, size, dtype=dtype)
    norm = NORMS[qk_norm](size, dtype, device, randn, (10, 2)) if qk_norm else None
    check(implementation.prepare, qkv, TOKENS, paged, 10, assert_close, rotary_tables(71, rotated, dtype), norm)


@pytest.mark.parametrize("norm", [None, rms_norm])
def test_rows_of_the_tables_that_are_not_the_positions(implementation, norm, dtype, device, randn, assert_close):
    """K went to the slot of the table's row, or was rotated by its position; a skipped token's row was read."""
    tokens, table_rows = [*TOKENS[:3], SKIPPED, *TOKENS[3:]], [95, 70, 76, 2**30, 64, 0, 74, 63, 90]
    paged, tables = Scattered(LENGTHS, 2, 24, 16, dtype, device, randn), rotary_tables(96, 12, dtype)
    norms, formulas = (None, (None, None)) if norm is None else norm(24, dtype, device, randn)
    qkv = randn(len(tokens), 5 + 2 * 2, 24, dtype=dtype)
    packed = qkv.flatten(1).clone().to(device)
    rows = torch.tensor(table_rows, dtype=torch.int32, device=device)
    rotary = tuple(table.to(device) for table in tables)
    where = columns(tokens, device)
    implementation.prepare(
        packed, paged.cache, paged.table, *where, num_heads=5, rotary=rotary, qk_norm=norms, rotary_rows=rows
    )
    for token, ((row, position), table_row) in enumerate(zip(tokens, table_rows, strict=True)):
        q, k, v = qkv[token].split((5, 2, 2))
        if row < 0:
            assert torch.equal(packed[token].cpu(), qkv[token].flatten())
            continue
        written = paged.cache[paged.slot(row, position)]
        assert_close(packed[token].view(9, 24)[:5], normed_and_rotated(q, table_row, formulas[0], tables))
        assert_close(written[0], normed_and_rotated(k, table_row, formulas[1], tables))
        assert torch.equal(written[1].cpu(), v)


@pytest.mark.parametrize("rotated", [0, 12])
def test_queries_of_a_layer_that_shares_keys(implementation, rotated, dtype, device, randn, assert_close):
    """The projection is q alone, K and V are another layer's: whatever was written would be over those."""
    tokens = [*TOKENS[:3], SKIPPED, *TOKENS[3:]]
    paged, tables = Scattered(LENGTHS, 2, 24, 16, dtype, device, randn), rotary_tables(96, rotated, dtype)
    norm, formulas = rms_norm(24, dtype, device, randn)
    q = randn(len(tokens), 6, 24, dtype=dtype)
    packed, before = q.flatten(1).clone().to(device), paged.cache.clone()
    options = {"num_heads": 6, "qk_norm": norm, "append": False}
    if rotated:
        options["rotary"] = tuple(table.to(device) for table in tables)
    implementation.prepare(packed, paged.cache, paged.table, *columns(tokens, device), **options)
    assert_same(paged.cache, before)
    for token, (row, position) in enumerate(tokens):
        if row < 0:
            assert torch.equal(packed[token].cpu(), q[token].flatten())
            continue
        expected = normed_and_rotated(q[token], position, formulas[0], tables if rotated else None)
        assert_close(packed[token].view(6, 24), expected)


@pytest.mark.parametrize("count", [1, 63, 130])
def test_many_tokens(implementation, count, device, randn, assert_close):
    """A whole prompt, in order."""
    tokens = [(0, position) for position in range(count)]
    paged = Scattered([count, 5], 1, 8, 16, torch.float32, device, randn)
    qkv, tables = randn(count, 4, 8), rotary_tables(count, 8, torch.float32)
    check(implementation.prepare, qkv, tokens, paged, 2, assert_close, tables)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (5, 1, 24), (40, 8, 128)])
def test_norm_over_all_heads(implementation, heads, kv_heads, size, dtype, device, randn, assert_close):
    """q by itself and k by itself, in rows that lie apart; v and what lies between the rows stay."""
    numbers = heads * size, kv_heads * size
    qkv, weights = randn(9, numbers[0] + 2 * numbers[1], dtype=dtype), [(1 + 0.1 * randn(n)).to(dtype) for n in numbers]
    # No two tokens, and neither q and k, are of one size.
    qkv[:, : numbers[0]] *= torch.arange(1, 10)[:, None]
    wide = torch.full((9, qkv.shape[1] + 30), nan, dtype=dtype, device=device)
    packed = wide[:, 13 : 13 + qkv.shape[1]].copy_(qkv)
    assert implementation.whole_rms_norm_(packed, *(weight.to(device) for weight in weights), EPS) is None
    start = 0
    for count, weight in zip(numbers, weights, strict=True):
        x = qkv[:, start : start + count].double()
        exact = x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()
        assert_close(packed[:, start : start + count], exact)
        start += count
    assert torch.equal(packed[:, start:].cpu(), qkv[:, start:])
    assert wide[:, :13].isnan().all() and wide[:, 13 + qkv.shape[1] :].isnan().all()


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 64), (5, 1, 24), (16, 16, 72)])
def test_rotation_alone(implementation, heads, kv_heads, size, dtype, device, randn, assert_close):
    """By angles of each token and pair, in rows that lie apart; v and what lies between the rows stay."""
    qkv, angles = randn(9, heads + 2 * kv_heads, size, dtype=dtype), 3 * randn(9, size // 2)
    numbers, columns = (heads + kv_heads) * size, qkv[0].numel()
    wide = torch.full((9, columns + 30), nan, dtype=dtype, device=device)
    packed = wide[:, 13 : 13 + columns].copy_(qkv.flatten(1))
    cos, sin = (torch.cat((each, each), 1) for each in (angles.cos(), angles.sin()))
    assert implementation.rotate_(packed, cos.to(device), sin.to(device), heads=heads + kv_heads) is None
    pairs = torch.complex(*qkv[:, : heads + kv_heads].double().unflatten(2, (2, -1)).unbind(2))
    exact = pairs * torch.complex(cos.double(), sin.double())[:, None, : size // 2]
    assert_close(packed[:, :numbers], torch.cat((exact.real, exact.imag), 2).flatten(1))
    assert torch.equal(packed[:, numbers:].cpu(), qkv[:, heads + kv_heads :].flatten(1))
    assert wide[:, :13].isnan().all() and wide[:, 13 + columns :].isnan().all()


def test_rows_that_lie_apart(implementation, dtype, device, randn, assert_close):
    """Columns of a wider tensor at an odd place: nothing is written beside q."""
    paged = Scattered(LENGTHS, 2, 24, 16, dtype, device, randn)
    qkv, tables = randn(8, 7, 24, dtype=dtype), rotary_tables(71, 24, dtype)
    norm = rms_norm(24, dtype, device, randn)
    wide = torch.full((8, 7 * 24 + 30), nan, dtype=dtype, device=device)
    inner = wide[:, 13 : 13 + 7 * 24]
    check(implementation.prepare, qkv, TOKENS, paged, 3, assert_close, tables, norm, packed=inner)
    assert wide[:, :13].isnan().all()
    assert wide[:, 13 + 7 * 24 :].isnan().all()


def test_nothing_but_skipped_tokens(dtype, device, randn, assert_close):
    paged = Scattered(LENGTHS, 2, 24, 16, dtype, device, randn)
    qkv, tables = randn(3, 6, 24, dtype=dtype), rotary_tables(8, 24, dtype)
    check(kernel.prepare, qkv, [SKIPPED] * 3, paged, 2, assert_close, tables)


def test_norm_keeps_statistics_in_fp32(implementation, device, randn, assert_close):
    """Squares of large fp16 values overflow fp16, so the mean must not be taken in it."""
    paged = Scattered(LENGTHS, 1, 64, 16, torch.float16, device, randn)
    qkv = (randn(8, 4, 64) * 1000).half()
    check(implementation.prepare, qkv, TOKENS, paged, 2, assert_close, None, rms_norm(64, torch.float16, device, randn))


@pytest.mark.xdist_group("large_memory")
def test_kernel_offsets_past_int32(device, randn, far_apart):
    """In the rows of the projection, in the blocks of K, and from K's half to V's."""
    blocks, dtype = 2**19 + 3, torch.float16
    # 2^12 elements a block: from 2^19 on, blocks lie past 2^31.
    cache = untouched(2, blocks, 1, 64, 64, dtype=dtype, device=device)
    table = torch.tensor([[blocks - 1], [0], [blocks - 2]], dtype=torch.int32, device=device)
    positions = [20, 5, 33]
    qkv = randn(3, 4 * 64, dtype=dtype).to(device)
    near, far = qkv.clone(), far_apart(qkv)
    small = torch.full((2, 3, 1, 64, 64), nan, dtype=dtype, device=device)
    where = columns(list(enumerate(positions)), device)
    options = {"num_heads": 2, "rotary": tuple(t.to(device) for t in rotary_tables(34, 64, dtype))}
    kernel.prepare(near, small, torch.tensor([[2], [0], [1]], dtype=torch.int32, device=device), *where, **options)
    kernel.prepare(far, cache, table, *where, **options)
    assert torch.equal(far, near)
    for row, (block, position) in enumerate(zip((2, 0, 1), positions, strict=True)):
        assert torch.equal(cache[:, int(table[row, 0]), 0, position], small[:, block, 0, position])
