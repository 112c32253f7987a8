"""Numbers of few bits of all experts, as the kernel for their products reads them."""

import numpy as np
import torch
from torch import Tensor

from rosebatch.model.quantization.numbers import GroupedNumbers, groups_of_neighbours
from rosebatch.model.quantization.packing import E2M1_KIND
from rosebatch.ops.packed import CHUNK, MAX_EXPONENT, MIDDLE, Packed, empty_words, pack_, piece_of

# By the kind of a weight's numbers.
_FORMS = {E2M1_KIND: "e2m1", torch.float8_e4m3fn: "e4m3", torch.int8: "int4", torch.uint8: "int4"}
# Bits of fp32's mantissa.
_MANTISSA = 23
# Codes that are in memory as bytes at once, about.
_AT_ONCE = 1 << 28


def packed_experts(weight: GroupedNumbers) -> Packed | None:
    """``[E, out, in]``, read some experts at a time; None if the kernel has no such numbers or groups."""
    numbers, zeros, row_of = weight.numbers, weight.zeros, weight.row_of
    form = _FORMS.get(weight.kind)
    has_zeros, is_signed = zeros is not None, weight.kind == torch.int8
    is_served = weight.bits <= 4 and (has_zeros or is_signed) if form == "int4" else form is not None and not has_zeros
    if form is None or len(numbers.shape) != 3 or not is_served:
        return None
    found = _units(weight.group_of, (piece_of(form),) if form == "e2m1" else (0, CHUNK, piece_of(form)))
    if found is None:
        return None
    (count, rows, columns), (unit, groups) = numbers.shape, found
    words, all_scales, all_zeros, step = None, [], [], max(1, _AT_ONCE // (rows * columns))
    for start in range(0, count, step):
        part = {0: range(start, min(start + step, count))}
        codes, own = numbers.part(part), _spread(weight.scales.part(part), row_of, groups)
        # Signed ones begin at -8.
        middle = MIDDLE if is_signed else 0
        if form == "int4" and (codes := codes + middle).max() >= 2 * MIDDLE:
            return None
        four = _exponents(own) if form == "e2m1" else own
        if four is None:
            return None
        if words is None:
            words = empty_words(numbers.shape, piece_of(form), codes.device)
        for place, each in enumerate(codes, start):
            pack_(words[place], each)
        all_scales.append(four)
        if zeros is not None:
            all_zeros.append(_spread(zeros.part(part).float() + middle, row_of, groups))
    assert words is not None, "there are experts"
    in_blocks = groups_of_neighbours(row_of, CHUNK) is not None
    own_zeros = torch.cat(all_zeros) if all_zeros else None
    return Packed(form, columns, words, unit, torch.cat(all_scales), own_zeros, in_blocks)


def _spread(each: Tensor, row_of: np.ndarray, groups: np.ndarray) -> Tensor:
    """``[E, R, G]`` -> ``[E, U, out]`` of the units' groups."""
    rows, units = (torch.from_numpy(indices).to(each.device) for indices in (row_of, groups))
    return each[:, rows][..., units].mT.contiguous()


def _units(group_of: np.ndarray, served: tuple[int, ...]) -> tuple[int, np.ndarray] | None:
    """The first of these numbers of neighbouring columns that never cross groups, and the group of each.

    0 stands for all columns. Those of others fill whole chunks. None if all cross groups, as where a rank's columns
    begin inside of one.
    """
    for unit in served:
        groups = groups_of_neighbours(group_of, unit or len(group_of))
        if groups is not None:
            missing = -len(groups) % (CHUNK // unit) if unit else 0
            return unit, np.pad(groups, (0, missing), mode="edge")
    return None


def _exponents(scales: Tensor) -> Tensor | None:
    """``[E, U, out]`` powers of two -> ``[E, U / 4, out]`` int32, see ``Packed``; None if some are not or too large."""
    bits = scales.view(torch.int32)
    exponents, mantissa = bits >> _MANTISSA, bits & ((1 << _MANTISSA) - 1)
    # The smallest one is subnormal.
    if (mantissa != (exponents == 0) * (1 << _MANTISSA - 1)).any():
        return None
    if exponents.min() < 0 or exponents.max() > MAX_EXPONENT:
        return None
    four = exponents.unflatten(1, (-1, 4)).unbind(2)
    words: Tensor = four[0] | four[1] << 8 | four[2] << 16 | four[3] << 24
    return words
