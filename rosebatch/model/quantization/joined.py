"""Projections of one input whose formats differ, as where a checkpoint leaves some of them in 16 bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rosebatch.model.lazy_tensor import join
from rosebatch.model.quantization.dense import DenseWeight, values_of
from rosebatch.ops.weight import Indices, Weight


@dataclass(frozen=True, slots=True)
class JoinedWeight(Weight):
    """See ``Weight``: rows of several formats. They stay in them as long as each format's rows stay neighbours."""

    matrices: Sequence[Weight]

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Weight``."""
        *lead, _, columns = self.matrices[0].shape
        return *lead, sum(each.shape[-2] for each in self.matrices), columns

    def rows(self, indices: Indices) -> Weight:
        """See ``Weight``."""
        wanted, ends = np.asarray(indices), np.cumsum([each.shape[-2] for each in self.matrices])
        owners = np.searchsorted(ends, wanted, side="right")
        if (np.diff(owners) < 0).any():
            return self._values().rows(wanted)
        starts = ends - [each.shape[-2] for each in self.matrices]
        return joined([self.matrices[own].rows(wanted[owners == own] - starts[own]) for own in np.unique(owners)])

    def columns(self, indices: range) -> Weight:
        """See ``Weight``."""
        return joined([each.columns(indices) for each in self.matrices])

    def join(self, others: Sequence["JoinedWeight"]) -> "JoinedWeight":
        """See ``Weight``."""
        return JoinedWeight([each for weight in (self, *others) for each in weight.matrices])

    def stack(self, others: Sequence[Weight]) -> DenseWeight:
        """See ``Weight``."""
        return self._values().stack(others)

    def dense(self) -> Tensor:
        """See ``Weight``."""
        return self._values().dense()

    def parts(self) -> Sequence[Weight]:
        """See ``Weight``."""
        return self.matrices

    def _values(self) -> DenseWeight:
        return DenseWeight(join([values_of(each) for each in self.matrices], -2))


def joined(weights: Sequence[Weight]) -> Weight:
    """The rows of all, one after the other; neighbours of one format become one matrix."""
    runs: list[list[Weight]] = []
    for weight in weights:
        if runs and runs[-1][0].is_like(weight):
            runs[-1].append(weight)
        else:
            runs.append([weight])
    matrices = [first.join(others) for first, *others in runs]
    return matrices[0] if len(matrices) == 1 else JoinedWeight(matrices)
