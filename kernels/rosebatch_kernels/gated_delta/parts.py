"""Pieces that the kernels of the gated delta rule share."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def log_decay(a, log_rate, dt_bias):
    """``-exp(log_rate) · softplus(a + dt_bias)`` in fp32, from values and the addresses of a head's parameters."""
    x = a.to(tl.float32) + tl.load(dt_bias).to(tl.float32)
    small = tl.exp(-tl.abs(x))
    # log(1 + small) to full precision: an error of one part in 2^24 of the sum adds up over thousands of tokens.
    total = 1.0 + small
    exact = tl.where(total == 1.0, small, tl.log(total) * small / tl.where(total == 1.0, 1.0, total - 1.0))
    rate = tl.exp(tl.load(log_rate).to(tl.float32))
    return -rate * (tl.maximum(x, 0.0) + exact)


@triton.jit
def unit_factor(x, AXIS: tl.constexpr):
    """What makes the rows along an axis of length 1: one over the root of the sum of squares plus 1e-6."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, AXIS) + 1e-6)
