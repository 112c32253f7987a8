"""HP1 prefill attention over scattered blocks against the formula in float64, and against decode."""

import pytest
import torch
from torch import nan

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.hp1 import reference
from tests.kernels.hp1_exact import gated_attention, general_gate, make_gate
from tests.kernels.scattered import assert_same
from tests.kernels.test_paged_prefill import SCALE, cut, make

kernel, decode_kernel = Launchers("hp1.prefill"), Launchers("hp1.decode")
num_splits = Launchers("hp1.sizes").num_splits

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

IMPLEMENTATIONS = {"reference": reference.prefill, "kernel": kernel.prefill}


def exact_rows(q, paged, chunks, gate):
    """Of each packed row of ``q [T, heads, D]``, token by token."""
    out = []
    for sequence, (prefix, length) in enumerate(chunks):
        for position in range(prefix, prefix + length):
            k, v = paged.k[sequence][: position + 1], paged.v[sequence][: position + 1]
            out.append(gated_attention(q[len(out)], k, v, SCALE, gate))
    return torch.stack(out)


def run(implementation, q, paged, chunks, gate, **tiles):
    device = paged.cache.device
    options = {"num_heads": q.shape[1], "scale": SCALE}
    return implementation(
        q.flatten(1).to(device), paged.cache, paged.table, cut(chunks, **tiles).to(device), gate, **options
    )


@pytest.mark.parametrize(
    ("chunks", "kv_heads", "group", "size", "block_size"),
    [
        ([(0, 1), (0, 2), (0, 3), (0, 63)], 1, 1, 64, 16),
        ([(0, 64), (1, 65), (65, 2)], 1, 2, 80, 64),
        ([(30, 40)], 4, 2, 128, 64),
        ([(17, 70), (100, 1)], 1, 2, 64, 24),
        ([(3, 20), (0, 1)], 1, 7, 24, 64),
        ([(400, 3)], 1, 2, 24, 16),
    ],
)
def test_prefill(implementation, chunks, kv_heads, group, size, block_size, dtype, device, randn, assert_close):
    q, paged = make(chunks, kv_heads, group, size, block_size, dtype, device, randn)
    gate = make_gate(kv_heads * group, randn, device)
    before = paged.cache.clone()
    out = run(implementation, q, paged, chunks, gate)
    assert out.dtype == dtype
    assert_close(out, exact_rows(q, paged, chunks, gate))
    assert_same(paged.cache, before)


@pytest.mark.parametrize("sigma", [0, 2.99])
@pytest.mark.parametrize("relu_pre", [True, False])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-0.5, 0.25), (0.125, 2.0)])
def test_gates(implementation, sigma, relu_pre, bounds, device, randn, assert_close):
    """Bounds without 0 between them would give weight to keys behind the query."""
    chunks = [(3, 20), (0, 5)]
    q, paged = make(chunks, 1, 2, 24, 16, torch.float32, device, randn)
    gate = make_gate(2, randn, device, sigma=sigma, relu_pre=relu_pre, clip_min=bounds[0], clip_max=bounds[1])
    assert_close(run(implementation, q, paged, chunks, gate), exact_rows(q, paged, chunks, gate))


@pytest.mark.parametrize("taps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("block_size", [16, 2])
def test_any_taps(implementation, taps, block_size, dtype, device, randn, assert_close):
    """Numbers of each head's own, none like another: which is whose shows, and so does a filter cut off at three.

    Eight keys with pages of two lie in more than the two pages that a piece of a run lies in.
    """
    chunks = [(3, 20), (0, 5), (70, 2)]
    q, paged = make(chunks, 2, 2, 24, block_size, dtype, device, randn)
    gate = general_gate(4, randn, device, taps=taps)
    assert_close(run(implementation, q, paged, chunks, gate), exact_rows(q, paged, chunks, gate))


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 31, 33, 47, 64, 69])
def test_chunk_borders_at_every_offset(length, device, randn):
    """Whole, and cut in two at a place: the same to rounding, since only the order of additions differs."""
    total = 70
    q, paged = make([(0, total)], 1, 2, 8, 16, torch.float32, device, randn)
    gate = make_gate(2, randn, device)
    whole = run(kernel.prefill, q, paged, [(0, total)], gate)
    first = run(kernel.prefill, q[:length], paged, [(0, length)], gate)
    second = run(kernel.prefill, q[length:], paged, [(length, total - length)], gate)
    torch.testing.assert_close(torch.cat((first, second)), whole, rtol=1e-5, atol=1e-5)


