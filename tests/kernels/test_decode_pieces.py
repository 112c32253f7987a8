"""Decode attention whose bits follow from a row alone: pieces of keys at fixed places, folded in order."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.shared_keys import Pieces, SharedKeys
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.paged_attention import sizes as module
from tests.kernels.decode_step import check, make_step, with_shared_keys

kernel = Launchers("paged_attention.decode")
FASTEST = module.SIZES.of(device_of(torch.device("cuda")))
INVARIANT = FASTEST.invariant()
PIECES = INVARIANT.decode.pieces
# On both sides of ends of tiles, of pieces, and of where a piece is longer than the shortest.
POSITIONS = [0, 1, 255, 256, 257, 700, 1111]
pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def with_splits(sizes, splits, min_keys=1):
    """The same sizes with so many programs for a row, whatever the batch."""
    return replace(sizes, decode=replace(sizes.decode, splits=((0, splits),), min_keys=((0, min_keys),)))


def run(step, sizes, rows=None, **options):
    """The step, or these rows of it, with a fresh workspace full of NaN."""
    qkv, cache, table, positions, limits, _ = step.arguments
    rows = list(range(len(qkv))) if rows is None else rows
    heads, (_, _, kv_heads, _, size) = step.options["num_heads"], cache.shape
    splits = partial(module.num_splits, sizes=sizes)
    pieces, shares = sizes.decode.pieces, "keys" in options
    workspace = DecodeWorkspace(len(rows), heads, kv_heads, size, cache.device, splits, shares=shares, pieces=pieces)
    for each in (workspace, workspace.shared) if shares else (workspace,):
        each.sums.fill_(float("nan"))
        each.stats.fill_(float("nan"))
    tables = table if "queries" in options else table[rows]
    chosen = qkv[rows], cache.clone(), tables, positions[rows], limits[rows], workspace
    out = kernel.decode(*chosen, **step.options, **options, sizes=sizes)
    assert not workspace.arrived.any()
    return out


@pytest.mark.parametrize("splits", [1, 4, 16])
@pytest.mark.parametrize(
    ("group", "window", "append", "block_size"),
    [(1, 0, True, 64), (4, 0, False, 16), (2, 300, True, 24), (3, 600, False, 64)],
)
def test_the_result_is_right(splits, group, window, append, block_size, dtype, device, randn, assert_close):
    """Short rows, rows without a cached key, windows that begin in a piece, and splits without a piece."""
    options = {"window": window, "append": append}
    step = make_step(POSITIONS, 2, group, 24, block_size, dtype, device, randn, idle=(1,), **options)
    step.workspace = step.arguments[5] = DecodeWorkspace(
        len(POSITIONS), 2 * group, 2, 24, torch.device(device), lambda *_: splits, pieces=PIECES
    )
    sizes = with_splits(INVARIANT, splits)
    check(partial(kernel.decode, sizes=sizes), step, assert_close)


@pytest.mark.parametrize(("soft_cap", "with_sinks"), [(1.5, False), (0.0, True)])
def test_soft_cap_and_sinks(soft_cap, with_sinks, dtype, device, randn, assert_close):
    """A sink counts once, whoever folds the pieces."""
    sinks = torch.linspace(-2, 4, 2).to(dtype) if with_sinks else None
    step = make_step([0, 700], 1, 2, 24, 16, dtype, device, randn, soft_cap=soft_cap, sinks=sinks)
    for splits in (1, 4):
        sizes = with_splits(INVARIANT, splits)
        assert torch.allclose(run(step, sizes).double().cpu(), step.exact, rtol=0.02, atol=0.02)


@pytest.mark.thorough
@pytest.mark.parametrize("programs", [(1, 512), (2, 1), (4, 512), (8, 1), (16, 1), (16, 128)])
@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize("group", [1, 2])
def test_bits_do_not_depend_on_the_batch(group, window, programs, dtype, device, randn):
    """A row alone, among others, and with any number of programs: the table takes as many as fill the GPU."""
    step = make_step(POSITIONS, 2, group, 24, 64, dtype, device, randn, window=window)
    expected = run(step, with_splits(INVARIANT, 1))
    sizes = with_splits(INVARIANT, *programs)
    assert torch.equal(run(step, sizes), expected)
    for row in range(len(POSITIONS)):
        assert torch.equal(run(step, sizes, [row]), expected[row : row + 1])
    assert torch.equal(run(step, sizes, [6, 2]), expected[[6, 2]])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("queries", "group", "size", "window"),
    [(2, 2, 24, 0), (8, 2, 64, 600), (4, 4, 24, 0), (8, 4, 24, 0), (4, 1, 24, 0)],
)
@pytest.mark.parametrize("pieces", [True, False])
def test_rows_of_a_sequence_are_those_of_single_ones(
    pieces, queries, group, size, window, splits, dtype, device, randn
):
    """Drafts are verified together, and not all rows of a sequence have one: the bits are those of one row a step.

    Without pieces, the batch decides how keys are divided, so they may differ in their last bits.
    """
    sizes = with_splits(INVARIANT if pieces else FASTEST, splits)
    begins, live = [0, 5, 300, 1002, 700], [queries, 1, queries - 1, queries, 2]
    lasts = [begin + queries for begin in begins]
    step = make_step(lasts, 2, group, size, 64, dtype, device, randn, window=window, append=False)
    _, cache, table, *_ = step.arguments
    qkv = randn(len(begins) * queries, (2 * group + 4) * size, dtype=dtype).to(device)
    rows = [
        (begin + j, 2000 if j < count else 0) for begin, count in zip(begins, live, strict=True) for j in range(queries)
    ]
    positions, limits = torch.tensor(rows, dtype=torch.int32, device=device).t().contiguous()
    step.arguments[:5] = qkv, cache, table, positions, limits
    found = run(step, sizes, queries=queries)
    step.arguments[2] = table.repeat_interleave(queries, 0)
    expected = run(step, sizes)
    there = (positions < limits).nonzero()[:, 0]
    torch.testing.assert_close(found[there], expected[there], rtol=0.02, atol=0.02)
    assert torch.equal(found[there], expected[there]) or not pieces


def shared_by(rows, end, batch, device, piece=INVARIANT.decode.piece_keys):
    """The keys before ``end`` in two items; ``rows`` have them in common."""
    middle = end // piece // 2 * piece
    spans = [span for span in ((0, middle), (middle, end)) if span[0] < span[1]]
    lines = [(0, len(rows), first, stop, piece) for first, stop in spans] + [(0, 0, 0, 0, 0)]
    begins, counts = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    begins[rows], counts[rows] = end, end // piece
    made = torch.tensor(lines, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32), begins, counts
    return SharedKeys(*(each.to(device) for each in made))


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("group", "append", "qk_norm"), [(1, True, None), (2, True, "rms"), (3, False, None)])
def test_shared_pieces_are_right(splits, group, append, qk_norm, device, randn, assert_close):
    """A row whose only own key is the new one, rows with own pieces, and one that shares nothing."""
    rows, positions = [0, 1, 3, 4], [512, 700, 90, 1111, 513]
    options = {"append": append, "shared": [(rows, 512)], "qk_norm": qk_norm, "rotary": append}
    step = make_step(positions, 2, group, 24, 64, torch.float16, device, randn, **options)
    keys, sizes = shared_by(rows, 512, len(positions), device), with_splits(INVARIANT, splits)
    assert_close(run(step, sizes, keys=keys), step.exact)


@pytest.mark.gpu
@pytest.mark.parametrize("qk_norm", [None, "rms", "layer", "rms_values"])
@pytest.mark.parametrize(
    ("kv_heads", "group", "size"), [(8, 2, 128), (8, 4, 128), (2, 7, 64), (4, 1, 64), (2, 8, 256), (1, 8, 512)]
)
@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_shared_pieces_have_the_same_bits(kv_heads, group, size, narrow, qk_norm, randn):
    """Without them, a row would differ where another one begins alike."""
    device, rows = "cuda", list(range(70))
    positions = [1024 + 7 * row % 400 for row in rows] + [77, 1400]
    options = {"shared": [(rows, 1024)], "qk_norm": qk_norm, "rotary": True, "scale": size**-0.5}
    step = make_step(positions, kv_heads, group, size, 64, narrow, device, randn, **options)
    for end in (512, 1024):
        found = run(step, INVARIANT, keys=shared_by(rows[:64], end, len(positions), device))
        assert torch.equal(found, run(step, INVARIANT))


@pytest.mark.gpu
def test_shared_keys_without_pieces_have_others(randn):
    """Else the test above would see nothing."""
    rows = list(range(64))
    step = make_step([1100] * 64, 8, 2, 128, 64, torch.bfloat16, "cuda", randn, shared=[(rows, 1024)])
    items = with_shared_keys(partial(kernel.decode, sizes=FASTEST), [(rows, 0, 1024, 0)])
    arguments = [*step.arguments[:5], DecodeWorkspace(64, 16, 8, 128, torch.device("cuda"), None, shares=True)]
    assert not torch.equal(items(*arguments, **step.options), run(step, FASTEST))


@pytest.mark.parametrize(("keys", "piece"), [(0, 256), (4096, 256), (4097, 512), (9000, 1024), (131_072, 8192)])
def test_pieces_of_long_rows(keys, piece):
    """The host cuts shared keys where the kernel cuts a row's own: at most 16 pieces, twice as long each time."""
    assert Pieces(256, 16).of(keys) == piece


