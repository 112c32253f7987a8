"""How the kernels walk over the keys of HP1 attention, and the gate that this serves.

The gate needs the scores of the two keys before each key. So a tile of keys is not one piece of a sequence: each of
its columns walks along a run of successive keys of its own, and what a column needs of earlier keys is what it computed
in the iterations before. Nothing is exchanged between columns, and the gate stays in registers; the price is that
every run begins with the scores of the two keys in front of it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def gated(
    scores,
    due,
    due_later,
    tap_0,
    tap_1,
    tap_2,
    RELU_PRE: tl.constexpr,
    CLIP_MIN: tl.constexpr,
    CLIP_MAX: tl.constexpr,
):
    """Weights without gamma of some keys, and the filter's state for the keys that follow.

    The state is what earlier keys subtract from the next scores (``due``) and from those behind (``due_later``): the
    transposed form of the filter. With the passed scores themselves as the state, one of them would be handed on
    unchanged, and the compiler pipelines no such loop. Scores may be in any unit that the clip bounds are in as well:
    the scale can be applied later.
    """
    passed = filtered(scores, RELU_PRE)
    z = scores - tap_0 * passed - due
    due, due_later = subtracted(passed, due_later, tap_1, tap_2)
    return tl.minimum(tl.maximum(z, CLIP_MIN), CLIP_MAX), due, due_later


@triton.jit
def filtered(scores, RELU_PRE: tl.constexpr):
    """What the filter sees of scores."""
    return tl.maximum(scores, 0.0) if RELU_PRE else scores


@triton.jit
def subtracted(passed, due_later, tap_1, tap_2):
    """The filter's state behind these keys."""
    return tap_1 * passed + due_later, tap_2 * passed
