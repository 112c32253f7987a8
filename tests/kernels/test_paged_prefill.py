"""Prefill attention over scattered blocks against float64: chunks of many sequences behind their prefixes."""

import random
from dataclasses import replace

import pytest
import torch
from torch import nan

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.tiles import TILE_ROWS
from rosebatch_kernels.paged_attention import reference
from rosebatch_kernels.paged_attention.sizes import SIZES
from tests.helpers.launches import note_launches
from tests.kernels.scattered import Scattered, assert_same, attention, untouched

kernel = Launchers("paged_attention.prefill")

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

# Nobody's default.
SCALE = 0.17


def everywhere(*arguments, **options):
    """The kernel that all GPUs have."""
    sizes = SIZES.of(device_of(torch.device("cuda")))
    return kernel.prefill(*arguments, sizes=replace(sizes, prefill=replace(sizes.prefill, hopper=())), **options)


def on_hopper(q, cache, *arguments, num_heads, scale, **options):
    """Hopper's own, which must not be left out without a word."""
    if kernel.hopper_program(q, cache, num_heads=num_heads, scale=scale) is None:
        pytest.skip("the call is not for Hopper's own kernel")
    assert kernel._hopper_kernel() is not None
    return kernel.prefill(q, cache, *arguments, num_heads=num_heads, scale=scale, **options)


IMPLEMENTATIONS = {"reference": reference.prefill, "kernel": everywhere, "hopper": on_hopper}


@pytest.fixture(params=["reference", "kernel", pytest.param("hopper", marks=pytest.mark.gpu)])
def implementation(request):
    """Any of them; Triton's interpreter knows no Gluon."""
    return IMPLEMENTATIONS[request.param]


def cut(chunks, rows=TILE_ROWS, seed=0):
    """Tiles of chunks ``(prefix, length)``, packed in order, in an order of their own."""
    tiles, first = [], 0
    for sequence, (prefix, length) in enumerate(chunks):
        for start in range(0, length, rows):
            tiles.append([sequence, first + start, prefix + start, min(rows, length - start)])
        first += length
    random.Random(seed).shuffle(tiles)
    return torch.tensor(tiles, dtype=torch.int32)


def exact_rows(q, paged, chunks, window, scale=SCALE, key_ends=None, **options):
    """Of each packed row of ``q [T, heads, D]``, token by token."""
    out = []
    for sequence, (prefix, length) in enumerate(chunks):
        for position in range(prefix, prefix + length):
            first = max(0, position + 1 - window) if window else 0
            end = position + 1 if key_ends is None else key_ends[len(out)]
            k, v = (each[sequence][first:end] for each in (paged.k, paged.v))
            out.append(attention(q[len(out)], k, v, scale, **options))
    return torch.stack(out)


def make(chunks, kv_heads, group, size, block_size, dtype, device, randn):
    q = randn(sum(length for _, length in chunks), kv_heads * group, size, dtype=dtype)
    return q, Scattered([sum(chunk) for chunk in chunks], kv_heads, size, block_size, dtype, device, randn)


@pytest.mark.parametrize(
    ("chunks", "kv_heads", "group", "size", "block_size", "window"),
    [
        ([(0, 1), (0, 63), (0, 64), (0, 65)], 1, 1, 64, 16, 0),
        ([(1, 63), (63, 1), (64, 65), (65, 2)], 1, 2, 80, 64, 0),
        ([(0, 130), (30, 64)], 1, 1, 128, 16, 0),
        ([(17, 130), (100, 1)], 1, 2, 64, 24, 7),
        ([(0, 65), (70, 65)], 2, 1, 24, 16, 64),
        ([(3, 20), (0, 1)], 1, 7, 64, 64, 1),
        ([(5, 16), (0, 33)], 2, 4, 24, 24, 0),
        ([(1000, 3)], 1, 2, 64, 64, 0),
        ([(900, 65)], 1, 1, 24, 16, 200),
        ([(40, 70)], 1, 5, 96, 16, 24),
        ([(0, 70)], 1, 3, 112, 64, 24),
        ([(40, 70)], 1, 2, 12, 16, 24),
        ([(0, 40)], 1, 2, 20, 24, 1),
        ([(30, 70)], 1, 2, 256, 16, 40),
        ([(30, 70)], 1, 2, 512, 16, 0),
    ],
)
def test_prefill(implementation, chunks, kv_heads, group, size, block_size, window, dtype, device, randn, assert_close):
    q, paged = make(chunks, kv_heads, group, size, block_size, dtype, device, randn)
    before, queries = paged.cache.clone(), q.flatten(1).to(device)
    same = queries.clone()
    options = {"num_heads": kv_heads * group, "scale": SCALE, "window": window}
    out = implementation(queries, paged.cache, paged.table, cut(chunks).to(device), **options)
    assert out.dtype == dtype
    assert_close(out, exact_rows(q, paged, chunks, window))
    assert_same(paged.cache, before)
    assert torch.equal(queries, same)


