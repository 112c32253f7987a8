"""UClipNorm, alone and behind the residual addition, against the formula in float64."""

import pytest
import torch
from torch import inf, nan

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.uclip import kernel as module
from rosebatch_kernels.uclip import reference
from tests.helpers.sizes import change_table

kernel = Launchers("uclip.kernel")
IMPLEMENTATIONS = {"reference": reference, "kernel": kernel}

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

# One program and several, in rows and in columns, each cut short; the last is past one wave, where tiles are larger.
SIZES = [(1, 1), (1, 63), (63, 1), (3, 1000), (1000, 64), (5, 257), (2, 4096), (1050, 500)]
# A gain below zero turns the clip around; "each" is one of either sign for each channel.
GAMMAS = [0.5, -1.5, "each"]
POST_GAMMA = -1.25


def naive_uclip(x, alpha, gamma):
    scaled = x.double() * alpha.double()
    scaled = torch.where(scaled > 1, 1.0, scaled)
    return torch.as_tensor(gamma).double() * torch.where(scaled < -1, -1.0, scaled)


def gain(gamma, size, randn, device):
    return randn(size).to(device) if gamma == "each" else gamma


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_uclip_norm(implementation, rows, size, gamma, dtype, device, randn, assert_close):
    """Alphas of both signs, and products within and without the clip."""
    x, alpha = randn(rows, size, dtype=dtype).to(device), randn(size, dtype=dtype).to(device)
    before, gamma = x.clone(), gain(gamma, size, randn, device)
    out = implementation.uclip_norm(x, alpha, gamma)
    assert out.dtype == dtype
    assert_close(out, naive_uclip(x, alpha, gamma))
    assert torch.equal(x, before)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_uclip_norm_over_heads(implementation, gamma, dtype, device, randn, assert_close):
    """HP1 clips each head of [T, heads, D], taken out of a wider tensor: two strides, and one alpha for every head."""
    x, alpha = randn(63, 7, 24, dtype=dtype).to(device)[:, 2:5], randn(24, dtype=dtype).to(device)
    gamma = gain(gamma, 24, randn, device)
    out = implementation.uclip_norm(x, alpha, gamma)
    assert out.shape == x.shape
    assert_close(out, naive_uclip(x, alpha, gamma))


