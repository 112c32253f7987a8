"""K and V as bytes with scales: written to the byte as the reference says, and attended to as they are stored."""

import pytest
import torch
from torch import nan

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.e4m3 import dequantized, quantized
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.kv_cache import reference as kv_cache
from rosebatch_kernels.kv_cache.layout import cache_rows
from rosebatch_kernels.paged_attention import reference
from rosebatch_kernels.qkv import reference as qkv_reference
from tests.kernels.decode_step import shared_keys
from tests.kernels.scattered import Scattered, attention

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

SCALE = 0.17
APPEND, PREPARE = Launchers("kv_cache.kernel").append, Launchers("qkv.kernel").prepare
DECODE, PREFILL = Launchers("paged_attention.decode").decode, Launchers("paged_attention.prefill").prefill
PREFILL_SHARED = Launchers("paged_attention.prefill_shared").prefill_shared
NUM_SPLITS = Launchers("paged_attention.sizes").num_splits
IMPLEMENTATIONS = {"reference": (reference.decode, reference.prefill), "kernel": (DECODE, PREFILL)}
# K/V heads, queries of each, channels, tokens of a block: tiles within a block and across blocks.
SHAPES = [
    (2, 1, 64, 16),
    (1, 2, 128, 64),
    (2, 4, 80, 24),
    (1, 7, 96, 64),
    (1, 2, 256, 32),
    (1, 5, 12, 16),
    (1, 4, 512, 16),
]


def empty(blocks, kv_heads, block_size, size, device="cpu"):
    """A cache of NaN, and its scales."""
    shape = 2, blocks, kv_heads, block_size
    return torch.full((*shape, size), 127, dtype=torch.uint8).to(device), torch.full((*shape, 1), nan).to(device)


def as_stored(paged):
    """The sequences' K and V as e4m3 from now on; returns the scales. All else stays NaN."""
    paged.cache, scales = quantized(paged.cache)
    paged.k, paged.v = ([dequantized(*quantized(x)) for x in side] for side in (paged.k, paged.v))
    return scales


def test_each_number_is_the_nearest_of_its_row():
    """A tie goes to the even one, by a list of all numbers; the largest of a row is 448, and zeros are zeros."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert numbers[-1] == 448
    ties = (numbers[1:] + numbers[:-1]) / 2
    between = numbers[:-1] + (numbers[1:] - numbers[:-1]) * torch.rand(126, generator=torch.Generator().manual_seed(0))
    for row in (ties, -ties, between, numbers):
        codes, scales = quantized(torch.cat((row, torch.tensor([448.0]))).float()[None])
        assert scales.item() == 1 and codes[0, -1] == 126
        distance = (row.abs().float().double()[:, None] - numbers).abs()
        odd = torch.arange(127) % 2 * 1e-12
        assert torch.equal((codes[0, :-1] & 127).long(), (distance + odd).argmin(1))
        assert torch.equal((codes[0, :-1] >> 7).bool(), row < 0)
    codes, scales = quantized(torch.zeros(2, 8))
    assert not codes.any() and torch.equal(dequantized(codes, scales), torch.zeros(2, 8))
    x = torch.randn(50, 64) * 10.0 ** torch.arange(-25, 25)[:, None]
    assert ((dequantized(*quantized(x)) - x).abs() <= x.abs() / 16 + x.abs().amax(-1, keepdim=True) / 448 / 512).all()


def hard_rows(dtype):
    """Heads of zeros, of both signs of zero, of ties, of one large number, of very small and of very large ones."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat(((numbers[1:] + numbers[:-1]) / 2, torch.tensor([448.0, -448.0])))
    wide = torch.randn(128) * 10.0 ** torch.linspace(-6, 3, 128)
    rows = [torch.zeros(128), -torch.zeros(128), ties, -ties, wide, wide * 2.0**-20, wide * 8, torch.randn(128)]
    rows += [torch.eye(128)[5] * 3e4, torch.full((128,), 7e-4)]
    return torch.stack(rows)[:, None].repeat(1, 2, 1).to(dtype)