@pytest.mark.parametrize("window", [0, 1, 24, 90])
@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (2, 64), (5, 24)])
def test_rows_that_see_later_keys(implementation, group, block_size, window, dtype, device, randn, assert_close):
    """Tokens of an image see each other, in tiles before the one that they end in, and behind a cached part of it."""
    # In each chunk, images as places in the sequence.
    chunks = [(0, 130), (30, 64), (70, 7), (3, 1), (0, 200)]
    images = [[(5, 9), (60, 130)], [(20, 40), (41, 42), (90, 94)], [(64, 72)], [], [(1, 199)]]
    key_ends = [
        next((end for begin, end in own if begin <= position < end), position + 1)
        for (prefix, length), own in zip(chunks, images, strict=True)
        for position in range(prefix, prefix + length)
    ]
    q, paged = make(chunks, 1, group, 24, block_size, dtype, device, randn)
    exact = exact_rows(q, paged, chunks, window, key_ends=key_ends)
    arguments = q.flatten(1).to(device), paged.cache, paged.table, cut(chunks).to(device)
    ends = torch.tensor(key_ends, dtype=torch.int32, device=device)
    options = {"num_heads": group, "scale": SCALE, "window": window}
    assert_close(implementation(*arguments, key_ends=ends, **options), exact)
    # Those of rows that see none are the text's.
    alone = implementation(*arguments, **options)
    causal = torch.tensor([end for prefix, length in chunks for end in range(prefix + 1, prefix + length + 1)])
    same = implementation(*arguments, key_ends=causal.int().to(device), **options)
    assert torch.equal(same, alone) or implementation is on_hopper


@pytest.mark.parametrize(("soft_cap", "with_sinks"), [(1.5, False), (0.0, True), (1.5, True)])
@pytest.mark.parametrize(("group", "window", "block_size"), [(1, 0, 16), (5, 24, 64), (8, 1, 24)])
def test_soft_cap_and_sinks(
    implementation, group, window, block_size, soft_cap, with_sinks, dtype, device, randn, assert_close
):
    """Each head has its own sink, which counts once, not for each tile of keys."""
    chunks = [(0, 1), (100, 20), (0, 65)]
    q, paged = make(chunks, 1, group, 24, block_size, dtype, device, randn)
    options = {"soft_cap": soft_cap, "sinks": torch.linspace(-2, 4, group).to(dtype) if with_sinks else None}
    exact = exact_rows(q, paged, chunks, window, 0.6, **options)
    if with_sinks:
        options["sinks"] = options["sinks"].to(device)
    arguments = q.flatten(1).to(device), paged.cache, paged.table, cut(chunks).to(device)
    out = implementation(*arguments, num_heads=group, scale=0.6, window=window, **options)
    assert_close(out, exact)


@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_sinks_of_any_size(implementation, sink, device, randn, assert_close):
    """One that weighs nothing, and one that leaves the keys nothing: no row may be NaN."""
    chunks, sinks = [(0, 20), (50, 30)], torch.tensor([sink, 0.0])
    q, paged = make(chunks, 1, 2, 24, 16, torch.float32, device, randn)
    arguments = q.flatten(1).to(device), paged.cache, paged.table, cut(chunks).to(device)
    out = implementation(*arguments, num_heads=2, scale=SCALE, sinks=sinks.to(device))
    assert_close(out, exact_rows(q, paged, chunks, 0, sinks=sinks))


