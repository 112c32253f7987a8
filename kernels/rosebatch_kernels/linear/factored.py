"""An RMSNorm of few rows between two products, without a kernel of its own.

The norm is ``weight · x · factor``, with one factor for each row. A product is linear in its rows, so the factor may be
applied to its result instead. The kernel in front of it multiplies with the weight and adds up squares; the product
makes the factor of them (source: FlashNorm, arXiv 2407.09577, which multiplies the weight into the matrix: here the
matrix stays as it is).
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Factored:
    """Normed rows but for their factors ``rsqrt(mean of squares + eps)``.

    Attributes:
        value: ``[T, H]``, ``weight · x`` in a dtype with the range of fp32.
        squares: ``[N, T]`` fp32, sums over N parts of each row's x².
        eps: of the norm.
    """

    value: Tensor
    squares: Tensor
    eps: float

    def __len__(self) -> int:
        """Rows."""
        return len(self.value)
