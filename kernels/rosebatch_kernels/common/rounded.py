"""Rounding of sums to the dtype of a result, where a kernel goes on in fp32.

Hopper's tensor cores add up while a kernel goes on; it waits before it reads the sums. Of two roundings to fp16, ptxas
12.8 to 13.0 makes one instruction, and may place it before the wait, in loops that it unrolled. On an H200 a quarter of
the columns of a product with a gate was wrong, for 1,024 columns of the weight or fewer. Here it finds no two.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

# The interpreter has no assembly.
_COMPILES = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """``x`` rounded to ``DTYPE``, as fp32."""
    if _COMPILES and tl.float16 == DTYPE:
        narrow = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        narrow = x.to(DTYPE)
    return narrow.to(tl.float32)
