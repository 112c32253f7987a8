"""Latent attention over scattered blocks against float64: what appends, decode steps, and chunks behind prefixes."""

from itertools import pairwise

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.chunks import pack_chunks
from rosebatch_kernels.latent_attention import reference
from tests.kernels.scattered import EPS, Scattered, assert_same, attention, normed_and_rotated, rotary_tables
from tests.kernels.test_paged_prefill import cut

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

IMPLEMENTATIONS = {"reference": reference, "kernel": Launchers("latent_attention.kernel")}
EXPANDED = {"reference": reference, "kernel": Launchers("latent_attention.expanded")}
# Nobody's default; small, so that fp32 has the digits of sums over 576 channels.
SCALE = 0.05
# Heads, rank, rotated channels, block size: odd sizes, more heads than a program has, and those of a model.
SHAPES = [(1, 16, 2, 16), (3, 40, 12, 24), (20, 24, 8, 64), (40, 32, 6, 16), (16, 512, 64, 64)]


def make(lengths, shape, dtype, device, randn):
    """Sequences of rows as they lie in the cache."""
    _, rank, rotated, block_size = shape
    paged = Scattered(lengths, 1, rank + rotated, block_size, dtype, device, randn)
    paged.cache = paged.cache[:1].clone()
    return paged


def exact(q, rows, rank):
    """Of one token's ``q [heads, W]`` over ``rows [keys, 1, W]``."""
    return attention(q, rows, rows[..., :rank], SCALE).view(len(q), rank)


def ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("given_rows", [False, True])
def test_prepare(implementation, shape, given_rows, dtype, device, randn, assert_close):
    """A wrong half, row of the tables or place shows; tokens that nobody reads write nothing."""
    heads, rank, rotated, block_size = shape
    positions = [0, block_size, 2 * block_size - 1, 7, 30]
    paged = make(positions, shape, dtype, device, randn)
    before, q = paged.cache.clone(), randn(5, heads, rank + rotated, dtype=dtype)
    wide = randn(5, rank + rotated + 3, dtype=dtype)
    norm, tables = (1 + 0.1 * randn(rank)).to(dtype), rotary_tables(200, rotated, dtype)
    places = [3 * position % 190 for position in positions] if given_rows else positions
    # The other channels of q are whoever's.
    turned, rows = q[..., 5:].clone().to(device), ints([0, 1, 2, -1, 4], device)
    appended = torch.full((5, rank + rotated), torch.nan, dtype=dtype, device=device) if given_rows else None
    implementation.prepare(
        turned,
        wide.to(device)[:, : rank + rotated],
        paged.cache,
        paged.table,
        rows,
        ints(positions, device),
        norm=norm.to(device),
        eps=EPS,
        rotary=tuple(table.to(device) for table in tables),
        rotary_rows=ints(places, device) if given_rows else None,
        **({} if appended is None else {"appended": appended}),
    )
    live = [0, 1, 2, 4]
    expected = [normed_and_rotated(q[t, :, rank:], places[t], rotary=tables) for t in live]
    assert_close(turned[live, :, rank - 5 :], torch.stack(expected))
    assert torch.equal(turned[..., : rank - 5].cpu(), q[..., 5:rank])
    for token in live:
        own = wide[token, :rank].double()
        latent = own / (own.square().mean() + EPS).sqrt() * norm.double()
        key = normed_and_rotated(wide[token, rank : rank + rotated], places[token], rotary=tables)
        place = paged.slot(token, positions[token])
        assert_close(paged.cache[place][0, 0], torch.cat((latent, key)))
        before[place] = paged.cache[place]
        if appended is not None:
            assert torch.equal(appended[token], paged.cache[place][0, 0])
    assert_same(paged.cache, before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prepare_without_positions(implementation, shape, dtype, device, randn, assert_close):
    """Kimi Linear: q stays, and the key behind a latent is appended as it is, all of it."""
    heads, rank, rotated, block_size = shape
    positions = [0, 2 * block_size - 1, 7]
    paged = make(positions, shape, dtype, device, randn)
    before, q = paged.cache.clone(), randn(3, heads, rank + rotated, dtype=dtype).to(device)
    wide, norm = randn(3, rank + rotated + 3, dtype=dtype), (1 + 0.1 * randn(rank)).to(dtype)
    latents, same, where = wide.to(device)[:, : rank + rotated], q.clone(), ints(positions, device)
    appended = torch.full_like(latents, torch.nan, memory_format=torch.contiguous_format)
    options = {"norm": norm.to(device), "eps": EPS, "rotary": None, "appended": appended}
    implementation.prepare(q, latents, paged.cache, paged.table, ints([0, 1, -1], device), where, **options)
    assert torch.equal(q, same)
    for token in (0, 1):
        own, place = wide[token, :rank].double(), paged.slot(token, positions[token])
        found = paged.cache[place][0, 0].cpu()
        assert_close(found[:rank], own / (own.square().mean() + EPS).sqrt() * norm.double())
        assert torch.equal(found[rank:], wide[token, rank : rank + rotated])
        assert torch.equal(appended[token].cpu(), found)
        before[place] = paged.cache[place]
    assert_same(paged.cache, before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", [[1, 64, 65, 17], [300, 5, 129]], ids=str)
def test_decode(implementation, shape, lengths, dtype, device, randn, assert_close):
    """Undivided and divided keys, blocks of NaN behind them, and rows that are not live."""
    heads, rank, rotated, _ = shape
    paged = make(lengths, shape, dtype, device, randn)
    q = randn(len(lengths) + 1, heads, rank + rotated, dtype=dtype)
    table = torch.cat((paged.table, paged.table[:1]))
    positions, limits = [n - 1 for n in lengths] + [5], [n + 3 for n in lengths] + [5]
    where = ints(positions, device), ints(limits, device)
    out = implementation.decode(q.to(device), paged.cache, table, *where, rank=rank, scale=SCALE)
    expected = [exact(q[row], rows, rank) for row, rows in enumerate(paged.k)]
    assert out.dtype == dtype
    assert_close(out[:-1], torch.stack(expected))


def test_several_rows_of_a_sequence(implementation, dtype, device, randn, assert_close):
    """Drafts stand behind a last token; each row sees the keys up to its own, by the one table of its sequence."""
    shape = 3, 40, 12, 24
    paged, q = make([150, 30], shape, dtype, device, randn), randn(6, 3, 52, dtype=dtype)
    positions, limits = [147, 148, 149, 28, 29, 30], [200, 200, 200, 30, 30, 30]
    where = ints(positions, device), ints(limits, device)
    out = implementation.decode(q.to(device), paged.cache, paged.table, *where, rank=40, scale=SCALE, queries=3)
    expected = [exact(q[row], paged.k[row // 3][: positions[row] + 1], 40) for row in range(5)]
    assert_close(out[:5], torch.stack(expected))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chunks", [[(0, 1), (0, 65), (63, 2)], [(30, 70), (100, 3), (0, 64)]], ids=str)
def test_prefill(implementation, shape, chunks, dtype, device, randn, assert_close):
    """Chunks of many sequences behind their prefixes; tiles of padding."""
    heads, rank, rotated, _ = shape
    paged = make([sum(chunk) for chunk in chunks], shape, dtype, device, randn)
    q = randn(sum(length for _, length in chunks), heads, rank + rotated, dtype=dtype)
    tiles = torch.cat((cut(chunks), torch.zeros(2, 4, dtype=torch.int32))).to(device)
    out = implementation.prefill(q.to(device), paged.cache, paged.table, tiles, rank=rank, scale=SCALE)
    rows = [(number, place) for number, (begin, count) in enumerate(chunks) for place in range(begin, begin + count)]
    expected = [exact(q[t], paged.k[number][: place + 1], rank) for t, (number, place) in enumerate(rows)]
    assert_close(out, torch.stack(expected))


def test_bits_of_a_chunk_depend_on_no_cut(dtype, device, randn):
    """A prompt in chunks of any size has the bits of the whole prompt."""
    shape = 4, 24, 8, 16
    paged, q = make([150], shape, dtype, device, randn), randn(150, 4, 32, dtype=dtype).to(device)

    def attended(begin, end):
        tiles = cut([(begin, end - begin)]).to(device)
        kernel = IMPLEMENTATIONS["kernel"].prefill
        return kernel(q[begin:end], paged.cache, paged.table, tiles, rank=24, scale=SCALE)

    whole = attended(0, 150)
    for cuts in ((0, 1, 150), (0, 63, 64, 65, 150), (0, 37, 101, 150)):
        assert torch.equal(torch.cat([attended(*pair) for pair in pairwise(cuts)]), whole)


@pytest.mark.parametrize("expanded", EXPANDED.values(), ids=EXPANDED)
@pytest.mark.parametrize(
    ("shape", "nope", "size"), [((2, 16, 2, 16), 10, 18), ((3, 40, 12, 24), 70, 20), ((4, 512, 64, 64), 192, 256)]
)
@pytest.mark.parametrize("chunks", [[(0, 1), (0, 130)], [(30, 70), (100, 3), (0, 64), (257, 65)]], ids=str)
def test_expanded_prefill(expanded, shape, nope, size, chunks, device, randn, assert_close):
    """Keys and values of a step, latents of a prefix, or both: as if all were latents.

    NaN of other rows and of blocks behind a prefix shows, and so does a prefix of no keys.
    """
    heads, rank, rotated, _ = shape
    # Larger numbers exceed shared memory, and the interpreter has no product of smaller ones.
    dtype = torch.float32 if str(device) == "cpu" else torch.bfloat16
    paged = make([sum(chunk) for chunk in chunks], shape, dtype, device, randn)
    tokens = sum(length for _, length in chunks)
    q = randn(tokens, heads, nope + rotated + 3, dtype=dtype)[..., 3:]
    of_keys, of_values = (randn(heads, *each).div(rank**0.5).to(dtype) for each in ((rank, nope), (size, rank)))
    slots = [(7 + number, begin, count) for number, (begin, count) in enumerate(chunks)]
    firsts = [sum(length for _, length in chunks[:number]) for number in range(len(chunks))]
    packed = pack_chunks(
        [(slot, row, begin, n) for (slot, begin, n), row in zip(slots, firsts, strict=True)], device, 12
    )
    fresh = torch.cat([paged.k[number][begin:, 0] for number, (begin, _) in enumerate(chunks)])
    expand = lambda matrix, dims: torch.einsum(dims, fresh[:, :rank].double(), matrix.double()).to(dtype)  # noqa: E731
    k, v = expand(of_keys, "tr,hrn->htn"), expand(of_values, "tr,hvr->htv")
    # Tokens of padding stand behind those of chunks.
    k, v, turned = (torch.cat((x, x.new_full((*x.shape[:-2], 5, x.shape[-1]), torch.nan)), -2) for x in (k, v, fresh))
    q, rows = q.to(device), ints([number for number, (_, n) in enumerate(chunks) for _ in range(n)], device)
    k, v, turned = k.to(device).transpose(0, 1), v.to(device).transpose(0, 1), turned.to(device)[:, rank:]
    out, norms = expanded.attend_fresh(q, k, v, turned, packed, scale=SCALE)
    matrices = {"of_keys": of_keys.to(device), "of_values": of_values.to(device)}
    expanded.attend_prefix_(out, norms, q, paged.cache, paged.table, rows, packed, **matrices, scale=SCALE)
    expected = []
    for number, (begin, count) in enumerate(chunks):
        latents = paged.k[number][:, 0].double()
        keys = torch.einsum("kr,hrn->khn", latents[:, :rank], of_keys.double())
        keys = torch.cat((keys, latents[:, None, rank:].expand(-1, heads, -1)), 2)
        values = torch.einsum("kr,hvr->khv", latents[:, :rank], of_values.double())
        for place in range(count):
            end, own = begin + place + 1, q[firsts[number] + place].cpu()
            expected.append(attention(own, keys[:end], values[:end], SCALE).view(heads, size))
    assert_close(out, torch.stack(expected))
