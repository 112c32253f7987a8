"""LayerNorm and RMSNorm, alone and behind the residual addition, against the formulas in float64."""

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.linear.interface import Scales
from rosebatch_kernels.norm import reference

kernel = Launchers("norm.kernel")
IMPLEMENTATIONS = {"reference": reference, "kernel": kernel}

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

EPS = 1e-5
# One or more rows of a program, its last one cut short, and every number of warps.
SIZES = [(1, 1), (1, 63), (63, 1), (3, 1000), (1000, 64), (5, 257), (2, 2048), (2, 4096), (1, 16384)]


def naive_layer_norm(x, weight, bias):
    x, weight, bias = x.double(), weight.double(), bias.double()
    mean = x.sum(-1, keepdim=True) / x.shape[-1]
    variance = ((x - mean) ** 2).sum(-1, keepdim=True) / x.shape[-1]
    return (x - mean) / (variance + EPS).sqrt() * weight + bias


def naive_rms_norm(x, weight):
    x, weight = x.double(), weight.double()
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt() * weight


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_layer_norm(implementation, rows, size, dtype, device, randn, assert_close):
    x, weight, bias = (randn(*shape, dtype=dtype).to(device) for shape in ((rows, size), (size,), (size,)))
    out = implementation.layer_norm(x, weight, bias, EPS)
    assert out.dtype == dtype
    assert_close(out, naive_layer_norm(x, weight, bias))


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_rms_norm(implementation, rows, size, dtype, device, randn, assert_close):
    x, weight = randn(rows, size, dtype=dtype).to(device), randn(size, dtype=dtype).to(device)
    out = implementation.rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    assert_close(out, naive_rms_norm(x, weight))


def test_rms_norm_over_heads(implementation, dtype, device, randn, assert_close):
    """Qwen3 normalises each head of [T, heads, D], taken out of a wider tensor."""
    x, weight = randn(63, 7, 24, dtype=dtype).to(device)[:, 2:5], randn(24, dtype=dtype).to(device)
    out = implementation.rms_norm(x, weight, EPS)
    assert out.shape == x.shape
    assert_close(out, naive_rms_norm(x, weight))


def test_rms_norm_keeps_statistics_in_fp32(implementation, device, randn, assert_close):
    """Squares of large fp16 values overflow fp16, so the mean must not be taken in it."""
    x = (randn(3, 1000) * 1000).to(device, torch.float16)
    weight = torch.ones(1000, dtype=torch.float16, device=device)
    assert_close(implementation.rms_norm(x, weight, EPS), naive_rms_norm(x, weight))


def test_layer_norm_of_a_mean_far_from_zero(implementation, device, randn):
    """The mean of squares less the square of the mean would leave three digits of the variance."""
    x = (randn(3, 1000) + 100).to(device)
    weight, bias = torch.ones(1000, device=device), torch.zeros(1000, device=device)
    out = implementation.layer_norm(x, weight, bias, EPS)
    # Not the table's tolerance: an fp32 number around 100 is itself off by 4e-6.
    torch.testing.assert_close(out.double(), naive_layer_norm(x, weight, bias), rtol=0, atol=5e-5)


def test_rms_norm_rounds_before_the_weight(implementation, narrow, device, randn):
    """As transformers does: in 16 bits the other order gives other bits, and then other tokens."""
    x, weight = randn(1, 1000, dtype=narrow).to(device), randn(1000, dtype=narrow).to(device)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    out = implementation.rms_norm(x, weight, EPS)
    # A kernel adds up in another order, which the rounding shows in a few places.
    assert (out != weight * normed.to(narrow)).sum() <= (0 if implementation is reference else 10)
    assert (out != (weight * normed).to(narrow)).sum() > 100


def test_layer_norm_without_a_bias(implementation, dtype, device, randn, assert_close):
    """Cohere has none; a kernel that took its place for an RMSNorm would leave the mean in."""
    x, weight = (randn(63, 48) + 1).to(device, dtype), randn(48, dtype=dtype).to(device)
    exact = naive_layer_norm(x, weight, torch.zeros_like(weight))
    assert_close(implementation.layer_norm(x, weight, None, EPS), exact)
    normed, total = implementation.add_layer_norm(x, torch.zeros_like(x), weight, None, EPS)
    assert_close(normed, exact)
    assert torch.equal(total, x)


