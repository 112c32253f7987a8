"""How the kernels of HP1 attention walk over the keys, and the gate that this serves.

The gate needs the scores of the two keys before each key. So a tile of keys is not one piece of a sequence: each of
its columns walks along its own run of successive keys. What a column needs of earlier keys, it computed in earlier
iterations. Columns exchange nothing, and the gate stays in registers. The price: every run begins with the scores of
the two keys in front of it.
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
    """Weights of some keys, without gamma, and the filter's state for the keys after them.

    The state is what earlier keys subtract from the next scores (``due``) and from the ones after (``due_later``): the
    transposed form of the filter. If the state were the passed scores themselves, an iteration would hand one of them
    on unchanged, and the compiler does not pipeline such a loop. Scores may be in any unit, if the clip bounds are in
    the same one: the scale can be applied later.
    """
    passed = filtered(scores, RELU_PRE)
    z = scores - tap_0 * passed - due
    due, due_later = subtracted(passed, due_later, tap_1, tap_2)
    return tl.minimum(tl.maximum(z, CLIP_MIN), CLIP_MAX), due, due_later


@triton.jit
def filtered(scores, RELU_PRE: tl.constexpr):
    """The filter's input."""
    return tl.maximum(scores, 0.0) if RELU_PRE else scores


@triton.jit
def subtracted(passed, due_later, tap_1, tap_2):
    """The filter's state after keys with these inputs."""
    return tap_1 * passed + due_later, tap_2 * passed
