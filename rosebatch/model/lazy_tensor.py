"""Tensors that are cut, joined and reordered before they are read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from rosebatch.ops.weight import Indices

# What is wanted of some dimensions, counted from 0.
Cuts = Mapping[int, Indices]


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that reads no more than is wanted of it.

    Attributes:
        shape: after all cuts.
        part: reads the part that is left after further cuts; contiguous.
    """

    shape: tuple[int, ...]
    part: Callable[[Cuts], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """A tensor in memory."""
        return cls(tuple(tensor.shape), lambda cuts: select(tensor, cuts))

    def read(self) -> Tensor:
        """All that is left after the cuts."""
        return self.part({})

    def take(self, dim: int, indices: Indices) -> "LazyTensor":
        """These indices of a dimension, in this order."""
        dim, chosen = dim % len(self.shape), np.asarray(indices)
        shape = (*self.shape[:dim], len(chosen), *self.shape[dim + 1 :])

        def part(cuts: Cuts) -> Tensor:
            return self.part({**cuts, dim: chosen[np.asarray(cuts[dim])] if dim in cuts else chosen})

        return LazyTensor(shape, part)

    def map(self, function: Callable[[Tensor], Tensor]) -> "LazyTensor":
        """With this function of each element."""
        part = self.part
        return LazyTensor(self.shape, lambda cuts: function(part(cuts)))

    def transposed(self) -> "LazyTensor":
        """With its last two dimensions swapped."""
        last = len(self.shape) - 1
        swapped = {last: last - 1, last - 1: last}
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        part = self.part
        return LazyTensor(shape, lambda cuts: part({swapped.get(d, d): cuts[d] for d in cuts}).mT.contiguous())


def join(parts: Sequence[LazyTensor], dim: int) -> LazyTensor:
    """Tensors one after the other in a dimension. Each is copied into place: memory never holds all of them twice."""
    first, dim = parts[0], dim % len(parts[0].shape)
    if len(parts) == 1:
        return first
    sizes = [part.shape[dim] for part in parts]

    def part(cuts: Cuts) -> Tensor:
        wanted, start, out = np.asarray(cuts.get(dim, range(sum(sizes)))), 0, None
        for each, size in zip(parts, sizes, strict=True):
            places = np.flatnonzero((wanted >= start) & (wanted < start + size))
            values = each.part({**cuts, dim: wanted[places] - start})
            start += size
            if out is None:
                out = values.new_empty(*values.shape[:dim], len(wanted), *values.shape[dim + 1 :])
            if len(places) and places[-1] - places[0] == len(places) - 1:
                out.narrow(dim, int(places[0]), len(places)).copy_(values)
            else:
                out.index_copy_(dim, torch.from_numpy(places).to(out.device), values)
        assert out is not None
        return out

    return LazyTensor((*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :]), part)


def stack(parts: Sequence[LazyTensor]) -> LazyTensor:
    """Tensors of one shape along a new first dimension, each copied into place."""

    def part(cuts: Cuts) -> Tensor:
        inner = {dim - 1: indices for dim, indices in cuts.items() if dim}
        wanted = [parts[i] for i in cuts.get(0, range(len(parts)))]
        first = wanted[0].part(inner)
        out = first.new_empty(len(wanted), *first.shape)
        out[0] = first
        for place, each in enumerate(wanted[1:], 1):
            out[place] = each.part(inner)
        return out

    return LazyTensor((len(parts), *parts[0].shape), part)


def select(tensor: Tensor, cuts: Cuts) -> Tensor:
    """A part of a tensor in memory; the tensor itself if that is all of it in its order."""
    for dim, indices in cuts.items():
        wanted = np.asarray(indices)
        if not np.array_equal(wanted, np.arange(tensor.shape[dim])):
            tensor = tensor.index_select(dim, torch.from_numpy(wanted).to(tensor.device))
    return tensor
