"""Products of some rows with 4-bit integers in Triton: codes become 16-bit numbers in registers.

The product is computed transposed: then the weight is the first operand of the matrix instruction, which may lie in
registers. A code is or-ed into the mantissa of a number as large as a unit of it, 128 in bf16 and 1024 in fp16. One
subtraction of that number and the zero leaves ``code - zero``, exactly. The sum over a group is multiplied by its scale
in fp32 (source: Marlin, arXiv 2408.11743). Of many rows, each number is multiplied by its scale instead, and rounded.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.activations import GATES, activate
from rosebatch_kernels.common.device import INTERPRETER, Device
from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.common.launch import launch_options, prefetch, wait
from rosebatch_kernels.common.rounded import rounded
from rosebatch_kernels.common.whole_numbers import cdiv
from rosebatch_kernels.int4.layout import CHUNK, GROUPS, MIDDLE, QUARTER, Int4Weight
from rosebatch_kernels.int4.sizes import Sizes, program_of, splits_of

_CHUNK = tl.constexpr(CHUNK)
_QUARTER = tl.constexpr(QUARTER)
_MIDDLE = tl.constexpr(MIDDLE)


def _expansion(magic: str, one: str, kind: str, *, scaled: bool = False) -> str:
    """Four pairs of numbers from two words: a nibble of each joins the magic number; then the offset is added.

    With ``scaled``, each pair is multiplied by a scale and rounded.
    """
    steps = [
        f"shr.u32 s, $4, {4 * place}; lop3.b32 s, s, 0x000f000f, {magic}, 0xEA; "
        f"fma.rn.{kind} {'s' if scaled else f'${place}'}, s, one, ${5 + place};"
        + (f" fma.rn.{kind} ${place}, s, ${9 + place}, zero;" if scaled else "")
        for place in range(4)
    ]
    return f"{{ .reg .b32 s, one, zero; mov.b32 one, {one}; mov.b32 zero, 0x80008000; {' '.join(steps)} }}"


# Added to a magic number and a code: minus the magic number, and the zero in the lowest bits of the mantissa.
_BF16_OFFSET, _FP16_OFFSET = tl.constexpr(0xC300 - 0x10000), tl.constexpr(0xE400 - 0x10000)
_BF16 = ("0x43004300", "0x3F803F80", "bf16x2")
_FP16 = ("0x64006400", "0x3C003C00", "f16x2")
_BF16_ASM, _FP16_ASM = tl.constexpr(_expansion(*_BF16)), tl.constexpr(_expansion(*_FP16))
_BF16_VALUES_ASM = tl.constexpr(_expansion(*_BF16, scaled=True))
_FP16_VALUES_ASM = tl.constexpr(_expansion(*_FP16, scaled=True))


def linear(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """``activation(x @ weightᵀ + bias)``.

    Args:
        x: ``[T, in]`` in a 16-bit type, rows at any stride.
        weight: ``[out, in]``.
        bias: ``[out]``.
        activation: see ``linear.kernel``.

    Returns:
        ``[T, out]``, or half as many columns with a gate.
    """
    columns = weight.shape[0] // (2 if activation in GATES else 1)
    out = torch.empty(len(x), columns, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias, out, activation, sizes=sizes, device=device)
    return out


def parts(x: Tensor, weight: Int4Weight, *, sizes: Sizes, device: Device) -> Tensor:
    """``x @ weightᵀ`` in parts ``[S, T, out]`` fp32, which the reader adds up; arguments as of ``linear``."""
    splits = splits_of(len(x), weight, x.dtype, sizes=sizes)
    out = torch.empty(splits, len(x), weight.shape[0], dtype=torch.float32, device=x.device)
    _launch(x, weight, None, out, None, sizes=sizes, device=device)
    return out


def _launch(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None,
    out: Tensor,
    activation: str | None,
    *,
    sizes: Sizes,
    device: Device,
) -> None:
    assert x.dtype.itemsize == 2 and x.stride(1) == 1 and weight.group in GROUPS
    rows, splits = len(x), len(out) if out.ndim == 3 else 1
    program = program_of(rows, weight, x.dtype, sizes=sizes)
    scales, shifts = (weight.scales.view(torch.int32), _shifts(x.device)) if program.rounds else (weight.scales, None)
    gate = None if activation is None else GATES.get(activation)
    _int4_product[(cdiv(weight.shape[0], program.tile), splits, cdiv(rows, program.rows))](
        x=x,
        words=weight.words,
        scales=scales,
        shifts=shifts,
        zeros=weight.zeros,
        bias=bias,
        out=out,
        rows=rows,
        x_stride=x.stride(0),
        size=out.shape[-1],
        columns=weight.columns,
        chunks=len(weight.words),
        groups=len(weight.scales),
        share=cdiv(len(weight.words), splits),
        CUT=weight.columns % CHUNK != 0,
        ROWS=program.rows,
        TILE=program.tile,
        GROUP=weight.group,
        ACTIVATION=gate or activation,
        GATED=gate is not None,
        PARTS=out.ndim == 3,
        BF16=x.dtype == torch.bfloat16,
        ASM=device != INTERPRETER,
        PREFETCHED=sizes.prefetched,
        STAGES=program.stages,
        num_warps=program.warps,
        **launch_options(device),
    )


@cache
def _shifts(device: torch.device) -> Tensor:
    """How far the scales of even and odd rows are in a pair. Loaded, as Triton moves no layout across a range."""
    return torch.tensor([0, 16], dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["rows", "columns", "chunks", "groups", "share"])
def _int4_product(
    x,
    words,
    scales,
    shifts,
    zeros,
    bias,
    out,
    rows,
    x_stride,
    size,
    columns,
    chunks,
    groups,
    share,
    CUT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PARTS: tl.constexpr,
    BF16: tl.constexpr,
    ASM: tl.constexpr,
    PREFETCHED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    half: tl.constexpr = TILE // 2 if GATED else TILE
    total = size * 2 if GATED else size
    first, split = tl.program_id(0) * half, tl.program_id(1)
    begin = split * share
    # A gate's tile is of both halves of the weight. Past the end, read the last row again: it is not stored.
    i = tl.arange(0, TILE)
    n = tl.minimum(first + i % half, size - 1) + i // half * size
    if PDL:
        for chunk in tl.static_range(PREFETCHED):
            prefetch(words + (tl.minimum(begin + chunk, chunks - 1) * total + n) * _QUARTER)
        wait()
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    present = m < rows
    q = tl.arange(0, _QUARTER)
    x_rows = x + m[None, :].to(tl.int64) * x_stride
    acc = tl.zeros([TILE, ROWS], tl.float32)
    # Scales that multiply sums are loaded a chunk ahead: Triton's pipeline copies no loads as narrow as these.
    factors = _of_groups(scales, n, total, begin, groups, GROUP) if shifts is None else None
    shift = None if shifts is None else tl.load(shifts + n % 2)
    for chunk in tl.range(begin, tl.minimum(begin + share, chunks), num_stages=STAGES):
        code = tl.load(words + (chunk * total + n[:, None]) * _QUARTER + q[None, :])
        own = _of_groups(zeros, n, total, chunk, groups, GROUP)
        own_x, left = x_rows + chunk * _CHUNK, columns - chunk * _CHUNK
        if shifts is None:
            next_factors = _of_groups(scales, n, total, chunk + 1, groups, GROUP)
            acc = _add_sums(acc, _numbers(code, own, None, None, BF16, ASM), factors, own_x, present, left, CUT, GROUP)
            factors = next_factors
        else:
            pairs = _of_groups(scales, n // 2, total // 2, chunk, groups, GROUP)
            acc = _add_values(acc, _numbers(code, own, pairs, shift, BF16, ASM), own_x, present, left, CUT)
    n = first + tl.arange(0, half)
    wanted = (n < size)[:, None] & present[None, :]
    if PARTS:
        place = out + (split * rows + m[None, :]).to(tl.int64) * size + n[:, None]
        tl.store(place, acc, mask=wanted)
    else:
        dtype = out.dtype.element_ty
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, half, ROWS)), (1, 2, 0)))
            gate = rounded(_plus(gate, bias, n, size), dtype)
            up = rounded(_plus(up, None if bias is None else bias + size, n, size), dtype)
            # Rounded where separate kernels would round.
            value = activate(gate, ACTIVATION).to(dtype).to(tl.float32) * up
        else:
            value = _plus(acc, bias, n, size)
            if ACTIVATION is not None:
                value = activate(value, ACTIVATION)
        tl.store(out + m[None, :].to(tl.int64) * size + n[:, None], value.to(dtype), mask=wanted)


@triton.jit
def _add_sums(acc, numbers, factors, x_rows, present, left, CUT: tl.constexpr, GROUP: tl.constexpr):
    """Add the product with four times 32 columns, group by group; ``left`` columns of x are there.

    One fence is enough: the loads of all four are waited for together.
    """
    w0, w1, w2, w3 = numbers
    part = dot(w0, _columns(x_rows, present, left, 0, CUT))
    if GROUP == 32:
        acc += part * factors[0].to(tl.float32)[:, None]
        part = tl.zeros_like(part)
    part = tl.dot(w1, _columns(x_rows, present, left, 1, CUT), part)
    if GROUP < 128:
        acc += part * factors[1].to(tl.float32)[:, None]
        part = tl.zeros_like(part)
    part = tl.dot(w2, _columns(x_rows, present, left, 2, CUT), part)
    if GROUP == 32:
        acc += part * factors[2].to(tl.float32)[:, None]
        part = tl.zeros_like(part)
    part = tl.dot(w3, _columns(x_rows, present, left, 3, CUT), part)
    return acc + part * factors[3].to(tl.float32)[:, None]


@triton.jit
def _numbers(code, zeros, pairs, shift, BF16: tl.constexpr, ASM: tl.constexpr):
    """``code - zero`` of each place of the words, in bf16 or fp16; with ``pairs`` times its scale, rounded once.

    A row's scale is that half of its pair which ``shift`` brings to the lowest bits: Triton's pipeline copies loads of
    32 bits.
    """
    dtype = tl.bfloat16 if BF16 else tl.float16
    offset: tl.constexpr = _BF16_OFFSET if BF16 else _FP16_OFFSET
    if pairs is not None:
        s0, s1 = (pairs[0] >> shift).to(tl.int16)[:, None], (pairs[1] >> shift).to(tl.int16)[:, None]
        s2, s3 = (pairs[2] >> shift).to(tl.int16)[:, None], (pairs[3] >> shift).to(tl.int16)[:, None]
    z0, z1 = zeros[0].to(tl.int16)[:, None], zeros[1].to(tl.int16)[:, None]
    z2, z3 = zeros[2].to(tl.int16)[:, None], zeros[3].to(tl.int16)[:, None]
    if not ASM:
        w0 = ((code & 15) - z0).to(dtype)
        w1 = (((code >> 4) & 15) - z1).to(dtype)
        w2 = (((code >> 8) & 15) - z2).to(dtype)
        w3 = (((code >> 12) & 15) - z3).to(dtype)
        if pairs is not None:
            w0 *= s0.to(dtype, bitcast=True)
            w1 *= s1.to(dtype, bitcast=True)
            w2 *= s2.to(dtype, bitcast=True)
            w3 *= s3.to(dtype, bitcast=True)
    elif pairs is None:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _BF16_ASM if BF16 else _FP16_ASM,
            "=r,=r,=r,=r,r,r,r,r,r",
            [code, z0 | offset, z1 | offset, z2 | offset, z3 | offset],
            dtype=(dtype, dtype, dtype, dtype),
            is_pure=True,
            pack=2,
        )
    else:
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            _BF16_VALUES_ASM if BF16 else _FP16_VALUES_ASM,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
            [code, z0 | offset, z1 | offset, z2 | offset, z3 | offset, s0, s1, s2, s3],
            dtype=(dtype, dtype, dtype, dtype),
            is_pure=True,
            pack=2,
        )
    return w0, w1, w2, w3


@triton.jit
def _add_values(acc, values, x_rows, present, left, CUT: tl.constexpr):
    """Add the product with four times 32 columns; ``left`` columns of x are there. One fence, as in ``_add_sums``."""
    acc = dot(values[0], _columns(x_rows, present, left, 0, CUT), acc)
    acc = tl.dot(values[1], _columns(x_rows, present, left, 1, CUT), acc)
    acc = tl.dot(values[2], _columns(x_rows, present, left, 2, CUT), acc)
    return tl.dot(values[3], _columns(x_rows, present, left, 3, CUT), acc)


@triton.jit
def _columns(x_rows, present, left, PLACE: tl.constexpr, CUT: tl.constexpr):
    """The 32 columns of x that lie in one place of a chunk's words, transposed."""
    k = (tl.arange(0, _QUARTER) + PLACE * _QUARTER)[:, None]
    mask = present[None, :] & (k < left) if CUT else present[None, :]
    return tl.load(x_rows + k, mask=mask, other=0.0)


@triton.jit
def _of_groups(grid, n, total, chunk, groups, GROUP: tl.constexpr):
    """The scale or zero of the rows ``n`` at each place of a chunk's words; after the last column any group's."""
    last = groups - 1
    first = chunk * (_CHUNK // GROUP)
    if grid is None:
        v0 = tl.full([1], _MIDDLE, tl.int32)
        v1, v2, v3 = v0, v0, v0
    else:
        v0 = tl.load(grid + tl.minimum(first, last) * total + n)
        v1 = v0 if GROUP >= 64 else tl.load(grid + tl.minimum(first + 1, last) * total + n)
        v2 = v0 if GROUP == 128 else tl.load(grid + tl.minimum(first + 64 // GROUP, last) * total + n)
        v3 = v2 if GROUP >= 64 else tl.load(grid + tl.minimum(first + 3, last) * total + n)
    return v0, v1, v2, v3


@triton.jit
def _plus(value, bias, n, size):
    if bias is not None:
        value += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[:, None]
    return value
