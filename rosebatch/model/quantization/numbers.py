"""Numbers of few bits that share scales: the tensors that ``GroupedWeight`` has, and those that pack it read."""

from dataclasses import dataclass

import numpy as np
import torch

from rosebatch.model.lazy_tensor import LazyTensor


@dataclass(frozen=True, slots=True)
class GroupedNumbers:
    """A value is ``(number - zero) · scale``; elements of a group share zero and scale.

    Attributes:
        numbers: ``[..., out, in]``, the bytes of integers or of narrow floats.
        kind: dtype of the numbers, of one byte; or ``E2M1_KIND``.
        scales: ``[..., R, G]`` fp32.
        zeros: ``[..., R, G]``; None if they are 0.
        row_of: ``[out]``, the row of ``scales`` of each row.
        group_of: ``[in]``, the column of ``scales`` of each column.
        dtype: of the run.
        bits: that an integer has at most.
    """

    numbers: LazyTensor
    kind: torch.dtype
    scales: LazyTensor
    zeros: LazyTensor | None
    row_of: np.ndarray
    group_of: np.ndarray
    dtype: torch.dtype
    bits: int = 8


def groups_of_neighbours(group_of: np.ndarray, size: int) -> np.ndarray | None:
    """The group of each ``size`` neighbours, the last ones perhaps fewer.

    None if some neighbours have several groups, as where a shard begins inside of one.
    """
    groups = group_of[::size]
    return groups if np.array_equal(np.repeat(groups, size)[: len(group_of)], group_of) else None
