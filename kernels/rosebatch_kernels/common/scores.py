"""From products q·k to scores in units of ln 2, so that softmax takes powers of 2; with a soft cap or without."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import NamedTuple

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


class ScoreFactors(NamedTuple):
    """What makes scores of products: ``scale · products``, or ``cap · tanh(scale · products)``."""

    scale: float
    cap: float | None


def score_factors(scale: float, soft_cap: float) -> ScoreFactors:
    """The factors of a layer; ``soft_cap`` is 0 for none."""
    return ScoreFactors(scale / soft_cap, soft_cap * LOG2_E) if soft_cap else ScoreFactors(scale * LOG2_E, None)


@triton.jit
def scaled(products, factors):
    """fp32 scores of fp32 products."""
    return capped(products * factors.scale, factors)


@triton.jit
def capped(scores, factors):
    """fp32 scores of products that are scaled already."""
    if factors.cap is not None:
        # Triton's interpreter has no tanh. The exponent is never positive, so that nothing overflows.
        small = tl.exp(-2.0 * tl.abs(scores))
        size = factors.cap * ((1.0 - small) / (1.0 + small))
        scores = tl.where(scores < 0, -size, size)
    return scores


@triton.jit
def sink_weights(sinks, row_max):
    """What each row's sink adds to its sum of weights, where ``row_max`` is the row's largest score in units of ln 2.

    Bounded: a sink may lie far above all scores, and a row without a key has none.
    """
    return tl.exp2(tl.minimum(sinks.to(tl.float32) * 1.4426950408889634 - row_max, 120.0))