def test_append_to_the_byte(dtype, device):
    """A rounding of its own would make a prompt's K and V differ from those that a decode step appends."""
    k = hard_rows(dtype)
    v, slots = k.flip(0) * 1.7, torch.arange(3, 3 + len(k))
    table = torch.tensor([[2, 0]])
    rows = cache_rows(table, torch.zeros_like(slots), slots, 2, 8)
    expected, scales = empty(4, 2, 8, 128)
    kv_cache.append(expected, k, v, rows, scales)
    found, own_scales = empty(4, 2, 8, 128, device)
    APPEND(found, k.to(device), v.to(device), rows.to(device), own_scales)
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(own_scales.cpu().nan_to_num(7), scales.nan_to_num(7))
    assert (expected == 127).sum() == expected.numel() - 2 * k.numel(), "and nothing else was written"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_finite_stays_so(device):
    """Logits must show it, as those of 16 bits do."""
    k = torch.ones(2, 1, 16)
    k[0, 0, 3], k[1, 0, 5] = nan, torch.inf
    rows = torch.tensor([[0], [1]])
    for append, on in ((kv_cache.append, "cpu"), (APPEND, device)):
        cache, scales = empty(1, 1, 4, 16, on)
        append(cache, k.to(on), k.to(on), rows.to(on), scales)
        assert not dequantized(cache, scales)[:, 0, 0, :2].isfinite().all(-1).any()


@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_prepare_writes_as_append_does(size, dtype, device, randn):
    """Tokens of row -1, the padding of graphs, write nothing: not to the first block either."""
    qkv = randn(6, (4 + 2 * 2) * size, dtype=dtype)
    table, rows = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32), torch.tensor([0, 1, -1, 0, -1, 1]).int()
    positions = torch.tensor([3, 17, 0, 16, 0, 0]).int()
    expected, scales = empty(6, 2, 16, size)
    qkv_reference.prepare(qkv.clone(), expected, table, rows, positions, num_heads=4, scales=scales)
    cache, own_scales = empty(6, 2, 16, size, device)
    arguments = (x.to(device) for x in (table, rows, positions))
    PREPARE(qkv.to(device), cache, *arguments, num_heads=4, scales=own_scales)
    assert torch.equal(cache.cpu(), expected)
    assert torch.equal(own_scales.cpu().nan_to_num(7), scales.nan_to_num(7))
    assert own_scales[:, [0, 5]].isnan().all()


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize(("kv_heads", "group", "size", "block_size"), SHAPES)
def test_decode(implementation, kv_heads, group, size, block_size, append, dtype, device, randn, assert_close):
    """The new token is attended to as it is stored, too; one row is not live."""
    check_decode(implementation, kv_heads, group, size, block_size, append, dtype, device, randn, assert_close)


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize(("soft_cap", "with_sinks", "window"), [(1.5, False, 0), (0.0, True, 0), (1.5, True, 40)])
def test_caps_sinks_and_windows(
    implementation, soft_cap, with_sinks, window, append, dtype, device, randn, assert_close
):
    """The weights' further factor must not reach a sink."""
    sinks = torch.linspace(-2, 4, 4).to(dtype) if with_sinks else None
    options = {"soft_cap": soft_cap, "sinks": sinks, "window": window}
    check_decode(implementation, 2, 2, 24, 16, append, dtype, device, randn, assert_close, **options)


