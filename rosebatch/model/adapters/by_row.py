"""Matrices of a model with several adapters, of which each row of a step has its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rosebatch.core.errors import UserError
from rosebatch.model.adapters.changes import LowRank
from rosebatch.model.lazy_tensor import select
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.quantization.joined import joined
from rosebatch.ops.adapters import (
    AdaptedLinear,
    AdapterRows,
    AddedProducts,
    AddedStack,
    Stack,
    StackedRows,
    stacked_ranks,
)
from rosebatch.ops.ops import Linear, Ops
from rosebatch.ops.weight import Device, Indices, Packed, Weight


@dataclass(frozen=True, slots=True)
class Added:
    """What an adapter adds to a product: ``B A x``.

    Attributes:
        name: of the adapter's tensor, for errors.
        a: ``[r, in]`` fp32.
        b: ``[out, r]`` fp32, with the scale.
        ranks: of the matrices that are one product here, in A one below the other.
    """

    name: str
    a: Tensor
    b: Tensor
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, change: LowRank, place: Callable[[Tensor, torch.dtype], Tensor]) -> "Added":
        """What would be merged into a matrix; ``place`` brings numbers to the run's device."""
        a, b = (place(each, torch.float32) for each in (change.a, change.b))
        return cls(change.names[0], a, b * change.scale, (len(a),))


@dataclass(frozen=True, slots=True)
class AdaptedWeight(Weight):
    """See ``Weight``: a matrix ``[out, in]``, and what each adapter adds to the product with it.

    Attributes:
        matrix: of the model.
        added: by number of the adapter; None for one that leaves it as it is.
        dtype: of the run.
        row_parts: ``[out]``, which of the matrices that were joined each row is of; None if none were.
    """

    matrix: Weight
    added: tuple[Added | None, ...]
    dtype: torch.dtype
    row_parts: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Weight``."""
        return self.matrix.shape

    @property
    def is_changed(self) -> bool:
        """Whether any adapter adds to it."""
        return any(each is not None for each in self.added)

    @property
    def alone(self) -> Weight:
        """The matrix, for whoever reads its values.

        Raises:
            UserError: an adapter adds to it.
        """
        if changing := [each.name for each in self.added if each is not None]:
            what = "of several adapters, only products of layers are served: give this one's rows a run of their own"
            raise UserError(f"--lora: {changing[0]}: {what}")
        return self.matrix

    def rows(self, indices: Indices) -> "AdaptedWeight":
        """See ``Weight``."""
        cut = tuple(each and replace(each, b=select(each.b, {0: indices})) for each in self.added)
        parts = None if self.row_parts is None else self.row_parts[np.asarray(indices)]
        return replace(self, matrix=self.matrix.rows(indices), added=cut, row_parts=parts)

    def columns(self, indices: range) -> "AdaptedWeight":
        """See ``Weight``."""
        cut = tuple(each and replace(each, a=select(each.a, {1: indices})) for each in self.added)
        return replace(self, matrix=self.matrix.columns(indices), added=cut)

    def join(self, others: Sequence["AdaptedWeight"]) -> "AdaptedWeight":
        """See ``Weight``. Each matrix keeps its own ranks: A's are one below the other, B's are blocks."""
        weights = (self, *others)
        assert all(weight.row_parts is None for weight in weights), "they are joined once"
        sizes = [weight.shape[0] for weight in weights]
        slots = zip(*(weight.added for weight in weights), strict=True)
        matrix = joined([weight.matrix for weight in weights])
        added = tuple(_joined(each, sizes) for each in slots)
        return replace(self, matrix=matrix, added=added, row_parts=np.repeat(np.arange(len(sizes)), sizes))

    def stack(self, others: Sequence[Weight]) -> Weight:
        """See ``Weight``."""
        return self.alone.stack([each.alone if isinstance(each, AdaptedWeight) else each for each in others])

    def parts(self) -> Sequence[Weight]:
        """See ``Weight``."""
        return self.alone.parts()

    def dense(self) -> Tensor:
        """See ``Weight``."""
        return self.alone.dense()

    def linear(self, bias: Tensor | None, device: Device | None) -> Linear | None:
        """See ``Weight``."""
        return self.alone.linear(bias, device)

    def experts(self) -> Packed | None:
        """See ``Weight``."""
        return self.alone.experts()


def _joined(each: Sequence[Added | None], sizes: Sequence[int]) -> Added | None:
    """What an adapter adds to several products, as to one product with all of their outputs."""
    found = [added for added in each if added is not None]
    if not found:
        return None
    blocks = [found[0].b.new_empty(size, 0) if own is None else own.b for own, size in zip(each, sizes, strict=True)]
    ranks = tuple(0 if own is None else sum(own.ranks) for own in each)
    return Added(found[0].name, torch.cat([own.a for own in found]), torch.block_diag(*blocks), ranks)


def by_row(ops: Ops, rows: AdapterRows | StackedRows) -> Ops:
    """The operators, whose products add what adapters do.

    Args:
        ops: of a model without adapters.
        rows: of each step.
    """

    def linear(weight: Weight, bias: Tensor | None) -> Linear:
        if not isinstance(weight, AdaptedWeight) or not weight.is_changed:
            return ops.linear(weight, bias)
        if isinstance(rows, StackedRows):
            return AdaptedLinear(ops.linear(weight.matrix, bias), AddedStack(_stack(weight, rows), rows))

        def product(matrix: Tensor) -> Linear:
            return ops.linear(DenseWeight.of(matrix.to(weight.dtype)), None)

        slots = [None if own is None else (product(own.a), product(own.b)) for own in weight.added]
        return AdaptedLinear(ops.linear(weight.matrix, bias), AddedProducts(slots, rows))

    return replace(ops, linear=linear)


def _stack(weight: AdaptedWeight, rows: StackedRows) -> Stack:
    """What all adapters add, for kernels: each part with the ranks of the largest; zeros where there is nothing.

    With fewer slots than adapters, all are on the host, and nothing is in the slots yet.
    """
    out, width = weight.shape
    changing = [own for own in weight.added if own is not None]
    like, parts, most = changing[0].a, len(changing[0].ranks), max(max(own.ranks) for own in changing)
    row_parts = np.zeros(out, np.int64) if weight.row_parts is None else weight.row_parts
    ranks, count = stacked_ranks(most), len(weight.added)
    waits = rows.count < count
    place, pins = "cpu" if waits else like.device, waits and like.is_cuda
    a, b = (
        torch.zeros(count, *sizes, dtype=weight.dtype, device=place, pin_memory=pins)
        for sizes in ((parts * ranks, width), (out, ranks))
    )
    places = [torch.from_numpy(np.flatnonzero(row_parts == part)).to(like.device) for part in range(parts)]
    for number, own in enumerate(weight.added):
        if own is None:
            continue
        beside = like.new_zeros(out, ranks)
        for part, (above, own_b) in enumerate(zip(own.a.split(own.ranks), own.b.split(own.ranks, 1), strict=True)):
            a[number, part * ranks : part * ranks + len(above)] = above
            beside[places[part], : len(above)] = own_b[places[part]]
        b[number] = beside
    if waits:
        a, b = rows.resident(a, like.device), rows.resident(b, like.device)
    return Stack.of(a, b, [*map(int, row_parts)])
