"""Products with 4-bit integers, and what decodes them, against float64."""

import os
from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.device import INTERPRETER, device_of
from rosebatch_kernels.common.packing import empty_words, pack_
from rosebatch_kernels.common.sizes import value_at
from rosebatch_kernels.int4 import int4_linear, reference
from rosebatch_kernels.int4.int4_linear import Int4Linear
from rosebatch_kernels.int4.layout import GROUPS, QUARTER, Int4Weight, narrowest
from rosebatch_kernels.int4.sizes import SIZES, Sizes, splits_of
from tests.helpers.interpreter import add_up_exactly
from tests.kernels.test_linear_kernel import ACTIVATIONS

kernel, decode_ = Launchers("int4.kernel"), Launchers("int4.decode").decode_
IMPLEMENTATIONS = {"reference": reference, "kernel": kernel}
# (rows, in, out): one row; half a chunk; none a multiple of a tile; more rows than a tile has; as many parts as there
# can be.
SHAPES = [(1, 128, 64), (3, 64, 8), (17, 200, 72), (70, 384, 136), (130, 136, 24), (2, 4096, 64)]
pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@pytest.fixture(params=GROUPS)
def group(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["", "zeros"])
def zeros(request):
    return request.param


def make(shape, group, zeros, dtype, device, randn):
    """x with rows that lie apart, weight and bias of a size that keeps results around 1; all codes and zeros occur."""
    rows, size_in, size_out = shape
    groups = -(-size_in // group)
    x = randn(rows, size_in + 8, dtype=dtype).to(device)[:, :size_in]
    codes = (randn(size_out, size_in) * 1000).int() % 16
    words = empty_words((size_out, size_in), QUARTER, "cpu")
    pack_(words[:, :5], codes[:5].byte())
    pack_(words[:, 5:], codes[5:].byte())
    scales = ((randn(groups, size_out) * 0.2).exp() / 6 * size_in**-0.5).to(dtype)
    own = ((randn(groups, size_out) * 1000).int() % 16).to(device) if zeros else None
    weight = Int4Weight(words.to(device), scales.to(device), own, size_in, group)
    spread = 8 if own is None else own.cpu().repeat_interleave(group, 0)[:size_in].t()
    values = (codes - spread) * scales.double().repeat_interleave(group, 0)[:size_in].t()
    return x, weight, randn(size_out, dtype=dtype).to(device), values.to(device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(implementation, shape, group, zeros, biased, narrow, device, randn, assert_close):
    x, weight, bias, values = make(shape, group, zeros, narrow, device, randn)
    out = implementation.linear(x, weight, bias if biased else None)
    assert out.dtype == narrow
    assert_close(out, x.double() @ values.t() + (bias.double() if biased else 0))


@pytest.mark.parametrize("shape", [(7, 200, 48), (33, 128, 272), (70, 64, 16)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activated(implementation, shape, biased, activation, narrow, device, randn, assert_close):
    """A gate and what it gates are halves of a tile that lie half the weight apart."""
    x, weight, bias, values = make(shape, 64, True, narrow, device, randn)
    out = implementation.linear(x, weight, bias if biased else None, activation)
    assert_close(out, ACTIVATIONS[activation](x.double() @ values.t() + (bias.double() if biased else 0)))


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_are_exact_but_for_sums(implementation, shape, group, zeros, narrow, device, randn):
    """Codes less zeros are exact in 16 bits, and scales multiply sums in fp32.

    So a result is off by no more than fp32 sums of the products themselves. A weight that is rounded to bf16 is off
    by up to 2^-9 of each product.
    """
    x, weight, _, values = make(shape, group, zeros, narrow, device, randn)
    options = {"sizes": replace(Sizes(), rounding=())} if implementation is kernel else {}
    assert_exact(implementation.parts(x, weight, **options), x, values)


@pytest.mark.parametrize("shape", SHAPES)
def test_rounded_values_are_those_that_are_decoded(shape, group, zeros, narrow, device, randn):
    """Each is rounded once, so that a product does not depend on which way many rows go."""
    x, weight, _, values = make(shape, group, zeros, narrow, device, randn)
    sizes = replace(Sizes(), rounding=((0, Sizes().rounding[0][1]),))
    assert_exact(kernel.parts(x, weight, sizes=sizes), x, values.float().to(narrow).double())


def test_scales_of_another_type_are_not_rounded_to_that_of_x(device, randn):
    """A value would be rounded twice: with its scale, and on its own."""
    x, weight, _, values = make((70, 200, 72), 32, True, torch.bfloat16, device, randn)
    assert_exact(kernel.parts(x.half(), weight), x.half(), values)


def assert_exact(out, x, values):
    assert out.dtype == torch.float32
    error = (out.double().sum(0) - x.double() @ values.t()).abs()
    assert (error <= x.shape[1] * 2.0**-23 * (x.double().abs() @ values.abs().t())).all()


def test_parts_are_as_many_as_fill_a_gpu():
    dtype = torch.float16
    for rows, columns, size, splits in [(2, 4096, 64, 8), (2, 1024, 64, 2), (70, 4096, 8192, 4), (2, 512, 64, 1)]:
        scales = torch.empty(columns // 128, size, dtype=dtype)
        weight = Int4Weight(empty_words((size, columns), QUARTER, "cpu"), scales, None, columns, 128)
        assert splits_of(rows, weight, dtype, sizes=Sizes()) == splits


@pytest.mark.parametrize("rows", [1, 16])
def test_a_rows_bits_do_not_depend_on_its_neighbours(rows, device, randn):
    """Rows of a tile that are not there are zeros."""
    x, weight, bias, _ = make((16, 200, 48), 64, True, torch.float16, device, randn)
    assert torch.equal(kernel.linear(x[:rows], weight, bias), kernel.linear(x, weight, bias)[:rows])


@pytest.mark.thorough
@pytest.mark.parametrize("group", GROUPS)
def test_one_order_of_sums_for_all_numbers_of_rows(group, narrow, device, randn, monkeypatch):
    """With ``--batch-invariant``: few rows were added up in parts, very many multiplied with rounded values."""
    if device == "cpu":
        add_up_exactly(monkeypatch)
    most = 200 if device == "cpu" else 600
    x, weight, bias, _ = make((most, 1024, 24), group, True, narrow, device, randn)
    sizes = replace(Sizes(), max_rows=most - 1)
    layer = Int4Linear(weight, bias, None, sizes=sizes, device=device_of(torch.device(device)))
    onto = randn(most, 24, dtype=narrow).to(device)

    def of_rows(layer, rows):
        own = x[:rows]
        product = layer.parts(own).sum(0).to(narrow) if layer.divides(own) else layer.product(own)
        total = layer.add_(own, onto[:rows].clone()) if layer.adds_in_place(own) else onto[:rows] + product
        return torch.stack([layer(own), product, total])

    def is_invariant(layer):
        whole = of_rows(layer, most)
        return all(torch.equal(of_rows(layer, n), whole[:, :n]) for n in (1, 9, 17, 40, 70, 130))

    assert is_invariant(layer.in_one_order()) and not is_invariant(layer)


@pytest.mark.parametrize("shape", [(1, 128, 64), (1, 200, 72), (1, 4096, 40)])
@pytest.mark.parametrize(("first", "count"), [(0, 40), (8, 16)])
def test_decode(shape, first, count, group, zeros, narrow, device, randn):
    """The values of a product of many rows are those that the checkpoint's format gives, bit by bit."""
    _, weight, _, values = make(shape, group, zeros, narrow, device, randn)
    out = decode_(torch.empty(count, shape[1], dtype=narrow, device=device), weight, first)
    assert torch.equal(out, values[first : first + count].float().to(narrow))
    assert torch.equal(out, reference.decode(weight, narrow, first, count))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_few_rows_and_many(biased, ordered, narrow, device, randn, assert_close):
    """Many rows are multiplied with values, decoded into a scratch that holds some rows of the weight: here 128."""
    sizes = replace(Sizes(), max_rows=16, max_rows_in_parts=8, scratch=200 * 2 * 130, min_rows_onto=20)
    x, weight, bias, values = make((24, 200, 272), 32, True, narrow, device, randn)
    order = torch.randperm(200, device=device) if ordered else None
    record = device_of(torch.device(device))
    layer = Int4Linear(weight, bias if biased else None, order, sizes=sizes, device=record)
    exact = (x[:, order] if ordered else x).double() @ values.t()
    for rows in (8, 16, 24):
        assert_close(layer.product(x[:rows]), exact[:rows])
        assert_close(layer(x[:rows]), exact[:rows] + (bias.double() if biased else 0))
        assert [layer.divides(x[:rows]), layer.activates(x[:rows], "relu")] == [rows == 8, rows < 24]
    torch.testing.assert_close(layer.parts(x[:8]).double().sum(0), exact[:8], rtol=0, atol=1e-5)
    assert_close(layer.activated(x[:8], "relu"), torch.relu(exact[:8] + (bias.double() if biased else 0)))
    assert layer.adds_in_place(x) == (not biased)
    onto = randn(24, 272, dtype=narrow).to(device)
    expected = onto.double() + exact
    assert layer.add_(x, onto) is onto
    assert_close(onto, expected)


@pytest.mark.parametrize("biased", [False, True])
def test_parts_are_added_up_for_who_cannot(biased, narrow, device, randn, assert_close):
    """A whole product of few rows: its programs would each read all columns, one after the other."""
    x, weight, bias, values = make((5, 2048, 48), 128, True, narrow, device, randn)
    layer = Int4Linear(weight, bias if biased else None, None, sizes=Sizes(), device=device_of(torch.device(device)))
    assert value_at(Sizes().min_summed, 5) <= len(layer.parts(x)) == 4
    exact = x.double() @ values.t()
    assert_close(layer.product(x), exact)
    assert_close(layer(x), exact + (bias.double() if biased else 0))


def test_the_scratch_is_bounded(randn, monkeypatch):
    """Values of the whole weight would take as much memory as it has in 16 bits."""
    few = replace(Sizes(), max_rows=0, scratch=2**17)
    x, weight, *_ = make((2, 128, 1400), 128, False, torch.float16, "cpu", randn)
    layer, sizes = Int4Linear(weight, None, None, sizes=few, device=INTERPRETER), []
    monkeypatch.setattr(int4_linear, "decode_", lambda out, *_, **__: sizes.append(out.nbytes) or out.zero_())
    layer(x)
    assert sum(sizes) == 1400 * 128 * 2
    assert max(sizes) <= 2**17


@pytest.mark.parametrize("dtype_of", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_keep_their_numbers(dtype_of, randn):
    """In 16 bits if these have them all; in the type of x, if that has them, so that products of many rows round."""
    scales = randn(9, 9, dtype=dtype_of).float()
    assert narrowest(scales).dtype == dtype_of
    assert torch.equal(narrowest(scales).float(), scales)
    halves = torch.full((2, 2), 0.5)
    assert [narrowest(halves, each).dtype for each in (torch.float16, torch.bfloat16)] == [
        torch.float16,
        torch.bfloat16,
    ]


@pytest.mark.gpu
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="inline assembly is compiled")
@pytest.mark.parametrize("rows", [1, 33, 100])
def test_assembly_and_arithmetic_agree(rows, group, zeros, narrow, randn):
    """The assembly that runs on GPUs, and what the interpreter runs in its place, give the same bits."""
    gpu = device_of(torch.device("cuda"))
    x, weight, bias, _ = make((rows, 512, 136), group, zeros, narrow, "cuda", randn)
    options = {"sizes": SIZES.of(gpu)}
    module = kernel._module
    plain = module.linear(x, weight, bias, device=INTERPRETER, **options)
    assert torch.equal(module.linear(x, weight, bias, device=gpu, **options), plain)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16, 300])
def test_a_product_in_a_graph(rows, randn):
    """The scratch lies in the graph's own memory; replays follow new rows of x."""
    gpu = device_of(torch.device("cuda"))
    x, weight, bias, _ = make((rows, 512, 640), 128, True, torch.bfloat16, "cuda", randn)
    layer = Int4Linear(weight, bias, torch.randperm(512, device="cuda"), sizes=SIZES.of(gpu), device=gpu)
    x = x.contiguous()
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, layer(x))