def test_splits_of_their_own_sums_do(device, randn):
    """Else the test above would see nothing. Weights of keys that lie far apart show each order of additions."""
    step = make_step(POSITIONS, 2, 2, 24, 64, torch.float32, device, randn)
    outs = [run(step, with_splits(FASTEST, splits)) for splits in (1, 4, 16)]
    assert not torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])


def test_many_keys_take_no_more_memory(device, randn, assert_close):
    """Pieces of long rows are longer: results of each piece of 256 keys would be gigabytes for 131,072 tokens."""
    sizes = replace(INVARIANT, decode=replace(INVARIANT.decode, pieces=2))
    step = make_step([1100, 600], 1, 2, 24, 64, torch.float32, device, randn)
    one, several = run(step, with_splits(sizes, 1)), run(step, with_splits(sizes, 16))
    assert torch.equal(one, several)
    assert_close(one, step.exact)


def test_memory_for_pieces():
    """Rows that are not split leave nothing."""

    def splits(batch, kv_heads):
        return 4 if batch <= 2 else 1

    spaces = [DecodeWorkspace(8, 4, 2, 16, torch.device("cpu"), splits, pieces=pieces) for pieces in (0, 16)]
    assert [len(space.sums) for space in spaces] == [8 * 4, 2 * 16 * 4]
