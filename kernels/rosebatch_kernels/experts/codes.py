"""Codes of few bits become numbers in registers, two at a time, all of them exact.

The bits of a narrow float are put where a wider one has its sign, the lowest bits of its exponent and the highest of
its mantissa. That is the float, also a subnormal one, over a power of two. An integer is or-ed into the mantissa of a
number whose last bit counts 1, which is subtracted again (source: Marlin, arXiv 2408.11743).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rosebatch_kernels.experts.packed import BITS, piece_of

# Wide floats: all bits, and bits of the mantissa. Narrow ones: bits of the mantissa, and the exponent of 1.
_WIDE = {torch.bfloat16: (16, 7), torch.float16: (16, 10), torch.float32: (32, 23)}
_NARROW = {"e2m1": (1, 1), "e4m3": (3, 7)}


class Code(NamedTuple):
    """How a form's codes become numbers of a type: constants of a kernel.

    Attributes:
        FORM: see ``Packed``.
        BITS: of a code.
        PIECE: neighbouring columns whose codes have the same place in their words, see ``Packed``.
        MAGNITUDE: mask of a code's bits without the sign of a float.
        SHIFT, SIGN: places that the magnitude and the sign of a float go to the left.
        MAGIC: bits of the number that an integer is or-ed into.
        FACTOR: by which a float is too small, or the number that an integer is too large by.
        ASM: makes pairs of 16-bit numbers; empty where there is no assembler.
    """

    FORM: str
    BITS: int
    PIECE: int
    MAGNITUDE: int
    SHIFT: int
    SIGN: int
    MAGIC: int
    FACTOR: float
    ASM: str


def code_of(form: str, dtype: torch.dtype, *, assembles: bool) -> Code:
    """The constants of ``numbers``.

    Args:
        form: of the codes.
        dtype: of the numbers.
        assembles: whether there is an assembler.
    """
    (size, mantissa), bits = _WIDE[dtype], BITS[form]
    bias = (1 << (size - 2 - mantissa)) - 1
    if form == "int4":
        code = Code(form, bits, piece_of(form), 15, 0, 0, (bias + mantissa) << mantissa, float(1 << mantissa), "")
    else:
        own_mantissa, own_bias = _NARROW[form]
        magnitude, factor = (1 << (bits - 1)) - 1, 2.0 ** (bias - own_bias)
        code = Code(form, bits, piece_of(form), magnitude, mantissa - own_mantissa, size - bits, 0, factor, "")
    return code._replace(ASM=_assembly(code)) if assembles and size == 16 else code


def _assembly(code: Code) -> str:
    """A register of two numbers for each place in two neighbouring words; lop3's 0xEA is ``a & b | c``."""
    count, both, lines = 16 // code.BITS, 0x10001, []
    for place in range(count):
        lines.append(_shifted("m", f"${count}", code.SHIFT - code.BITS * place))
        if code.MAGIC:
            lines.append(f"lop3.b32 ${place}, m, {code.MAGNITUDE * both}, {code.MAGIC * both}, 0xEA;")
            continue
        lines.append(f"and.b32 m, m, {(code.MAGNITUDE << code.SHIFT) * both};")
        lines.append(_shifted("s", f"${count}", code.SIGN - code.BITS * place))
        lines.append(f"lop3.b32 ${place}, s, {0x8000 * both}, m, 0xEA;")
    return "{ .reg .b32 m, s; " + " ".join(lines) + " }"


def _shifted(target: str, source: str, left: int) -> str:
    if left == 0:
        return f"mov.b32 {target}, {source};"
    return f"{'shl.b32' if left > 0 else 'shr.u32'} {target}, {source}, {abs(left)};"


@triton.jit
def numbers(words, DTYPE: tl.constexpr, CODE: tl.constexpr):
    """A tuple of as many tensors of DTYPE as int16 ``words`` have codes: floats over FACTOR, integers plus FACTOR."""
    if CODE.ASM == "":
        wide = words.to(tl.int32)
        a, b = _number(wide, DTYPE, CODE), _number(wide >> CODE.BITS, DTYPE, CODE)
        if CODE.BITS == 4:
            c, d = _number(wide >> 8, DTYPE, CODE), _number(wide >> 12, DTYPE, CODE)
    elif CODE.BITS == 4:
        a, b, c, d = tl.inline_asm_elementwise(
            CODE.ASM,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True,
            pack=2,
        )
    else:
        a, b = tl.inline_asm_elementwise(CODE.ASM, "=r,=r,r", [words], dtype=(tl.int16, tl.int16), is_pure=True, pack=2)
    if CODE.BITS == 4:
        return _as(a, DTYPE), _as(b, DTYPE), _as(c, DTYPE), _as(d, DTYPE)
    else:  # noqa: RET505 (a compile-time condition)
        return _as(a, DTYPE), _as(b, DTYPE)


@triton.jit
def _as(bits, DTYPE: tl.constexpr):
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def _number(code, DTYPE: tl.constexpr, CODE: tl.constexpr):
    """Its bits, as an integer of DTYPE's size."""
    bits = ((code & CODE.MAGNITUDE) << CODE.SHIFT) | CODE.MAGIC
    if CODE.MAGIC == 0:
        bits |= (code & (CODE.MAGNITUDE + 1)) << CODE.SIGN
    if DTYPE.primitive_bitwidth == 16:
        bits = bits.to(tl.int16)
    return bits


@triton.jit
def scale_of_e2m1(exponent, DTYPE: tl.constexpr):
    """``2^(exponent - 127)`` times FACTOR, for int32 from 0 to ``MAX_EXPONENT``.

    Of fp16, scales below all of its numbers are 0, and so are the products of e2m1's numbers with them.
    """
    if DTYPE.primitive_bitwidth == 32:
        bits = (exponent + 126) << 23
    elif DTYPE.is_bf16():
        bits = ((exponent + 126) << 7).to(tl.int16)
    else:
        subnormal = tl.where(exponent >= 89, 1 << tl.maximum(exponent - 89, 0), 0)
        bits = tl.where(exponent > 98, (exponent - 98) << 10, subnormal).to(tl.int16)
    return bits.to(DTYPE, bitcast=True)