def check_decode(
    implementation, kv_heads, group, size, block_size, append, dtype, device, randn, assert_close, **options
):
    positions = [0, 30, 63, 700, 64]
    heads = kv_heads * group
    paged = Scattered([n + (not append) for n in positions], kv_heads, size, block_size, dtype, "cpu", randn)
    scales = as_stored(paged)
    qkv = randn(len(positions), heads + 2 * kv_heads, size, dtype=dtype)
    exact = []
    for row, k, v in zip(qkv, paged.k, paged.v, strict=True):
        q, *new = row.split((heads, kv_heads, kv_heads))
        if append:
            k, v = (torch.cat((x, dequantized(*quantized(y))[None])) for x, y in zip((k, v), new, strict=True))
        exact.append(attention(q, k, v, SCALE, **options))
    where = torch.tensor(positions, dtype=torch.int32)
    limits = where + 1
    limits[1] = 0
    tensors = (x.to(device) for x in (qkv.flatten(1), paged.cache, paged.table, where, limits))
    workspace = DecodeWorkspace(len(positions), heads, kv_heads, size, torch.device(device), NUM_SPLITS)
    scales = scales.to(device)
    sinks = options.pop("sinks", None)
    options |= {"num_heads": heads, "scale": SCALE, "append": append, "scales": scales}
    if sinks is not None:
        options["sinks"] = sinks.to(device)
    out = implementation[0](*tensors, workspace, **options)
    live = [0, 2, 3, 4]
    assert_close(out[live], torch.stack(exact)[live])


@pytest.mark.parametrize(("kv_heads", "group", "size", "block_size"), SHAPES)
@pytest.mark.parametrize("window", [0, 24])
def test_prefill(implementation, kv_heads, group, size, block_size, window, dtype, device, randn, assert_close):
    """Chunks behind their prefixes, their own tokens as they are stored."""
    chunks = [(0, 40), (70, 5), (33, 64)]
    heads = kv_heads * group
    paged = Scattered([sum(chunk) for chunk in chunks], kv_heads, size, block_size, dtype, "cpu", randn)
    scales = as_stored(paged).to(device)
    q = randn(sum(length for _, length in chunks), heads, size, dtype=dtype)
    tiles, exact = [], []
    for sequence, (prefix, length) in enumerate(chunks):
        tiles.append([sequence, len(exact), prefix, length])
        for end in range(prefix + 1, prefix + length + 1):
            k, v = paged.k[sequence][:end], paged.v[sequence][:end]
            exact.append(attention(q[len(exact)], k, v, SCALE, window))
    tensors = (x.to(device) for x in (q.flatten(1), paged.cache, paged.table, torch.tensor(tiles, dtype=torch.int32)))
    out = implementation[1](*tensors, num_heads=heads, scale=SCALE, window=window, scales=scales)
    assert_close(out, torch.stack(exact))


@pytest.mark.parametrize(("kv_heads", "group", "size", "block_size"), [(2, 1, 64, 16), (1, 4, 128, 64), (1, 3, 80, 16)])
def test_keys_that_rows_share(kv_heads, group, size, block_size, dtype, device, randn, assert_close):
    """Partial results of shared keys and a row's own ones have weights of the same size; so do tiles of chunks."""
    positions, keys, heads = [64, 90, 130], 64, kv_heads * group
    paged = Scattered(positions, kv_heads, size, block_size, dtype, "cpu", randn, [([0, 1, 2], keys)])
    scales = as_stored(paged).to(device)
    qkv = randn(3, heads + 2 * kv_heads, size, dtype=dtype)
    exact, last = [], []
    for row, k, v in zip(qkv, paged.k, paged.v, strict=True):
        q, *new = row.split((heads, kv_heads, kv_heads))
        last.append(attention(q, k, v, SCALE))
        k, v = (torch.cat((x, dequantized(*quantized(y))[None])) for x, y in zip((k, v), new, strict=True))
        exact.append(attention(q, k, v, SCALE))
    where = torch.tensor(positions, dtype=torch.int32)
    cache, table = paged.cache.to(device), paged.table.to(device)
    q = qkv.flatten(1).to(device)
    options = {"num_heads": heads, "scale": SCALE, "scales": scales}
    # Each row's last key, as chunks of one token.
    tiles, pieces = [[0, 3, keys, 0, 3]], [[row, row, 1, n - 1] for row, n in enumerate(positions)]
    of_tiles = (torch.tensor(each, dtype=torch.int32).to(device) for each in (tiles, pieces))
    pieces_have_keys = torch.tensor(positions) > keys
    out = PREFILL_SHARED(q, cache, table, *of_tiles, **options)
    assert_close(out[pieces_have_keys], torch.stack(last)[pieces_have_keys])
    shared = shared_keys(3, [([0, 1, 2], 0, 32, 0), ([0, 1, 2], 32, keys, 1)], torch.device(device))
    workspace = DecodeWorkspace(3, heads, kv_heads, size, torch.device(device), NUM_SPLITS, shares=True)
    out = DECODE(q, cache, table, where.to(device), where.to(device) + 1, workspace, keys=shared, **options)
    assert_close(out, torch.stack(exact))


