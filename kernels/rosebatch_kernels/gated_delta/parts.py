"""Pieces that the kernels of the gated delta rule share."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from rosebatch_kernels.common.activations import logistic, softplus


@triton.jit
def log_decay(a, log_rate, dt_bias):
    """``-exp(log_rate) · softplus(a + dt_bias)`` in fp32, from values and the addresses of a head's parameters."""
    step = softplus(a.to(tl.float32) + tl.load(dt_bias).to(tl.float32))
    rate = tl.exp(tl.load(log_rate).to(tl.float32))
    return -rate * step


@triton.jit
def written_share(b, MAX_BETA: tl.constexpr):
    """``MAX_BETA · sigmoid(b)`` in fp32."""
    beta = logistic(b.to(tl.float32))
    if MAX_BETA != 1:
        beta *= MAX_BETA
    return beta


@triton.jit
def unit_factor(x, AXIS: tl.constexpr):
    """What makes the rows along an axis of length 1: one over the root of the sum of squares plus 1e-6."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, AXIS) + 1e-6)
