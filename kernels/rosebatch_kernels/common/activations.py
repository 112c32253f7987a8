"""Activations of fp32 values in Triton.

Logistic and tanh use exp of a number that is never positive. So nothing overflows, and Triton's interpreter, which has
no tanh, can run them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

# Names of the gated forms, and the activation of their gate.
GATES = {"silu_mul": "silu", "relu_mul": "relu", "gelu_tanh_mul": "gelu_tanh", "gelu_erf_mul": "gelu_erf"}


@triton.jit
def activate(value, NAME: tl.constexpr):
    """The activation of an fp32 value: ``gelu_tanh``, ``gelu_erf``, ``silu`` or ``relu``."""
    if NAME == "gelu_tanh":
        # tanh(u) = 2 · logistic(2u) - 1, so (1 + tanh(u)) / 2 is logistic(2u).
        out = value * logistic(value * (1.5957691216057308 + 0.07135481282553147 * value * value))
    elif NAME == "gelu_erf":
        out = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif NAME == "silu":
        out = value * logistic(value)
    else:
        tl.static_assert(NAME == "relu")
        out = tl.maximum(value, 0.0)
    return out


@triton.jit
def tanh(value):
    """The hyperbolic tangent of an fp32 value, to 1e-7."""
    return 2.0 * logistic(2.0 * value) - 1.0


@triton.jit
def logistic(x):
    """``1 / (1 + exp(-x))``."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def softplus(x):
    """``log(1 + exp(x))`` of an fp32 value, small results to full precision: sums of thousands keep errors of 2^-24."""
    small = tl.exp(-tl.abs(x))
    total = 1.0 + small
    exact = tl.where(total == 1.0, small, tl.log(total) * small / tl.where(total == 1.0, 1.0, total - 1.0))
    return tl.maximum(x, 0.0) + exact
