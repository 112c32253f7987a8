"""A last product added to the residual, with the norm behind it divided between two products, against float64."""

from importlib import import_module

import pytest
import torch

from rosebatch_kernels.linear import kernel, residual
from rosebatch_kernels.linear.factored import Factored
from rosebatch_kernels.linear.streamed import StreamedLinear

# (rows, in, out): one row; a single part; no multiple of a tile; uneven parts; as many parts as there can be.
SHAPES = [(1, 64, 32), (7, 200, 48), (33, 1000, 100), (64, 768, 33), (17, 2048, 1024)]
EPS = 1e-5
pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@pytest.fixture(params=["reference", "residual"])
def add_product(request):
    return import_module(f"rosebatch_kernels.linear.{request.param}").add_product


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def narrow(request):
    """The kernels are for 16-bit types alone; these numbers are small enough for fp16."""
    return request.param


def make(shape, dtype, device, randn):
    """x and the residual with rows that lie apart, weight and bias of a size that keeps results around 1."""
    rows, size_in, size_out = shape
    x = randn(rows, size_in + 8, dtype=dtype).to(device)[:, :size_in]
    onto = randn(rows, size_out + 8, dtype=dtype).to(device)[:, :size_out]
    weight = (randn(size_out, size_in) * size_in**-0.5).to(device, dtype)
    bias, gain = (randn(size_out, dtype=dtype).to(device) for _ in range(2))
    return x, weight, bias, onto, gain


def whole(normed):
    """The normed rows in float64."""
    factor = torch.rsqrt(normed.squares.double().sum(0) / normed.value.shape[1] + normed.eps)
    return normed.value.double() * factor[:, None]


def exact(x, weight, bias, onto, gain, scale):
    product = x.double() @ weight.double().t()
    total = onto.double() + scale * (product if bias is None else product + bias.double())
    factor = torch.rsqrt(total.square().mean(1, keepdim=True) + EPS)
    return total * factor * gain.double(), total


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("biased", "scale"), [(False, 1.0), (True, 0.25)])
def test_add_product(add_product, shape, biased, scale, narrow, device, randn, assert_close):
    x, weight, bias, onto, gain = make(shape, narrow, device, randn)
    bias, gain = (bias, gain.float()) if biased else (None, gain)
    counters = residual.make_counters(weight)
    normed, total = add_product(x, weight, bias, onto, gain, EPS, scale, counters)
    expected, exact_total = exact(x, weight, bias, onto, gain, scale)
    assert (normed.value.dtype, total.dtype, normed.squares.dtype) == (narrow, narrow, torch.float32)
    assert len(normed) == len(x)
    assert_close(total, exact_total)
    # Rounded twice: the sum, and its product with the weight.
    torch.testing.assert_close(whole(normed), expected, rtol=2**-7, atol=2**-7)
    assert not counters.any(), "the next call counts from zero"


def test_the_same_rows_give_the_same_bits(narrow, device, randn):
    """Whichever part comes last, they are added up in one order."""
    x, weight, _, onto, gain = make((64, 2048, 1024), narrow, device, randn)
    counters = residual.make_counters(weight)
    first, *others = (
        residual.add_product(x[:rows], weight, None, onto[:rows], gain, EPS, 1.0, counters) for rows in (64, 64, 33)
    )
    for normed, total in others:
        rows = len(total)
        assert torch.equal(total, first[1][:rows])
        assert torch.equal(normed.value, first[0].value[:rows])
        assert torch.equal(normed.squares, first[0].squares[:, :rows])


@pytest.mark.parametrize("implementation", ["reference", "kernel"])
@pytest.mark.parametrize("activation", [None, "silu_mul"])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_behind_applies_the_factors(
    implementation, activation, biased, narrow, device, randn, assert_close
):
    """Behind the sum over all columns, and in front of bias and activation."""
    linear = import_module(f"rosebatch_kernels.linear.{implementation}").linear
    x, weight, bias, *_ = make((33, 300, 48), narrow, device, randn)
    squares = torch.rand(5, 33, generator=torch.Generator().manual_seed(0)).to(device) * 60
    normed = Factored(x.contiguous(), squares, EPS)
    out = linear(normed, weight, bias if biased else None, activation)
    product = whole(normed) @ weight.double().t() + (bias.double() if biased else 0)
    gate, up = product.chunk(2, -1)
    assert_close(out, product if activation is None else torch.nn.functional.silu(gate) * up)


def test_which_products_add(narrow, device, randn, assert_close):
    """fp16 has no room for rows without their norm's factor; cuBLAS has no factors."""
    x, weight, bias, onto, gain = make((70, 256, 256), narrow, device, randn)
    layer = StreamedLinear(weight, bias)
    assert [layer.adds(rows) for rows in (x[:64].bfloat16(), x[:65].bfloat16(), x[:64].half())] == [True, False, False]
    normed, total = layer.add(x[:64], onto[:64], gain, EPS)
    behind = StreamedLinear(weight)
    expected, exact_total = exact(x[:64], weight, bias, onto[:64], gain, 1.0)
    assert_close(total, exact_total)
    out = behind(normed)
    torch.testing.assert_close(out.double(), expected @ weight.double().t(), rtol=2**-5, atol=2**-5)
    assert torch.equal(out, kernel.linear(normed, weight))