@pytest.mark.parametrize("gamma", GAMMAS[:2])
def test_at_the_clip_and_far_outside(implementation, gamma, dtype, device):
    """Exactly gamma from the clip on, also where the scaled value overflows; NaN is no value inside the clip."""
    x = torch.tensor([[0.5, -0.5, 0.25, 0.0, 6e4, -6e4, inf, -inf, nan]], dtype=dtype, device=device)
    alpha = torch.full((9,), 2.0, dtype=dtype, device=device)
    clipped = torch.tensor([[1.0, -1.0, 0.5, 0.0, 1.0, -1.0, 1.0, -1.0, nan]], dtype=dtype, device=device)
    expected = clipped * gamma
    torch.testing.assert_close(implementation.uclip_norm(x, alpha, gamma), expected, rtol=0, atol=0, equal_nan=True)
    zeros = torch.zeros_like(x)
    normed, total = implementation.add_uclip_norm(x, zeros, alpha, gamma, torch.ones_like(alpha), 0.5)
    torch.testing.assert_close(total, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(normed, expected.clamp(-1, 1) * 0.5, rtol=0, atol=0, equal_nan=True)


def test_the_scaled_value_is_not_rounded(implementation, narrow, device, randn):
    """One rounding, at the end: the product with alpha in 16 bits would give other bits, and then other tokens."""
    x, alpha = randn(1, 2000, dtype=narrow).to(device), randn(2000, dtype=narrow).to(device)
    out = implementation.uclip_norm(x, alpha, 0.7)
    assert torch.equal(out, ((x.float() * alpha.float()).clamp(-1, 1) * 0.7).to(narrow))
    assert (out != ((x * alpha).clamp(-1, 1).float() * 0.7).to(narrow)).sum() > 100


@pytest.mark.parametrize(("rows", "size"), [(63, 48), (3, 1000), (1050, 500)])
def test_add_returns_the_sum_and_its_norm(implementation, rows, size, dtype, device, randn):
    shapes = (rows, size), (rows, size), (size,), (size,)
    y, residual, post_alpha, alpha = (randn(*s, dtype=dtype).to(device) for s in shapes)
    before = y.clone(), residual.clone()
    post = ((y.float() * post_alpha.float()).clamp(-1, 1) * POST_GAMMA).to(dtype)
    normed, total = implementation.add_uclip_norm(y, residual, post_alpha, POST_GAMMA, alpha, 0.5)
    # To the bit: what is added is rounded, so is the sum, and the norm is that of the rounded sum.
    assert torch.equal(total, (residual.float() + post.float()).to(dtype))
    assert torch.equal(normed, implementation.uclip_norm(total, alpha, 0.5))
    # The models go on using the old residual's storage nowhere, but an input must not change all the same.
    assert torch.equal(y, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize(("post_gamma", "gamma"), [("each", 0.5), (POST_GAMMA, "each"), ("each", "each")])
def test_add_with_gains_for_each_channel(implementation, post_gamma, gamma, dtype, device, randn, assert_close):
    """Each of the two clips may have one number or one for each channel: none must take the other's."""
    rows, size = 5, 257
    shapes = (rows, size), (rows, size), (size,), (size,)
    y, residual, post_alpha, alpha = (randn(*s, dtype=dtype).to(device) for s in shapes)
    post_gamma, gamma = (gain(g, size, randn, device) for g in (post_gamma, gamma))
    normed, total = implementation.add_uclip_norm(y, residual, post_alpha, post_gamma, alpha, gamma)
    assert_close(total, residual.double() + naive_uclip(y, post_alpha, post_gamma))
    assert torch.equal(normed, implementation.uclip_norm(total, alpha, gamma))


def test_one_gain_is_the_same_as_many_alike(implementation, dtype, device, randn):
    """To the bit, or tokens would depend on how a checkpoint writes a number down."""
    x, alpha, each = randn(9, 63, dtype=dtype).to(device), randn(63, dtype=dtype).to(device), torch.full((63,), 0.7)
    alike = implementation.uclip_norm(x, alpha, each.to(device))
    assert torch.equal(implementation.uclip_norm(x, alpha, 0.7), alike)


def test_add_rounds_before_the_addition(implementation, narrow, device, randn):
    """As a norm between two modules does: added in fp32, the value would give other sums."""
    y, residual = randn(1, 2000, dtype=narrow).to(device), randn(1, 2000, dtype=narrow).to(device)
    alpha = randn(2000, dtype=narrow).to(device)
    wide = (y.float() * alpha.float()).clamp(-1, 1) * 0.7
    _, total = implementation.add_uclip_norm(y, residual, alpha, 0.7, alpha, 0.5)
    assert torch.equal(total, residual + wide.to(narrow))
    assert (total != (residual.float() + wide).to(narrow)).sum() > 100


@pytest.mark.parametrize(("parts", "rows", "size"), [(1, 1, 48), (4, 63, 48), (8, 3, 1000)])
def test_add_of_a_sum_in_parts(implementation, parts, rows, size, dtype, device, randn, assert_close):
    """A product that was divided along its depth: added up in fp32, and clipped only then."""
    y = randn(parts, rows, size).to(device) * parts**-0.5
    residual, post_alpha, alpha = (randn(*s, dtype=dtype).to(device) for s in ((rows, size), (size,), (size,)))
    normed, total = implementation.add_uclip_norm(y, residual, post_alpha, POST_GAMMA, alpha, 0.5)
    assert total.dtype == normed.dtype == dtype
    assert_close(total, residual.double() + naive_uclip(y.double().sum(0), post_alpha, POST_GAMMA))
    assert torch.equal(normed, implementation.uclip_norm(total, alpha, 0.5))


def test_parts_that_lie_apart(implementation, dtype, device, randn):
    """Parts, and rows within a part, at strides of their own."""
    y = randn(4, 50, 126).to(device)[:, 5:45, 20:83]
    residual, alpha = randn(40, 63, dtype=dtype).to(device), randn(63, dtype=dtype).to(device)
    apart = implementation.add_uclip_norm(y, residual, alpha, 0.7, alpha, 0.5)
    together = implementation.add_uclip_norm(y.contiguous(), residual, alpha, 0.7, alpha, 0.5)
    assert torch.equal(apart[0], together[0])
    assert torch.equal(apart[1], together[1])


def test_rows_that_lie_apart(implementation, dtype, device, randn):
    """x and the residual may be columns of wider tensors, each of its own width."""
    x, residual = randn(40, 126, dtype=dtype).to(device)[:, :63], randn(40, 100, dtype=dtype).to(device)[:, 20:83]
    post_alpha, alpha = randn(63, dtype=dtype).to(device), randn(63, dtype=dtype).to(device)
    assert not x.is_contiguous() and not residual.is_contiguous()
    same, same_residual = x.contiguous(), residual.contiguous()
    assert torch.equal(implementation.uclip_norm(x, alpha, 0.5), implementation.uclip_norm(same, alpha, 0.5))
    apart = implementation.add_uclip_norm(x, residual, post_alpha, 0.7, alpha, 0.5)
    together = implementation.add_uclip_norm(same, same_residual, post_alpha, 0.7, alpha, 0.5)
    assert torch.equal(apart[0], together[0])
    assert torch.equal(apart[1], together[1])


def test_columns_that_lie_apart(dtype, randn):
    """The reference takes them; a kernel would read the numbers between them, so it must refuse."""
    x, alpha = randn(40, 126, dtype=dtype)[:, ::2], randn(63, dtype=dtype)
    same = x.contiguous()
    assert torch.equal(reference.uclip_norm(x, alpha, 0.5), reference.uclip_norm(same, alpha, 0.5))
    with pytest.raises(AssertionError, match="contiguous"):
        kernel.uclip_norm(x, alpha, 0.5)
    with pytest.raises(AssertionError, match="contiguous"):
        kernel.add_uclip_norm(same, x, alpha, 0.7, alpha, 0.5)


@pytest.mark.xdist_group("large_memory")
def test_kernel_offsets_past_int32(device, randn, far_apart):
    x, alpha = randn(3, 64, dtype=torch.float16).to(device), randn(64, dtype=torch.float16).to(device)
    apart = far_apart(x)
    assert torch.equal(kernel.uclip_norm(apart, alpha, 0.5), kernel.uclip_norm(x, alpha, 0.5))
    expected = kernel.add_uclip_norm(x, x, alpha, 0.7, alpha, 0.5)
    for y, residual in ((apart, x), (x, apart)):
        for out, same in zip(kernel.add_uclip_norm(y, residual, alpha, 0.7, alpha, 0.5), expected, strict=True):
            assert torch.equal(out, same)


@pytest.mark.xdist_group("large_memory")
def test_kernel_offsets_of_parts_past_int32(device, randn, far_apart):
    """The distance of two parts fits into 32 bits where that of the first and the third does not."""
    y, residual = randn(3, 2, 64).to(device), randn(2, 64, dtype=torch.float16).to(device)
    alpha = randn(64, dtype=torch.float16).to(device)
    apart = kernel.add_uclip_norm(far_apart(y), residual, alpha, 0.7, alpha, 0.5)
    for out, same in zip(apart, kernel.add_uclip_norm(y, residual, alpha, 0.7, alpha, 0.5), strict=True):
        assert torch.equal(out, same)


def test_a_rows_bits_out_of_the_kernel_do_not_depend_on_its_neighbours(dtype, device, randn, monkeypatch):
    """With more elements a program takes more of them: here with few already."""
    change_table(monkeypatch, module, one_wave=2**14)
    shapes = (35, 1030), (35, 1030), (1030,)
    x, residual, alpha = (randn(*s, dtype=dtype).to(device) for s in shapes)
    alone, added = kernel.uclip_norm(x, alpha, 0.7), kernel.add_uclip_norm(x, residual, alpha, 0.7, alpha, 0.5)[0]
    for rows in (slice(0, 1), slice(34, 35), slice(5, 12)):
        assert torch.equal(kernel.uclip_norm(x[rows], alpha, 0.7), alone[rows])
        assert torch.equal(kernel.add_uclip_norm(x[rows], residual[rows], alpha, 0.7, alpha, 0.5)[0], added[rows])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("size", [63, 576, 1000])
def test_a_rows_norm_does_not_depend_on_its_neighbours(size, dtype, randn):
    """Bits, not closeness: a completion must not depend on its batch."""
    x, residual, alpha = randn(300, size, dtype=dtype), randn(300, size, dtype=dtype), randn(size, dtype=dtype)
    alone, added = reference.uclip_norm(x, alpha, 0.7), reference.add_uclip_norm(x, residual, alpha, 0.7, alpha, 0.5)[0]
    for rows in (slice(0, 1), slice(299, 300), slice(5, 68)):
        assert torch.equal(reference.uclip_norm(x[rows], alpha, 0.7), alone[rows])
        assert torch.equal(reference.add_uclip_norm(x[rows], residual[rows], alpha, 0.7, alpha, 0.5)[0], added[rows])