def test_prefill_is_one_decode_for_each_token(device, randn, assert_close):
    """Every token of a chunk as the only one of a decode step whose K and V are in the cache."""
    length, heads, size = 67, 2, 8
    q, paged = make([(0, length)], 1, heads, size, 16, torch.float32, device, randn)
    gate = make_gate(heads, randn, device)
    packed = run(kernel.prefill, q, paged, [(0, length)], gate)
    positions = torch.arange(length, dtype=torch.int32, device=device)
    workspace = DecodeWorkspace(length, heads, 1, size, torch.device(device), num_splits)
    table = paged.table.expand(length, -1)
    steps = decode_kernel.decode(
        q.flatten(1).to(device),
        paged.cache,
        table,
        positions,
        positions + 1,
        workspace,
        gate,
        num_heads=heads,
        scale=SCALE,
        append=False,
    )
    assert_close(packed, steps.double())


def test_padding(implementation, dtype, device, randn):
    """Rows of q in no tile, NaN here, and tiles of no rows, which write none."""
    chunks = [(3, 20), (0, 9)]
    q, paged = make(chunks, 1, 2, 24, 16, dtype, device, randn)
    gate = make_gate(2, randn, device)
    queries, tiles = q.flatten(1).to(device), cut(chunks).to(device)
    options = {"num_heads": 2, "scale": SCALE}
    same = implementation(queries, paged.cache, paged.table, tiles, gate, **options)
    queries, tiles = (torch.nn.functional.pad(x, (0, 0, 0, 3), value=v) for x, v in ((queries, nan), (tiles, 0)))
    out = implementation(queries, paged.cache, paged.table, tiles, gate, **options)
    assert torch.equal(out[:29], same)
    assert out[29:].isnan().all()


def test_queries_at_a_stride(implementation, dtype, device, randn, assert_close):
    """q stands first in the rows of the projection, whose K and V columns are not read, at any place in memory."""
    chunks = [(3, 20), (0, 65)]
    q, paged = make(chunks, 1, 2, 24, 16, dtype, device, randn)
    gate = make_gate(2, randn, device)
    wide = torch.full((85, 13 + 4 * 24 + 3), nan, dtype=dtype, device=device)
    wide[:, 13 : 13 + 48] = q.flatten(1)
    tiles = cut(chunks).to(device)
    out = implementation(wide[:, 13:], paged.cache, paged.table.contiguous(), tiles, gate, num_heads=2, scale=SCALE)
    assert_close(out, exact_rows(q, paged, chunks, gate))


def test_bits_of_a_tile_do_not_depend_on_the_others(implementation, dtype, device, randn):
    chunks = [(3, 70), (0, 33)]
    q, paged = make(chunks, 1, 2, 24, 16, dtype, device, randn)
    gate, options = make_gate(2, randn, device), {"num_heads": 2, "scale": SCALE}
    queries, tiles = q.flatten(1).to(device), cut(chunks).to(device)
    whole = implementation(queries, paged.cache, paged.table, tiles, gate, **options)
    for tile in tiles:
        _, first, _, count = tile.tolist()
        alone = implementation(queries, paged.cache, paged.table, tile[None], gate, **options)
        assert torch.equal(alone[first : first + count], whole[first : first + count])