def test_rms_norm_with_an_fp32_weight_rounds_once(implementation, narrow, device, randn):
    """As Gemma and OLMo do: rounding before the weight too gives other bits."""
    # With a size near 1, normed numbers would be x itself, which needs no rounding.
    x, weight = 0.7 * randn(1, 1000, dtype=narrow).to(device), randn(1000).to(device)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    out = implementation.rms_norm(x, weight, EPS)
    assert out.dtype == narrow
    assert (out != (weight * normed).to(narrow)).sum() <= (0 if implementation is reference else 10)
    assert (out != (weight * normed.to(narrow)).to(narrow)).sum() > 100


@pytest.mark.parametrize("scale", [0.22, -1.5])
@pytest.mark.parametrize("biased", [False, True])
def test_a_scaled_addition(implementation, scale, biased, dtype, device, randn, assert_close):
    """Granite multiplies all that a sub-layer adds, its bias too, and not the residual."""
    shapes = (63, 48), (63, 48), (48,), (48,)
    x, residual, weight, x_bias = (randn(*s, dtype=dtype).to(device) for s in shapes)
    normed, total = implementation.add_rms_norm(x, residual, weight, EPS, x_bias if biased else None, scale)
    assert_close(total, residual.double() + scale * (x.double() + (x_bias.double() if biased else 0)))
    assert torch.equal(normed, implementation.rms_norm(total, weight, EPS))


@pytest.mark.parametrize("parts", [0, 1, 4])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(63, 48), (3, 1000)])
def test_add_post_norm(implementation, parts, biased, wide, rows, size, dtype, device, randn, assert_close):
    """Gemma's norms are on both sides of the addition, OLMo's on one: without the second, both results are the sum."""
    kind = torch.float32 if wide else dtype
    x = (randn(parts, rows, size) * parts**-0.5 if parts else randn(rows, size, dtype=dtype)).to(device)
    residual, x_bias = randn(rows, size, dtype=dtype).to(device), randn(size, dtype=dtype).to(device)
    post_weight, weight = randn(size, dtype=kind).to(device), randn(size, dtype=kind).to(device)
    summed = (x.double().sum(0) if parts else x.double()) + (x_bias.double() if biased else 0)
    extra = (x_bias,) if biased else ()
    normed, total = implementation.add_post_norm(x, residual, post_weight, weight, EPS, *extra)
    assert total.dtype == normed.dtype == dtype
    assert_close(total, residual.double() + naive_rms_norm(summed, post_weight))
    assert torch.equal(normed, implementation.rms_norm(total, weight, EPS))
    alone, same = implementation.add_post_norm(x, residual, post_weight, None, EPS, *extra)
    assert torch.equal(alone, total)
    assert torch.equal(same, total)


@pytest.mark.parametrize("factor", [0.3, -2.0])
@pytest.mark.parametrize("parts", [0, 4])
def test_a_factor_of_the_sum(implementation, parts, factor, dtype, device, randn, assert_close):
    """Gemma 4 multiplies all that leaves a layer, before the next norm: not what is added alone."""
    x = (randn(parts, 63, 48) if parts else randn(63, 48, dtype=dtype)).to(device)
    residual, post_weight = randn(63, 48, dtype=dtype).to(device), randn(48).to(device)
    weight, number = randn(48).to(device), torch.tensor([factor], device=device)
    normed, total = implementation.add_post_norm(x, residual, post_weight, weight, EPS, factor=number)
    summed = x.double().sum(0) if parts else x.double()
    assert_close(total, factor * (residual.double() + naive_rms_norm(summed, post_weight)))
    assert torch.equal(normed, implementation.rms_norm(total, weight, EPS))


