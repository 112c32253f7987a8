"""Pieces that the kernels of the gated delta rule share."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from rosebatch_kernels.common.activations import logistic, softplus
from rosebatch_kernels.common.dot import dot


@triton.jit
def log_decay(a, log_rate, dt_bias):
    """``-exp(log_rate) · softplus(a + dt_bias)`` in fp32, from values and the addresses of a head's parameters."""
    step = softplus(a.to(tl.float32) + tl.load(dt_bias).to(tl.float32))
    rate = tl.exp(tl.load(log_rate).to(tl.float32))
    return -rate * step


@triton.jit
def channel_log_decay(a, log_rate, dt_bias, inside):
    """The same of each channel of a key, from addresses of all three; ``log_rate`` is the head's."""
    offset = tl.load(dt_bias, inside, other=0.0).to(tl.float32)
    step = softplus(tl.load(a, inside, other=0.0).to(tl.float32) + offset)
    return -tl.exp(tl.load(log_rate).to(tl.float32)) * step


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


@triton.jit
def inverse(a, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """``(1 + a)^-1`` of ``a [ROWS, ROWS]`` fp32, zero on the diagonal and above, ROWS a power of two of at least 16.

    Blocks of 16 on the diagonal row by row, all at once; then pairs of inverses become the inverse of twice the size:
    ``[[X, 0], [-Y·a·X, Y]]`` is that of ``[[1/X, 0], [a, 1/Y]]``. A series in the powers of ``a`` would take fewer
    steps. But equal keys make its terms so large that their sum has no correct digits.
    """
    parts: tl.constexpr = ROWS // 16
    part = tl.arange(0, parts)
    diagonal = part[:, None, None, None] == part[None, None, :, None]
    blocks = tl.sum(tl.where(diagonal, tl.reshape(a, [parts, 16, parts, 16]), 0.0), 2)
    i = tl.arange(0, 16)
    row = i[None, :, None]
    x = tl.where(row == i[None, None, :], 1.0, tl.zeros([parts, 16, 16], tl.float32))
    for step in range(1, 16):
        factors = tl.sum(tl.where(row == step, blocks, 0.0), 1)
        x -= tl.where(row == step, tl.sum(factors[:, :, None] * x, 1)[:, None, :], 0.0)
    spread = tl.where(diagonal, x[:, :, None, :], 0.0)
    x = tl.reshape(spread, [ROWS, ROWS])
    r, c = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    for level in tl.static_range(4, 16):
        if (1 << level) < ROWS:
            below = ((r >> level) != (c >> level)) & ((r >> (level + 1)) == (c >> (level + 1)))
            between = dot(x, tl.where(below, a, 0.0), PRECISION=PRECISION)
            x -= dot(between, x, PRECISION=PRECISION)
    return x
