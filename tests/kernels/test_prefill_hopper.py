"""Hopper's own prefill kernel: which calls are for it, and what it alone can get wrong.

``test_paged_prefill.py`` compares it with float64, as it does the others.
"""

import sys

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch.engine.triton_runner.warm_up import warm_up_tokens
from rosebatch_kernels.common.device import HOPPER, INTERPRETER, Device
from rosebatch_kernels.paged_attention import prefill
from rosebatch_kernels.paged_attention.sizes import SIZES
from tests.kernels.test_paged_prefill import SCALE, cut, exact_rows, make

H100 = Device.of_arch(HOPPER, 132)
kernel = Launchers("paged_attention.prefill")


def program_of(
    *, heads=8, kv_heads=2, size=128, block=64, dtype=torch.bfloat16, stored=None, before=0, after=0, scale=0.1, on=H100
):
    """Of q with so many columns before and after it, and a cache in the dtype ``stored``."""
    q = torch.empty(3, before + heads * size + after, dtype=dtype)[:, before:]
    cache = torch.empty(2, 5, kv_heads, block, size, dtype=stored or dtype)
    return prefill.hopper_program(q, cache, num_heads=heads, scale=scale, sizes=SIZES.of(on), device=on)


@pytest.mark.parametrize(
    ("served", "keys"),
    [
        ({}, 128),
        ({"size": 64}, 128),
        ({"dtype": torch.float16}, 128),
        ({"heads": 7, "kv_heads": 1}, 128),
        ({"size": 256, "block": 8}, 64),
        ({"before": 8, "after": 16}, 128),
    ],
)
def test_calls_that_it_serves(served, keys):
    assert program_of(**served).keys == keys


@pytest.mark.parametrize(
    "other",
    [
        {"on": Device.of_arch(100, 148)},
        {"on": Device.of_arch(89, 128)},
        {"on": INTERPRETER},
        {"heads": 2},
        {"heads": 6},
        {"dtype": torch.float32},
        {"stored": torch.float8_e4m3fn},
        {"size": 20},
        {"size": 264},
        {"block": 20},
        {"before": 1, "after": 7},
        {"after": 3},
        {"scale": -0.1},
    ],
)
def test_calls_that_it_does_not_serve(other):
    """A launch would fail in the middle of a run, or compute with what was not copied."""
    assert program_of(**other) is None


@pytest.mark.parametrize(("kv_heads", "size"), [(8, 128), (8, 64), (4, 256), (2, 128)])
def test_both_forms_are_warmed_up(kv_heads, size):
    """The first large prompt step would wait for the compiler: its K and V do not stay in L2 in one part."""
    prefill_hopper = pytest.importorskip("rosebatch_kernels.paged_attention.prefill_hopper")
    forms = {prefill_hopper.sections_of(tokens, kv_heads, size) for tokens in warm_up_tokens(16384)}
    assert forms == {prefill_hopper.sections_of(tokens, kv_heads, size) for tokens in range(1, 16385)} == {1, kv_heads}


def test_a_triton_without_it(monkeypatch):
    """Gluon is experimental: a version without some name of it runs the kernel that all GPUs have."""
    monkeypatch.setitem(sys.modules, "rosebatch_kernels.paged_attention.prefill_hopper", None)
    assert prefill._hopper_kernel.__wrapped__() is None


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 200])
def test_more_items_than_programs(window, narrow, randn, assert_close):
    """A program that goes on to its next item must wait for the right copies: barriers have two phases.

    q stands first in the rows of the projection.
    """
    chunks = [(0, n) for n in range(1, 301, 37)] + [(700, 20)]
    q, paged = make(chunks, 4, 4, 128, 64, narrow, "cuda", randn)
    exact = exact_rows(q, paged, chunks, window)
    if window:
        paged.free_before(len(chunks) - 1, 701 - window)
    queries = torch.nn.functional.pad(q.flatten(1), (0, 64), value=torch.nan).cuda()
    arguments = queries, paged.cache, paged.table, cut(chunks).cuda()
    assert len(arguments[-1]) * 4 * 2 > torch.cuda.get_device_properties("cuda").multi_processor_count
    options = {"num_heads": 16, "scale": SCALE, "window": window}
    out = kernel.prefill(*arguments, **options)
    assert_close(out, exact)
    assert torch.equal(kernel.prefill(*arguments, **options), out)


@pytest.mark.gpu
def test_a_graph_reads_what_the_tensors_hold_now(randn):
    """TMA's descriptors are arguments of the launch, so a graph keeps addresses, and nothing of what was there."""
    chunks = [(70, 130), (0, 65)]
    arguments, fresh = ([], [])
    for each in (arguments, fresh):
        q, paged = make(chunks, 2, 2, 128, 64, torch.bfloat16, "cuda", randn)
        each += [q.flatten(1).cuda(), paged.cache, paged.table, cut(chunks).cuda()]
    options = {"num_heads": 4, "scale": SCALE}
    kernel.prefill(*arguments, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.prefill(*arguments, **options)
    for place, value in zip(arguments, fresh, strict=True):
        place.copy_(value)
    graph.replay()
    assert torch.equal(out, kernel.prefill(*fresh, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("before", [0, 3, 511])
@pytest.mark.parametrize("after", [0, 40, 700])
@pytest.mark.parametrize("chunks", [[(0, 20)], [(70, 130), (0, 65)], [(0, n) for n in range(1, 301, 37)]], ids=len)
def test_padding_is_left_out(chunks, before, after, randn):
    """Programs leave out tiles behind the last one with rows: one too many was left out, or a program had no item."""
    q, paged = make(chunks, 4, 4, 128, 64, torch.bfloat16, "cuda", randn)
    tiles = cut(chunks).cuda()
    options = {"num_heads": 16, "scale": SCALE}
    expected = kernel.prefill(q.flatten(1).cuda(), paged.cache, paged.table, tiles, **options)
    padded = torch.nn.functional.pad(tiles, (0, 0, before, after))
    assert torch.equal(kernel.prefill(q.flatten(1).cuda(), paged.cache, paged.table, padded, **options), expected)