@pytest.mark.parametrize("parts", [0, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_add(implementation, parts, biased, dtype, device, randn, assert_close):
    """Layers whose attention and MLP are parallel add the first result without a norm."""
    x = (randn(parts, 63, 48) if parts else randn(63, 48, dtype=dtype)).to(device)
    residual, x_bias = randn(63, 48, dtype=dtype).to(device), randn(48, dtype=dtype).to(device)
    before = residual.clone()
    exact = residual.double() + (x.double().sum(0) if parts else x.double()) + (x_bias.double() if biased else 0)
    out = implementation.add(x, residual, *((x_bias,) if biased else ()))
    assert out.dtype == dtype
    assert_close(out, exact)
    assert torch.equal(residual, before)


@pytest.mark.parametrize(("rows", "size"), [(63, 48), (3, 1000)])
@pytest.mark.parametrize("biased", [False, True])
def test_add_norms_return_the_sum_and_its_norm(implementation, rows, size, biased, dtype, device, randn, assert_close):
    shapes = (rows, size), (rows, size), (size,), (size,), (size,)
    x, residual, weight, bias, x_bias = (randn(*s, dtype=dtype).to(device) for s in shapes)
    before = x.clone(), residual.clone()
    extra = (x_bias,) if biased else ()
    exact = residual.float() + (x.float() + x_bias.float() if biased else x.float())
    normed, total = implementation.add_rms_norm(x, residual, weight, EPS, *extra)
    # To the bit: rounded once, and the norm is that of the rounded sum.
    assert torch.equal(total, exact.to(dtype))
    assert_close(normed, naive_rms_norm(total, weight))
    assert torch.equal(normed, implementation.rms_norm(total, weight, EPS))
    normed, total = implementation.add_layer_norm(x, residual, weight, bias, EPS, *extra)
    assert torch.equal(total, exact.to(dtype))
    assert_close(normed, naive_layer_norm(total, weight, bias))
    assert torch.equal(normed, implementation.layer_norm(total, weight, bias, EPS))
    # The models go on using the old residual's storage nowhere, but an input must not change all the same.
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize(("parts", "rows", "size"), [(1, 1, 48), (4, 63, 48), (8, 3, 1000)])
@pytest.mark.parametrize("biased", [False, True])
def test_add_norms_of_a_sum_in_parts(implementation, parts, rows, size, biased, dtype, device, randn, assert_close):
    """A product that was divided along its depth: added up in fp32, rounded once."""
    x = randn(parts, rows, size).to(device) * parts**-0.5
    residual, weight, bias, x_bias = (randn(*s, dtype=dtype).to(device) for s in [(rows, size), *[(size,)] * 3])
    extra = (x_bias,) if biased else ()
    exact = residual.double() + x.double().sum(0) + (x_bias.double() if biased else 0)
    normed, total = implementation.add_rms_norm(x, residual, weight, EPS, *extra)
    assert total.dtype == normed.dtype == dtype
    assert_close(total, exact)
    assert torch.equal(normed, implementation.rms_norm(total, weight, EPS))
    normed, total = implementation.add_layer_norm(x, residual, weight, bias, EPS, *extra)
    assert_close(total, exact)
    assert torch.equal(normed, implementation.layer_norm(total, weight, bias, EPS))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(63, 48), (3, 1000)])
def test_scales_of_a_product_come_before_its_bias(
    implementation, biased, rows, size, dtype, device, randn, assert_close
):
    """A row has one, and a column has one: exchanged, or after the bias, all numbers are others."""
    x, residual, weight, x_bias = (randn(*s, dtype=dtype).to(device) for s in [(rows, size)] * 2 + [(size,)] * 2)
    scales = Scales(randn(rows).to(device), randn(size).to(device))
    product = x.double() * scales.rows.double()[:, None] * scales.columns.double()
    exact = residual.double() + product + (x_bias.double() if biased else 0)
    extra = (x_bias,) if biased else ()
    assert_close(implementation.add(x, residual, *extra, scales=scales), exact)
    for normed, total in (
        implementation.add_rms_norm(x, residual, weight, EPS, *extra, scales=scales),
        implementation.add_layer_norm(x, residual, weight, None, EPS, *extra, scales=scales),
    ):
        assert_close(total, exact)
        assert torch.isfinite(normed).all()
    _, total = implementation.add_post_norm(x, residual, weight, weight, EPS, *extra, scales=scales)
    assert_close(total, residual.double() + naive_rms_norm(exact - residual.double(), weight))