@pytest.mark.parametrize("block_size", [8, 16, 24, 48, 64])
@pytest.mark.parametrize("window", [1, 5, 24, 300])
def test_blocks_outside_of_the_window_are_left_alone(
    implementation, window, block_size, dtype, device, randn, assert_close
):
    """Those that no token of a chunk sees may be another sequence's, and their entries in the table anything."""
    chunks = [(0, 65), (23, 2), (63, 2), (64, 30), (700, 70)]
    q, paged = make(chunks, 1, 2, 24, block_size, dtype, device, randn)
    exact = exact_rows(q, paged, chunks, window)
    for row, (prefix, _) in enumerate(chunks):
        paged.free_before(row, max(0, prefix + 1 - window))
    arguments = q.flatten(1).to(device), paged.cache, paged.table, cut(chunks).to(device)
    assert_close(implementation(*arguments, num_heads=2, scale=SCALE, window=window), exact)


@pytest.mark.parametrize("rows", [1, 13])
def test_tiles_of_fewer_rows(implementation, rows, dtype, device, randn, assert_close):
    """What a tile has fewer rows than it might have, the next one has: it must not be written by both."""
    chunks = [(0, 20), (12, 9)]
    q, paged = make(chunks, 1, 2, 24, 16, dtype, device, randn)
    tiles = cut(chunks, rows).to(device)
    out = implementation(q.flatten(1).to(device), paged.cache, paged.table, tiles, num_heads=2, scale=SCALE)
    assert_close(out, exact_rows(q, paged, chunks, 0))


def test_padding(implementation, dtype, device, randn):
    """Steps are padded to sizes that recur: rows of q in no tile, NaN here, and tiles of no rows, which write none."""
    chunks = [(3, 20), (0, 9)]
    q, paged = make(chunks, 1, 2, 24, 16, dtype, device, randn)
    queries, tiles = q.flatten(1).to(device), cut(chunks).to(device)
    same = implementation(queries, paged.cache, paged.table, tiles, num_heads=2, scale=SCALE)
    queries, tiles = (torch.nn.functional.pad(x, (0, 0, 0, 3), value=v) for x, v in ((queries, nan), (tiles, 0)))
    out = implementation(queries, paged.cache, paged.table, tiles, num_heads=2, scale=SCALE)
    assert torch.equal(out[:29], same)
    assert out[29:].isnan().all()


def test_sequences_in_any_row_of_the_table(implementation, device, randn):
    """A step's chunks stand in few rows of the table of all sequences, in no order."""
    chunks = [(3, 20), (40, 30), (0, 5)]
    q, paged = make(chunks, 1, 2, 24, 16, torch.float32, device, randn)
    tiles, queries = cut(chunks).to(device), q.flatten(1).to(device)
    same = implementation(queries, paged.cache, paged.table, tiles, num_heads=2, scale=SCALE)
    order = [5, 0, 3]
    table = paged.table[0, -1].repeat(7, paged.table.shape[1])
    table[order] = paged.table
    tiles[:, 0] = torch.tensor(order, dtype=torch.int32, device=device)[tiles[:, 0].long()]
    assert torch.equal(implementation(queries, paged.cache, table, tiles, num_heads=2, scale=SCALE), same)


@pytest.mark.parametrize("before", [0, 13])
def test_queries_at_a_stride(implementation, before, dtype, device, randn, assert_close):
    """q stands first in the rows of the projection, whose K and V columns are not read, at any place in memory."""
    chunks = [(3, 20), (0, 65)]
    q, paged = make(chunks, 1, 2, 24, 16, dtype, device, randn)
    wide = torch.full((85, before + 4 * 24 + 3), nan, dtype=dtype, device=device)
    wide[:, before : before + 48] = q.flatten(1)
    tiles = cut(chunks).to(device)
    out = implementation(wide[:, before:], paged.cache, paged.table.contiguous(), tiles, num_heads=2, scale=SCALE)
    assert_close(out, exact_rows(q, paged, chunks, 0))


