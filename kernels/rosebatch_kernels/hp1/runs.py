"""How the kernels of HP1 attention walk over the keys, and the gate that this serves.

The gate needs the scores of the keys before each key, in the article of two. So a tile of keys is not one piece of a
sequence: each of its columns walks along its own run of successive keys. What a column needs of earlier keys, it
computed in earlier iterations. Columns exchange nothing, and the gate stays in registers. The price: every run begins
with the scores of the keys before it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import triton
import triton.language as tl


@triton.jit
def gated(scores, due, taps, GATE: tl.constexpr):
    """Weights of some keys, without gamma, and the filter's state for the keys after them.

    The state is what earlier keys subtract from the next scores, from the ones after, and so on: ``TAPS - 1`` sums, the
    transposed form of the filter. If the state were the passed scores themselves, an iteration would hand one of them
    on unchanged. The compiler does not pipeline such a loop. Scores may be in any unit, if the clip bounds are in the
    same one: the scale can be applied later.
    """
    passed = filtered(scores, GATE)
    z = scores - taps[0] * passed
    if GATE.TAPS > 1:
        z -= due[0]
    return tl.minimum(tl.maximum(z, GATE.CLIP_MIN), GATE.CLIP_MAX), subtracted(passed, due, taps, GATE)


@triton.jit
def filtered(scores, GATE: tl.constexpr):
    """The filter's input."""
    return tl.maximum(scores, 0.0) if GATE.RELU_PRE else scores


@triton.jit
def subtracted(passed, due, taps, GATE: tl.constexpr):
    """The filter's state after keys with these inputs."""
    after = ()
    for tap in tl.static_range(1, tl.constexpr(GATE.TAPS - 1)):
        after += (taps[tap] * passed + due[tap],)
    if GATE.TAPS > 1:
        after += (taps[GATE.TAPS - 1] * passed,)
    return after


@triton.jit
def nothing_due(zero, GATE: tl.constexpr):
    """The filter's state before all keys; ``zero`` has the scores' shape."""
    due = ()
    for _ in tl.static_range(1, tl.constexpr(GATE.TAPS)):
        due += (zero,)
    return due


@triton.jit
def load_taps(taps, head, GATE: tl.constexpr):
    """A head's taps, of ``taps [heads, TAPS]``."""
    loaded = ()
    for tap in tl.static_range(tl.constexpr(GATE.TAPS)):
        loaded += (tl.load(taps + head * GATE.TAPS + tap),)
    return loaded
