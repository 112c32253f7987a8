"""The quantized matrices of all experts as the kernel reads them."""

from dataclasses import dataclass

from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.packing import CHUNK as CHUNK
from rosebatch_kernels.common.packing import MIDDLE as MIDDLE

# Bits of a code.
BITS = {"e2m1": 4, "e4m3": 8, "int4": 4}
# The largest exponent byte of scales of e2m1, for 2: times a larger one, a step of the kernel's would overflow.
MAX_EXPONENT = 128


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The matrices ``[E, out, in]``; a value is ``code · scale``, or ``(code - zero) · scale`` of integers.

    Attributes:
        form: ``e2m1``, ``e4m3`` (floats of 4 and 8 bits), or ``int4``.
        columns: in.
        words: ``[E, C, out, P]`` int16, of C chunks, see ``empty_words``.
        unit: columns that share a scale: ``CHUNK``, P, or 0 for all.
        scales: ``[E, U, out]`` fp32, of the units of all chunks; of e2m1 ``[E, C, out]`` int32, whose bytes are four
            exponents, plus 127, the first in the lowest bits.
        zeros: ``[E, U, out]`` fp32, of integers; None if all are ``MIDDLE``.
        in_blocks: whether every ``CHUNK`` rows, from the first on, have the same scales.
    """

    form: str
    columns: int
    words: Tensor
    unit: int
    scales: Tensor
    zeros: Tensor | None = None
    in_blocks: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(E, out, in)``."""
        return self.words.shape[0], self.words.shape[2], self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in (self.words, self.scales, self.zeros) if each is not None)


def can_decode(device: Device) -> bool:
    """Whether the kernel serves a GPU: for sm_100 and sm_103, Triton 3.9 makes a trap of some of its forms."""
    return device.arch // 10 != 10


def piece_of(form: str) -> int:
    """P: words of a row of a chunk."""
    return CHUNK * BITS[form] // 16
