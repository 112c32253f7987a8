"""Rotary positions against complex multiplication, and the tables' frequencies against their definitions."""

import cmath
import math

import pytest
import torch

from rosebatch.config.model import RopeConfig
from rosebatch.model.rope import rope_tables
from rosebatch_kernels.qkv.torch_heads import rope


def naive_rope(x, angles):
    """Channel pair (i, i + D/2) as one complex number, turned by ``angles[t][i]``."""
    out = x.double().clone()
    tokens, heads, size = x.shape
    half = size // 2
    for t in range(tokens):
        for h in range(heads):
            for i in range(half):
                turned = complex(out[t, h, i], out[t, h, i + half]) * cmath.exp(1j * angles[t][i])
                out[t, h, i], out[t, h, i + half] = turned.real, turned.imag
    return out


def model_tables(rope, size, positions, dtype):
    """The model's own tables, with an axis for the heads."""
    tables = rope_tables(rope, size, positions, dtype, torch.device("cpu"))
    return [table[:, None] for table in (tables.cos, tables.sin)]


def tables(angles, dtype):
    angles = torch.tensor(angles, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 2), (63, 3, 6), (5, 9, 64)])
def test_rope_turns_pairs(tokens, heads, size, dtype, randn, assert_close):
    x = randn(tokens, heads, size, dtype=dtype)
    angles = (randn(tokens, size // 2) * 3).tolist()
    cos, sin = tables(angles, dtype)
    out = rope(x, cos, sin)
    assert out.dtype == dtype
    assert_close(out, naive_rope(x, angles))


def test_rope_of_position_zero_is_the_identity(dtype, randn):
    x = randn(1, 3, 64, dtype=dtype)
    cos, sin = model_tables(RopeConfig(), 64, 1, dtype)
    assert torch.equal(rope(x, cos, sin), x)


def test_rope_of_strided_heads(dtype, randn):
    """q and k are a view of the fused projection, k's heads behind q's."""
    x = randn(63, 9, 32, dtype=dtype)
    cos, sin = model_tables(RopeConfig(), 32, 63, dtype)
    assert torch.equal(rope(x[:, 2:6], cos, sin), rope(x[:, 2:6].contiguous(), cos, sin))


@pytest.mark.usefixtures("threads")
def test_a_tokens_rotation_does_not_depend_on_its_neighbours(dtype, randn):
    x = randn(129, 11, 34, dtype=dtype)
    cos, sin = model_tables(RopeConfig(), 34, 129, dtype)
    whole = rope(x, cos, sin)
    for rows in (slice(0, 1), slice(128, 129), slice(7, 70)):
        assert torch.equal(rope(x[rows].clone(), cos[rows], sin[rows]), whole[rows])


def frequencies(rope, size, positions=2):
    """Angle of each pair at position 1, as the tables have it."""
    cos, sin = model_tables(rope, size, positions, torch.float32)
    return torch.atan2(sin[1, 0, size // 2 :], cos[1, 0, : size // 2]).double()


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_default_frequencies(theta):
    expected = torch.tensor([theta ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    torch.testing.assert_close(frequencies(RopeConfig(theta=theta), 64), expected, rtol=1e-5, atol=0)


def test_linear_scaling_divides_every_frequency():
    expected = frequencies(RopeConfig(), 64) / 4
    scaled = frequencies(RopeConfig(scaling="linear", factor=4.0), 64)
    torch.testing.assert_close(scaled, expected, rtol=1e-5, atol=0)


def test_llama3_scaling_by_wavelength():
    """Llama 3.1's rule: waves shorter than a quarter of the trained length stay, longer than it are stretched."""
    factor, low, high, original, theta, size = 8.0, 1.0, 4.0, 8192, 500000.0, 128
    expected = []
    for i in range(size // 2):
        frequency = theta ** (-2 * i / size)
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            expected.append(frequency)
        elif wavelength > original / low:
            expected.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    rope = RopeConfig(
        theta=theta,
        scaling="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )
    plain = frequencies(RopeConfig(theta=theta), size)
    scaled = frequencies(rope, size)
    torch.testing.assert_close(scaled, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)
    # All three cases occurred.
    ratios = plain / scaled
    assert torch.isclose(ratios, torch.ones_like(ratios), rtol=1e-5).sum() > 5
    assert torch.isclose(ratios, torch.full_like(ratios, factor), rtol=1e-5).sum() > 5
    assert ((ratios > 1.01) & (ratios < factor - 0.01)).sum() > 2


def test_tables_are_made_in_fp32_and_rounded_once():
    """Angles of some thousand radians have no decimals left in bf16."""
    cos, sin = model_tables(RopeConfig(), 64, 5000, torch.bfloat16)
    wide_cos, wide_sin = model_tables(RopeConfig(), 64, 5000, torch.float32)
    assert cos.shape == sin.shape == (5000, 1, 64)
    assert torch.equal(cos, wide_cos.to(torch.bfloat16))
    assert torch.equal(sin, wide_sin.to(torch.bfloat16))
    exact = torch.tensor([math.cos(4999.0)], dtype=torch.float64)
    torch.testing.assert_close(wide_cos[4999, 0, :1].double(), exact, rtol=0, atol=1e-6)


def test_longrope_has_two_rows_for_positions_within_the_trained_length():
    """Long factors of the first positions follow all positions; a run that is no longer has the short ones only."""
    factors = {"short_factor": (1.0, 2.0), "long_factor": (3.0, 5.0)}
    rope = RopeConfig(theta=100.0, scaling="longrope", original_max_position_embeddings=4, **factors)
    shorts, longs = ([(p / a, p / b / 10) for p in range(7)] for a, b in factors.values())
    for max_len, angles in ((4, shorts[:4]), (7, shorts[:4] + longs[4:] + longs[:4])):
        rotary = rope_tables(rope, 4, max_len, torch.float32, torch.device("cpu"))
        assert (rotary.max_len, rotary.trained_len) == (max_len, 4 if max_len > 4 else 0)
        cos, sin = tables(angles, torch.float32)
        torch.testing.assert_close((rotary.cos, rotary.sin), (cos[:, 0], sin[:, 0]))
