"""The clip of UClipNorm in Triton (source: article S4)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def clip(value, gamma):
    """``gamma · clamp(value, -1, 1)``; NaN stays NaN, as in PyTorch."""
    return tl.clamp(value, -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL) * gamma