@pytest.mark.parametrize("window", [0, 30])
def test_scores_of_any_size(implementation, window, device, randn, assert_close):
    """Scores of millions, where a key has a head to itself; a single one may be that far below zero."""
    chunks, scale = [(0, 20), (100, 3)], 2.0**20
    q, paged = make(chunks, 1, 2, 64, 16, torch.float32, device, randn)
    tiles, options = cut(chunks).to(device), {"num_heads": 2, "scale": scale, "window": window}
    out = implementation(q.flatten(1).to(device), paged.cache, paged.table, tiles, **options)
    assert_close(out, exact_rows(q, paged, chunks, window, scale))


def test_bits_of_a_tile_do_not_depend_on_the_others(implementation, dtype, device, randn):
    chunks = [(3, 70), (0, 33)]
    q, paged = make(chunks, 1, 2, 24, 16, dtype, device, randn)
    queries, tiles = q.flatten(1).to(device), cut(chunks).to(device)
    whole = implementation(queries, paged.cache, paged.table, tiles, num_heads=2, scale=SCALE)
    for tile in tiles:
        _, first, _, count = tile.tolist()
        alone = implementation(queries, paged.cache, paged.table, tile[None], num_heads=2, scale=SCALE)
        assert torch.equal(alone[first : first + count], whole[first : first + count])


@pytest.mark.xdist_group("large_memory")
def test_kernel_offsets_past_int32(device, randn, assert_close, far_apart):
    """In the rows of q, in the blocks of K, and from K's half to V's."""
    chunks, blocks, dtype = [(5, 3), (62, 4)], 2**19 + 3, torch.float16
    q, paged = make(chunks, 1, 1, 64, 64, dtype, device, randn)
    # 2^12 elements a block: from 2^19 on, blocks lie past 2^31.
    cache = untouched(2, blocks, 1, 64, 64, dtype=dtype, device=device)
    far = [[blocks - 1, 0], [2, blocks - 2]]
    for row, column in ((0, 0), (1, 0), (1, 1)):
        cache[:, far[row][column]] = paged.cache[:, int(paged.table[row, column])]
    queries, table = far_apart(q.flatten(1).to(device)), torch.tensor(far, dtype=torch.int32, device=device)
    out = kernel.prefill(queries, cache, table, cut(chunks).to(device), num_heads=1, scale=SCALE)
    assert_close(out, exact_rows(q, paged, chunks, 0))


def test_masked_and_other_tiles_round_alike(monkeypatch, randn):
    """The compiler fuses the scale and the largest score where no key is masked: a row's bits went by its chunk."""
    options = []
    note_launches(monkeypatch, lambda name, grid, keywords: options.append(keywords.get("enable_fp_fusion")))
    sizes = SIZES.of(device_of(torch.device("cuda")))
    cache, tiles = randn(2, 1, 1, 16, 16), torch.tensor([[0, 0, 0, 3]], dtype=torch.int32)
    for each in (sizes, sizes.invariant()):
        kernel.prefill(randn(3, 16), cache, tiles[:, :1], tiles, num_heads=1, scale=SCALE, sizes=each)
    assert options == [None, False]


@pytest.mark.parametrize("start", [1, 13, 64])
def test_one_arithmetic_gives_the_same_result(start, dtype, device, randn):
    """Chunks that begin anywhere: with the sizes of ``--batch-invariant`` on a GPU, with any in the interpreter."""
    sizes = SIZES.of(device_of(torch.device("cuda"))).invariant()
    paged = Scattered([200], 1, 16, 16, dtype, device, randn)
    q = randn(200, 32, dtype=dtype).to(device)

    def run(*chunks):
        tiles = [
            (0, first, first, min(TILE_ROWS, stop - first))
            for begin, stop in chunks
            for first in range(begin, stop, TILE_ROWS)
        ]
        tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        return kernel.prefill(q, paged.cache, paged.table, tiles, num_heads=2, scale=SCALE, sizes=sizes)

    whole, cut = run((0, 200)), run((0, start), (start, 200))
    if device == "cuda":
        assert torch.equal(cut, whole)
    else:
        torch.testing.assert_close(cut, whole)
