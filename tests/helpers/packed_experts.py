"""Random matrices of experts as the kernel keeps them, and their values."""

from dataclasses import replace

import torch
from torch import Tensor

from rosebatch_kernels.common.packing import CHUNK, MIDDLE, empty_words, pack_
from rosebatch_kernels.experts.packed import BITS, Packed, piece_of
from tests.model.quantization.numbers import E2M1

# Forms, columns of a scale, and whether there are zeros: all that the kernel tells apart.
FORMS = [
    ("e2m1", 32, False),
    ("e4m3", 128, False),
    ("e4m3", 64, False),
    ("e4m3", 0, False),
    ("int4", 128, True),
    ("int4", 32, False),
    ("int4", 32, True),
    ("int4", 0, False),
]
# Codes of e4m3 for 1 / 2, 1, ..., 4: sums of finer numbers have more bits than fp32.
HALVES = torch.arange(1, 9).div(2).to(torch.float8_e4m3fn).view(torch.uint8)


def empty_packed(form, unit, has_zeros, shape, *, in_blocks=False) -> Packed:
    """``[E, out, in]`` of any numbers; see ``Packed``."""
    experts, rows, columns = shape
    words = empty_words(shape, piece_of(form), torch.device("cpu"))
    chunks = words.shape[1]
    if form == "e2m1":
        return Packed(form, columns, words, unit, torch.empty(experts, chunks, rows, dtype=torch.int32))
    scales = torch.empty(experts, chunks * CHUNK // unit if unit else 1, rows)
    return Packed(form, columns, words, unit, scales, torch.empty_like(scales) if has_zeros else None, in_blocks)


def random_packed(form, unit, has_zeros, shape, seed, *, exact=False, in_blocks=False) -> Packed:
    """``[E, out, in]``, values of about 1 / sqrt(in).

    Args:
        form, unit, has_zeros: see ``Packed``.
        shape: E, out, in.
        seed: of the numbers.
        exact: whether scales are 1 / 2, 1 or 2, and numbers multiples of 1 / 2.
        in_blocks: see ``Packed``.
    """
    generator = torch.Generator().manual_seed(seed)
    experts, rows, columns = shape

    def randint(low, high, *size):
        return torch.randint(low, high, size, generator=generator)

    codes = randint(0, 1 << BITS[form], *shape).to(torch.uint8)
    if form == "e4m3":
        # None of the two NaNs; of exact ones, multiples of 1 / 2 up to 4, with their signs.
        codes = HALVES[codes.long() % 8] | codes & 128 if exact else codes % 127
        codes[..., ::5] |= 128
    packed = empty_packed(form, unit, has_zeros, shape, in_blocks=in_blocks)
    for each, own in zip(packed.words, codes, strict=True):
        pack_(each, own)
    if form == "e2m1":
        powers = randint(126, 129, experts, 4 * packed.words.shape[1], rows)
        powers = powers if exact else powers - round(columns**0.5).bit_length() - 2
        four = powers.unflatten(1, (-1, 4)) << torch.tensor([0, 8, 16, 24])[:, None]
        return replace(packed, scales=four.sum(2).to(torch.int32))
    powers = randint(126, 129, *packed.scales.shape)
    scales = torch.rand(packed.scales.shape, generator=generator) * columns**-0.5 / (100 if form == "e4m3" else 5)
    zeros = randint(0, 16, *packed.scales.shape).float() if has_zeros else None
    scales = torch.exp2(powers - 127.0) if exact else scales
    if in_blocks:
        scales = scales[..., ::CHUNK].repeat_interleave(CHUNK, 2)[..., :rows].contiguous()
    return replace(packed, scales=scales, zeros=zeros)


def values_of(packed: Packed) -> Tensor:
    """``[E, out, in]`` fp32, by integers."""
    bits, piece = BITS[packed.form], piece_of(packed.form)
    places = [(packed.words.int() >> bits * place) & ((1 << bits) - 1) for place in range(CHUNK // piece)]
    codes = torch.stack(places, 3).permute(0, 2, 1, 3, 4).flatten(2)
    size = packed.unit or codes.shape[2]
    if packed.form == "e2m1":
        exponents = torch.stack([(packed.scales >> 8 * place) & 255 for place in range(4)], 2).flatten(1, 2)
        found = E2M1[codes] * torch.exp2(exponents - 127.0).repeat_interleave(size, 1).mT
        return found[..., : packed.columns].contiguous()
    scales = packed.scales.repeat_interleave(size, 1).mT
    if packed.form == "e4m3":
        numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    else:
        numbers = codes - (MIDDLE if packed.zeros is None else packed.zeros.repeat_interleave(size, 1).mT)
    return (numbers * scales)[..., : packed.columns].contiguous()
