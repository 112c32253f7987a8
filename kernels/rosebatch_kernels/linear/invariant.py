"""Products that give a row the same bits whatever the number of rows, and a trial that finds which linears do.

On Hopper, bits of a 16-bit product depend on the number of parts that its depth is split into, and on nothing else. So
cuBLAS gives the same bits to all numbers of rows where it splits nothing, and the bits of our kernels. On other GPUs
and in other dtypes it may not.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.linear import kernel
from rosebatch_kernels.linear.interface import Linear
from rosebatch_kernels.linear.sizes import FIXED, FIXED_FP32
from rosebatch_kernels.linear.torch_linear import TorchLinear

# Numbers of rows around those at which libraries and our own tables choose another kernel.
_FEW = (1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 80, 96, 112, 128, 129, 160, 192, 224, 256, 257, 320, 384)
_MANY = (448, 512, 513, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
ROWS: tuple[int, ...] = _FEW + _MANY
# Elements of a tensor of the trial at most.
_MOST = 2**28
# Of x and weight: products of zero sums stay normal numbers in fp16, an activation's too.
_SCALE = 64.0
# Rows of a launch, whose offsets have 32 bits.
_ROWS_AT_ONCE = 2**13


class FixedLinear(TorchLinear):
    """``x [T, in] -> [T, out]`` by our kernel with the same tiles for all numbers of rows, in any floating type."""

    def __init__(self, weight: Tensor, bias: Tensor | None, device: Device) -> None:
        super().__init__(weight, bias)
        self._device = device
        self._sizes = (FIXED_FP32 if weight.dtype == torch.float32 else FIXED).of(device)

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._product(x, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._product(x, None)

    def adds_in_place(self, x: Tensor) -> bool:
        """See ``Linear``."""
        return self.bias is None

    def add_(self, x: Tensor, onto: Tensor) -> Tensor:
        """See ``Linear``."""
        for some, own in zip(x.split(_ROWS_AT_ONCE), onto.split(_ROWS_AT_ONCE), strict=True):
            kernel.add_(some, self.weight, own, sizes=self._sizes, device=self._device)
        return onto

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        each = x.split(_ROWS_AT_ONCE)
        outs = [kernel.linear(some, self.weight, bias, sizes=self._sizes, device=self._device) for some in each]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def differing_rows(
    make: Callable[[Tensor, Tensor | None], Linear | Callable[[Tensor], Tensor]],
    weight: Tensor,
    bias: Tensor | None,
    rows: Sequence[int] = (),
) -> int | None:
    """The first number of rows that gives other bits to a row; None if all give those that a single row has.

    The trial multiplies a row, and copies of it, with a weight such that all sums are zero except for rounding: another
    order of the additions shows in each of them. Then it multiplies ordinary numbers: another rounding shows in these.
    It covers what a ``Linear`` does besides a product.

    Args:
        make: a linear, or the product of a head, from a weight and a bias.
        weight, bias: such as the linear is to have; only shapes, dtypes and devices are read.
        rows: numbers to try, rising, by default ``ROWS``; those whose tensors would be large are left out.
    """
    limit = _MOST // max(weight.shape)
    counts = [*takewhile(lambda count: count <= limit, rows or ROWS)]
    found = (_first_differing(make, *numbers, bias is not None, counts) for numbers in _numbers(weight))
    return next((count for count in found if count is not None), None)


def _first_differing(
    make: Callable[[Tensor, Tensor | None], Linear | Callable[[Tensor], Tensor]],
    x: Tensor,
    weight: Tensor,
    biased: bool,
    counts: Sequence[int],
) -> int | None:
    onto = torch.linspace(-1, 1, len(weight), dtype=weight.dtype, device=weight.device)[None]
    for operation, serves in _operations(make(weight, onto[0] if biased else None), onto):
        expected = None
        for count in counts:
            if not serves(copies := x.repeat(count, 1)):
                continue
            out = operation(copies)
            expected = out[:1] if expected is None else expected
            if not torch.equal(out, expected.expand_as(out)):
                return count
    return None


_Operation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], bool]]


def _operations(linear: Linear | Callable[[Tensor], Tensor], onto: Tensor) -> Iterator[_Operation]:
    """What a linear does with rows, and whether it does so with these."""
    yield linear, lambda x: True
    if not isinstance(linear, Linear):
        return
    if linear.bias is not None:
        yield linear.product, lambda x: True
    yield lambda x: linear.add_(x, onto.repeat(len(x), 1)), linear.adds_in_place
    if onto.shape[1] % 2 == 0:
        yield lambda x: linear.activated(x, "silu_mul"), lambda x: linear.activates(x, "silu_mul")


def _numbers(weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows ``[1, in]``, each with a weight like the given one: products that are zero except for rounding, and others.

    The others are of the size of a residual, or of a gate.
    """
    (size_out, size_in), half = weight.shape, weight.shape[1] // 2
    generator = torch.Generator().manual_seed(0)

    def fill(part: Tensor, factor: float) -> None:
        few = (torch.randn(min(size_out, 64), part.shape[1], generator=generator) * factor).to(weight.device)
        for rows in part.split(len(few)):
            rows.copy_(few[: len(rows)])

    positive = torch.randn(1, half, generator=generator) * _SCALE
    x, numbers = torch.zeros(1, size_in, dtype=weight.dtype, device=weight.device), torch.zeros_like(weight)
    x[:, :half], x[:, half : 2 * half] = positive, -positive
    fill(numbers[:, :half], _SCALE)
    numbers[:, half : 2 * half] = numbers[:, :half]
    yield x, numbers
    x[:] = torch.randn(1, size_in, generator=generator)
    fill(numbers, size_in**-0.5)
    yield x, numbers
