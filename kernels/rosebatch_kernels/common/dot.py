"""The product of two tiles, behind the fence that the tensor cores of Hopper and of B200 need.

They read shared memory through another proxy than the one that ``cp.async`` wrote it through, and may find what was
there before. PTX asks for a fence between the two (``fence.proxy.async``); Triton 3.6 leaves it out where loads are
pipelined (triton-lang/triton, pull request 10537). A Triton that has its own fence gets a second one.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

# The interpreter has no assembly.
_COMPILES = tl.constexpr(not triton.knobs.runtime.interpret)
# Rows of Hopper's instruction. Tiles of fewer go through registers.
_ROWS = tl.constexpr(64)
_EXACT = tl.constexpr("ieee")


@triton.jit
def dot(a, b, acc=None, PRECISION: tl.constexpr = _EXACT):
    """``a @ b``, added to ``acc`` where there is one; see ``tl.dot``."""
    # From 120 on, tensor cores read registers again.
    if _COMPILES and a.shape[0] % _ROWS == 0 and cuda_capability_geq(9, 0) and not cuda_capability_geq(12, 0):
        tl.inline_asm_elementwise(
            "fence.proxy.async.shared::cta; mov.u32 $0, $1;",
            "=r,r",
            [tl.full([], 0, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return tl.dot(a, b, acc, input_precision=PRECISION)
