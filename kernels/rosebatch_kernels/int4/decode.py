"""The values of some rows of 4-bit integers in Triton, for products of many rows by cuBLAS."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.whole_numbers import cdiv
from rosebatch_kernels.int4.layout import CHUNK, MIDDLE, QUARTER, Int4Weight
from rosebatch_kernels.int4.sizes import Sizes

_CHUNK = tl.constexpr(CHUNK)
_QUARTER = tl.constexpr(QUARTER)
_MIDDLE = tl.constexpr(MIDDLE)


def decode_(out: Tensor, weight: Int4Weight, first: int, *, sizes: Sizes, device: Device) -> Tensor:
    """Write the values of the rows from ``first`` on, computed in fp32 and rounded once.

    Args:
        out: ``[count, in]``, contiguous; returned.
        weight: the matrix.
        first: row of the matrix.
    """
    assert out.is_contiguous() and out.shape[1] == weight.columns
    _int4_decode[(cdiv(len(out), sizes.decoded), len(weight.words))](
        words=weight.words,
        scales=weight.scales,
        zeros=weight.zeros,
        out=out,
        first=first,
        count=len(out),
        total=weight.shape[0],
        columns=weight.columns,
        groups=len(weight.scales),
        TILE=sizes.decoded,
        GROUP=weight.group,
        **launch_options(device),
    )
    return out


@triton.jit(do_not_specialize=["first", "groups"])
def _int4_decode(
    words,
    scales,
    zeros,
    out,
    first,
    count,
    total,
    columns,
    groups,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    n, chunk = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1)
    row = tl.minimum(first + n, total - 1)
    q = tl.arange(0, _QUARTER)
    code = tl.load(words + (chunk * total + row[:, None]) * _QUARTER + q[None, :])
    for place in tl.static_range(4):
        column = chunk * _CHUNK + place * _QUARTER
        group = tl.minimum(column // GROUP, groups - 1) * total + row
        zero = _MIDDLE if zeros is None else tl.load(zeros + group)[:, None]
        value = ((code >> 4 * place) & 15).to(tl.int32) - zero
        value = value.to(tl.float32) * tl.load(scales + group).to(tl.float32)[:, None]
        k = column + q[None, :]
        wanted = (n < count)[:, None] & (k < columns)
        tl.store(out + n[:, None].to(tl.int64) * columns + k, value.to(out.dtype.element_ty), mask=wanted)