@pytest.mark.parametrize("prefilled", [False, True])
def test_small_weights_of_small_values(prefilled, device, randn):
    """A weight times its value's scale sank below fp16: of one key that outweighs 2,000, nothing but that one was left.

    That one's value is zero here, so that the others' sum shows.
    """
    keys, size = 2000, 64
    paged = Scattered([keys], 1, size, 64, torch.float16, "cpu", randn)
    q = torch.zeros(2, size)
    q[:, 0] = 10
    paged.k[0][:, 0, 0], paged.v[0] = 0, paged.v[0].abs() * 1e-2
    paged.k[0][0, 0, 0], paged.v[0][0] = 11 / SCALE / 10, 0
    where = torch.arange(keys)
    paged.cache, scales = empty(len(paged.cache[0]), 1, 64, size)
    rows = cache_rows(paged.table, torch.zeros_like(where), where, 1, 64)
    kv_cache.append(paged.cache, paged.k[0], paged.v[0], rows, scales)
    paged.k, paged.v = ([dequantized(*quantized(x[0]))] for x in (paged.k, paged.v))
    exact = attention(q, paged.k[0], paged.v[0], SCALE)
    cache, table, scales = (x.to(device) for x in (paged.cache, paged.table, scales))
    options = {"num_heads": 2, "scale": SCALE, "scales": scales}
    q = q.half().view(1, -1).to(device)
    if prefilled:
        out = PREFILL(q, cache, table, torch.tensor([[0, 0, keys - 1, 1]]).int().to(device), **options)
    else:
        where = torch.tensor([keys - 1], dtype=torch.int32, device=device)
        workspace = DecodeWorkspace(1, 2, 1, size, torch.device(device), NUM_SPLITS)
        out = DECODE(q, cache, table, where, where + 1, workspace, append=False, **options)
    assert exact.min() > 1e-4
    torch.testing.assert_close(out[0].double().cpu(), exact, rtol=0.02, atol=0)


@pytest.mark.parametrize(("of_keys", "of_values"), [(2.0**12, 1.0), (1.0, 2.0**10), (2.0**-60, 2.0**-60)])
def test_keys_and_values_of_any_size(of_keys, of_values, device, randn):
    """bf16 has a range that fp16 has not: q, K and V come within it. bf16 itself is for a GPU."""
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    paged = Scattered([70], 1, 64, 64, torch.float32, "cpu", randn)
    paged.k[0], paged.v[0] = paged.k[0] * of_keys, paged.v[0] * of_values
    where = torch.arange(70)
    paged.cache, scales = empty(len(paged.cache[0]), 1, 64, 64)
    rows = cache_rows(paged.table, torch.zeros_like(where), where, 1, 64)
    kv_cache.append(paged.cache, paged.k[0], paged.v[0], rows, scales)
    q = (randn(2, 64) / of_keys).clamp(-6e4, 6e4).to(dtype)
    exact = attention(q, *(dequantized(*quantized(x[0])) for x in (paged.k, paged.v)), SCALE)
    tile = torch.tensor([[0, 0, 69, 1]], dtype=torch.int32).to(device)
    cache, table, scales = (x.to(device) for x in (paged.cache, paged.table, scales))
    out = PREFILL(q.view(1, -1).to(device), cache, table, tile, num_heads=2, scale=SCALE, scales=scales)
    top = float(exact.abs().max())
    torch.testing.assert_close(out[0].double().cpu(), exact, rtol=0.02, atol=0.02 * top + 2.0**-24)
