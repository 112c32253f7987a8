"""Fields of few bits, packed into bytes or words: the first field is in the lowest bits."""

from math import gcd

import numpy as np
import torch
from torch import Tensor

from rosebatch.model.lazy_tensor import Cuts, LazyTensor

# 4-bit floats (OCP Microscaling Formats v1.0) by code: a sign, two bits of exponent, one of mantissa. PyTorch's type
# has two of them in a byte: here it stands for codes of a byte each.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
E2M1_KIND = torch.float4_e2m1fn_x2
# Values that are in memory as numbers of four bytes at once, about.
AT_ONCE = 1 << 22


def unpacked(words: LazyTensor, bits: int, dim: int, count: int, word_bits: int) -> LazyTensor:
    """The fields of words along a dimension, a byte each; where bits do not divide a word, fields cross words.

    Args:
        words: uint8 or int32.
        bits: of a field, 8 at most.
        dim: of the words, which is packed.
        count: of fields there; the last word may have room for more.
        word_bits: of a word.
    """
    dim %= len(words.shape)
    # So many words begin and end with whole fields.
    period = bits // gcd(bits, word_bits)
    fields = period * word_bits // bits

    def part(cuts: Cuts) -> Tensor:
        wanted = np.asarray(cuts.get(dim, range(count)))
        first, stop = (0, 0) if not len(wanted) else (wanted.min() // fields, wanted.max() // fields + 1)
        needed = range(first * period, min(stop * period, words.shape[dim]))
        read = words.part({**cuts, dim: needed})
        out = _fields(read.movedim(dim, 0), bits, period, fields, word_bits).movedim(0, dim)
        places = torch.from_numpy(wanted - first * fields).to(out.device)
        return out.index_select(dim, places)

    return LazyTensor((*words.shape[:dim], count, *words.shape[dim + 1 :]), part)


def _fields(words: Tensor, bits: int, period: int, fields: int, word_bits: int) -> Tensor:
    """``[W, ...]`` words -> ``[F, ...]`` uint8."""
    missing = -len(words) % period
    if missing:
        words = torch.cat((words, words.new_zeros(missing, *words.shape[1:])))
    groups = words.unflatten(0, (-1, period))
    out = torch.empty(len(groups), fields, *words.shape[1:], dtype=torch.uint8, device=words.device)
    mask = (1 << bits) - 1
    # Headers alone: PyTorch takes its time for operations without values.
    for field in () if words.is_meta else range(fields):
        word, start = divmod(field * bits, word_bits)
        value = groups[:, word] >> start
        if start + bits > word_bits:
            # The sign of a word fills its upper bits when it is shifted.
            value = value & ((1 << (word_bits - start)) - 1) | groups[:, word + 1] << (word_bits - start)
        out[:, field] = value & mask
    return out.flatten(0, 1)


def floats(numbers: Tensor, kind: torch.dtype) -> Tensor:
    """fp32 of the bytes of numbers: of a type of one byte, or of codes of 4-bit floats."""
    if kind == E2M1_KIND:
        return torch.tensor(_E2M1, device=numbers.device)[numbers.int()]
    return numbers.view(kind).float()


def powers_of_two(exponents: Tensor) -> Tensor:
    """fp32 of E8M0 scales, as bytes or in that dtype: 2 to the power of the byte less 127; 255 is NaN."""
    return exponents.view(torch.uint8).view(torch.float8_e8m0fnu).float()
