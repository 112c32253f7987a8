"""The sum of a product's parts in Triton, for readers that do not add them up."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.whole_numbers import cdiv

# Elements of a program: few, so that the sum of one row has several.
_TILE = 512


def sum_parts(parts: Tensor, bias: Tensor | None, dtype: torch.dtype, *, device: Device) -> Tensor:
    """The sum ``[T, out]`` of ``parts [S, T, out]`` fp32 plus ``bias [out]``, rounded once."""
    splits, rows, size = parts.shape
    out = torch.empty(rows, size, dtype=dtype, device=parts.device)
    _sum_parts[(cdiv(rows * size, _TILE),)](
        parts=parts,
        bias=bias,
        out=out,
        count=rows * size,
        size=size,
        SPLITS=splits,
        TILE=_TILE,
        **launch_options(device),
    )
    return out


@triton.jit(do_not_specialize=["count", "size"])
def _sum_parts(parts, bias, out, count, size, SPLITS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = place < count
    if PDL:
        wait()
    total = tl.zeros([TILE], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * count.to(tl.int64) + place, mask=there, other=0.0)
    if bias is not None:
        total += tl.load(bias + place % size, mask=there, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=there)