def test_norms_of_rows_that_lie_apart(implementation, dtype, device, randn):
    """x and the residual may be columns of wider tensors, each of its own width."""
    x, residual = randn(40, 126, dtype=dtype).to(device)[:, :63], randn(40, 100, dtype=dtype).to(device)[:, 20:83]
    weight, bias = randn(63, dtype=dtype).to(device), randn(63, dtype=dtype).to(device)
    assert not x.is_contiguous() and not residual.is_contiguous()
    same, same_residual = x.contiguous(), residual.contiguous()
    for name, rest in (("rms_norm", (weight, EPS)), ("layer_norm", (weight, bias, EPS))):
        norm, add_norm = getattr(implementation, name), getattr(implementation, f"add_{name}")
        assert torch.equal(norm(x, *rest), norm(same, *rest))
        apart, together = add_norm(x, residual, *rest), add_norm(same, same_residual, *rest)
        assert torch.equal(apart[0], together[0])
        assert torch.equal(apart[1], together[1])


def test_columns_that_lie_apart(dtype, randn):
    """The reference takes them; a kernel would read the numbers between them, so it must refuse."""
    x, weight, bias = randn(40, 126, dtype=dtype)[:, ::2], randn(63, dtype=dtype), randn(63, dtype=dtype)
    same = x.contiguous()
    assert torch.equal(reference.rms_norm(x, weight, EPS), reference.rms_norm(same, weight, EPS))
    assert torch.equal(reference.layer_norm(x, weight, bias, EPS), reference.layer_norm(same, weight, bias, EPS))
    with pytest.raises(AssertionError, match="contiguous"):
        kernel.rms_norm(x, weight, EPS)
    with pytest.raises(AssertionError, match="contiguous"):
        kernel.add_layer_norm(same, x, weight, bias, EPS)


@pytest.mark.xdist_group("large_memory")
def test_kernel_offsets_past_int32(device, randn, far_apart):
    x, weight = randn(3, 64, dtype=torch.float16).to(device), randn(64, dtype=torch.float16).to(device)
    apart = far_apart(x)
    assert torch.equal(kernel.rms_norm(apart, weight, EPS), kernel.rms_norm(x, weight, EPS))
    for out, same in zip(
        kernel.add_layer_norm(x, apart, weight, weight, EPS),
        kernel.add_layer_norm(x, x, weight, weight, EPS),
        strict=True,
    ):
        assert torch.equal(out, same)


@pytest.mark.parametrize("size", [63, 1000, 2048])
def test_a_rows_bits_out_of_the_kernel_do_not_depend_on_its_neighbours(size, dtype, device, randn):
    shapes = (40, size), (40, size), (size,), (size,)
    x, residual, weight, bias = (randn(*s, dtype=dtype).to(device) for s in shapes)
    rms, layer = kernel.rms_norm(x, weight, EPS), kernel.add_layer_norm(x, residual, weight, bias, EPS)[0]
    for rows in (slice(0, 1), slice(39, 40), slice(5, 12)):
        assert torch.equal(kernel.rms_norm(x[rows], weight, EPS), rms[rows])
        assert torch.equal(kernel.add_layer_norm(x[rows], residual[rows], weight, bias, EPS)[0], layer[rows])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [63, 576, 1000])
def test_a_rows_norm_does_not_depend_on_its_neighbours(size, dtype, randn):
    """Bits, not closeness: a completion must not depend on its batch."""
    x, weight, bias = randn(300, size, dtype=dtype), randn(size, dtype=dtype), randn(size, dtype=dtype)
    rms, layer = reference.rms_norm(x, weight, EPS), reference.layer_norm(x, weight, bias, EPS)
    for rows in (slice(0, 1), slice(299, 300), slice(5, 68)):
        assert torch.equal(reference.rms_norm(x[rows], weight, EPS), rms[rows])
        assert torch.equal(reference.layer_norm(x[rows], weight, bias, EPS), layer[rows])
