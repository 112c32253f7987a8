"""The matrix product with a weight, and what else an implementation can do."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Scales(NamedTuple):
    """Factors of a product that its reader applies.

    Attributes:
        rows: ``[T]`` fp32.
        columns: ``[out]`` fp32.
    """

    rows: Tensor
    columns: Tensor


class Linear(ABC):
    """``x [T, in] -> [T, out]`` with a weight ``[out, in]`` and an optional ``bias [out]``.

    Callers call ``divides``, ``has_scales``, ``activates`` and ``adds_in_place`` before the method after it.

    Attributes:
        bias: added by a call.
        input_group: where x is multiplied in fp8, the columns that share a scale, 0 for all; None in other types.
    """

    bias: Tensor | None
    input_group: int | None = None

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The product plus the bias, in x's dtype."""

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """The product alone."""

    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """The product plus the bias, as pieces of so many columns; their rows may be at any stride."""
        pieces: Sequence[Tensor] = self(x).split([*sizes], 1)
        return pieces

    def in_one_order(self) -> "Linear":
        """A format's own product, with one order of sums for all numbers of rows."""
        raise NotImplementedError

    def divides(self, x: Tensor) -> bool:
        """Whether the product of these rows is faster in parts, if the reader can add them up."""
        return False

    def parts(self, x: Tensor) -> Tensor:
        """The product alone, ``[S, T, out]`` fp32 to be summed."""
        raise NotImplementedError

    def has_scales(self, x: Tensor) -> bool:
        """Whether the product of these rows is faster without its scales, if the reader can apply them."""
        return False

    def unscaled(self, x: Tensor) -> tuple[Tensor, Scales]:
        """The product alone in x's dtype, and the factors that it lacks."""
        raise NotImplementedError

    def activates(self, x: Tensor, activation: str) -> bool:
        """Whether ``activated`` serves these rows and this kernel's name of an activation."""
        return False

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """The activated product with its bias."""
        raise NotImplementedError

    def adds_in_place(self, x: Tensor) -> bool:
        """Whether ``add_`` is the fastest way to add the product of these rows to the residual."""
        return False

    def add_(self, x: Tensor, onto: Tensor) -> Tensor:
        """The product added to the residual ``onto [T, out]`` in place."""
        raise NotImplementedError
