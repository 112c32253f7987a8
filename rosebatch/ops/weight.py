"""What operators get of a checkpoint's matrix."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
from torch import Tensor

from rosebatch_kernels.common.device import Device as Device
from rosebatch_kernels.experts.packed import Packed as Packed
from rosebatch_kernels.linear.interface import Linear as Linear

# Indices of a dimension, in any order.
Indices = range | np.ndarray


class Weight(ABC):
    """A matrix ``[out, in]``, or one for each expert ``[E, out, in]``, in the format of its checkpoint.

    A shard's part is cut, projections are joined and rows are reordered in that format, before anything is read.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape after all cuts."""

    @abstractmethod
    def rows(self, indices: Indices) -> "Weight":
        """These rows, in this order."""

    @abstractmethod
    def columns(self, indices: range) -> "Weight":
        """These columns, which are neighbours."""

    def is_like(self, other: "Weight") -> bool:
        """Whether rows of both can stand in one matrix of this format."""
        return type(other) is type(self)

    @abstractmethod
    def join(self, others: Sequence[Self]) -> Self:
        """The rows of this matrix, then those of ``others``, which it ``is_like``."""

    def parts(self) -> Sequence["Weight"]:
        """Matrices of one format each, whose rows are these in their order."""
        return [self]

    @abstractmethod
    def stack(self, others: Sequence["Weight"]) -> "Weight":
        """``[E, out, in]`` of this matrix and ``others``, one for each expert."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Read the values, contiguous in the dtype of the run.

        Raises:
            UserError: a tensor is missing, unreadable or has another shape.
        """

    def linear(self, bias: Tensor | None, device: Device | None) -> Linear | None:
        """The format's own product with ``bias [out]``, or None if it has none: ``dense`` is multiplied then.

        Args:
            bias: in the dtype of the run, or None.
            device: a GPU; None for a CPU.
        """
        return None

    def experts(self) -> Packed | None:
        """``[E, out, in]`` as the products of experts on a GPU take it; None: they multiply ``dense``.

        Raises:
            UserError: see ``dense``.
        """
        return None
