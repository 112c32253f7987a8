"""The values themselves, in floats."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from rosebatch.model.lazy_tensor import Cuts, LazyTensor, join, select, stack
from rosebatch.ops.weight import Indices, Weight


@dataclass(frozen=True, slots=True)
class DenseWeight(Weight):
    """See ``Weight``; ``values [..., out, in]``."""

    values: LazyTensor

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """A matrix in memory."""
        return cls(LazyTensor.of(tensor))

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Weight``."""
        return self.values.shape

    def rows(self, indices: Indices) -> "DenseWeight":
        """See ``Weight``."""
        return DenseWeight(self.values.take(-2, indices))

    def columns(self, indices: range) -> "DenseWeight":
        """See ``Weight``."""
        return DenseWeight(self.values.take(-1, indices))

    def join(self, others: Sequence["DenseWeight"]) -> "DenseWeight":
        """See ``Weight``."""
        return DenseWeight(join([self.values, *(other.values for other in others)], -2))

    def stack(self, others: Sequence[Weight]) -> "DenseWeight":
        """See ``Weight``."""
        return DenseWeight(stack([self.values, *map(values_of, others)]))

    def dense(self) -> Tensor:
        """See ``Weight``."""
        return self.values.read()


def values_of(weight: Weight) -> LazyTensor:
    """The values of a weight of any format, unread."""
    if isinstance(weight, DenseWeight):
        return weight.values
    last = len(weight.shape) - 1

    def part(cuts: Cuts) -> Tensor:
        left = {dim: indices for dim, indices in cuts.items() if dim != last - 1}
        wanted = weight.rows(cuts[last - 1]) if last - 1 in cuts else weight
        return select(wanted.dense(), left)

    return LazyTensor(weight.shape, part)
