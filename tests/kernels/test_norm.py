"""LayerNorm and RMSNorm, alone and behind the residual addition, against the formulas in float64."""

import pytest
import torch

from rosebatch_kernels.norm import reference

EPS = 1e-5
SIZES = [(1, 1), (1, 63), (63, 1), (3, 1000), (1000, 64)]


def naive_layer_norm(x, weight, bias):
    x, weight, bias = x.double(), weight.double(), bias.double()
    mean = x.sum(-1, keepdim=True) / x.shape[-1]
    variance = ((x - mean) ** 2).sum(-1, keepdim=True) / x.shape[-1]
    return (x - mean) / (variance + EPS).sqrt() * weight + bias


def naive_rms_norm(x, weight):
    x, weight = x.double(), weight.double()
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt() * weight


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_layer_norm(rows, size, dtype, randn, assert_close):
    x, weight, bias = (randn(*shape, dtype=dtype) for shape in ((rows, size), (size,), (size,)))
    out = reference.layer_norm(x, weight, bias, EPS)
    assert out.dtype == dtype
    assert_close(out, naive_layer_norm(x, weight, bias))


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_rms_norm(rows, size, dtype, randn, assert_close):
    x, weight = randn(rows, size, dtype=dtype), randn(size, dtype=dtype)
    out = reference.rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    assert_close(out, naive_rms_norm(x, weight))


def test_rms_norm_over_heads(dtype, randn, assert_close):
    """Qwen3 normalises each head of [T, heads, D], taken out of a wider tensor."""
    x, weight = randn(63, 7, 24, dtype=dtype), randn(24, dtype=dtype)
    assert_close(reference.rms_norm(x[:, 2:5], weight, EPS), naive_rms_norm(x[:, 2:5], weight))


def test_rms_norm_keeps_statistics_in_fp32(randn, assert_close):
    """Squares of large fp16 values overflow fp16, so the mean must not be taken in it."""
    x = (randn(3, 1000) * 1000).to(torch.float16)
    weight = torch.ones(1000, dtype=torch.float16)
    assert_close(reference.rms_norm(x, weight, EPS), naive_rms_norm(x, weight))


def test_rms_norm_rounds_before_the_weight(randn):
    """As transformers does: in bf16 the other order gives other bits, and then other tokens."""
    x, weight = randn(1, 1000, dtype=torch.bfloat16), randn(1000, dtype=torch.bfloat16)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    out = reference.rms_norm(x, weight, EPS)
    assert torch.equal(out, weight * normed.to(torch.bfloat16))
    assert not torch.equal(out, (weight * normed).to(torch.bfloat16))


def test_add_norms_return_the_sum_and_its_norm(dtype, randn):
    x, residual, weight, bias = (randn(*s, dtype=dtype) for s in ((63, 48), (63, 48), (48,), (48,)))
    before = residual.clone()
    normed, total = reference.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, before + x)
    assert torch.equal(normed, reference.rms_norm(total, weight, EPS))
    normed, total = reference.add_layer_norm(x, residual, weight, bias, EPS)
    assert torch.equal(total, before + x)
    assert torch.equal(normed, reference.layer_norm(total, weight, bias, EPS))
    # The models go on using the old residual's storage nowhere, but an input must not change all the same.
    assert torch.equal(residual, before)


@pytest.mark.parametrize("stride", ["rows", "columns"])
def test_norms_of_non_contiguous_rows(stride, dtype, randn):
    wide = randn(40, 126, dtype=dtype)
    x = wide[:, :63] if stride == "rows" else wide[:, ::2]
    weight, bias = randn(63, dtype=dtype), randn(63, dtype=dtype)
    assert not x.is_contiguous()
    same = x.contiguous()
    assert torch.equal(reference.rms_norm(x, weight, EPS), reference.rms_norm(same, weight, EPS))
    assert torch.equal(reference.layer_norm(x, weight, bias, EPS), reference.layer_norm(same, weight, bias, EPS))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [63, 576, 1000])
def test_a_rows_norm_does_not_depend_on_its_neighbours(size, dtype, randn):
    """Bits, not closeness: a completion must not depend on its batch."""
    x, weight, bias = randn(300, size, dtype=dtype), randn(size, dtype=dtype), randn(size, dtype=dtype)
    rms, layer = reference.rms_norm(x, weight, EPS), reference.layer_norm(x, weight, bias, EPS)
    for rows in (slice(0, 1), slice(299, 300), slice(5, 68)):
        assert torch.equal(reference.rms_norm(x[rows], weight, EPS), rms[rows])
        assert torch.equal(reference.layer_norm(x[rows], weight, bias, EPS), layer[rows])
