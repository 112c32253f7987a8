"""What an adapter makes of a tensor of its model."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rosebatch.model.lazy_tensor import Cuts, LazyTensor, select


class Change(Protocol):
    """What an adapter makes of a tensor."""

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the adapter's own tensors, in its file."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the model's tensor. A dimension of which the adapter knows nothing is 0."""
        ...

    def made_of(self, values: LazyTensor, dtype: torch.dtype) -> LazyTensor:
        """The tensor with the adapter, computed in fp32 and rounded once.

        Args:
            values: of the model, float32.
            dtype: of the run.
        """
        ...


@dataclass(frozen=True, slots=True)
class LowRank:
    """``W + scale · B A``; with DoRA, the rows of that have the norms of ``magnitude``.

    Attributes:
        names: see ``Change``.
        a: ``[..., r, in]``.
        b: ``[..., out, r]``.
        scale: of their product.
        magnitude: ``[out]``, or None.
        turned: whether the model has W as ``[in, out]``, as embeddings are.
    """

    names: tuple[str, ...]
    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Change``."""
        lead, sizes = self.b.shape[:-2], (self.b.shape[-2], self.a.shape[-1])
        return (*lead, *(reversed(sizes) if self.turned else sizes))

    def made_of(self, values: LazyTensor, dtype: torch.dtype) -> LazyTensor:
        """See ``Change``."""
        whole = values.transposed() if self.turned else values
        made = self._made_of(whole, dtype)
        return made.transposed() if self.turned else made

    def _made_of(self, values: LazyTensor, dtype: torch.dtype) -> LazyTensor:
        last = len(values.shape) - 1

        def part(cuts: Cuts) -> Tensor:
            # The norm is that of a whole row, whichever columns are wanted.
            read = cuts if self.magnitude is None else {dim: cuts[dim] for dim in cuts if dim != last}
            found = values.part(read)
            if not found.is_meta:
                a = select(self.a, {dim: read[dim] for dim in read if dim != last - 1})
                b = select(self.b, {dim: read[dim] for dim in read if dim != last})
                a, b = (each.to(found.device, torch.float32) for each in (a, b))
                add = torch.addmm if found.ndim == 2 else torch.baddbmm
                found = add(found, b, a, alpha=self.scale)
                if self.magnitude is not None:
                    norms = select(self.magnitude, {0: read[last - 1]} if last - 1 in read else {})
                    norms = norms.to(found.device, torch.float32)
                    found *= (norms / torch.linalg.vector_norm(found, dim=-1)).unsqueeze(-1)
            return select(found, {dim: cuts[dim] for dim in cuts if dim not in read}).to(dtype)

        return LazyTensor(values.shape, part)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of an embedding in place of the model's.

    Attributes:
        names: see ``Change``.
        ids: of the tokens, in the order of ``rows``.
        rows: ``[n, H]``.
    """

    names: tuple[str, ...]
    ids: tuple[int, ...]
    rows: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Change``."""
        return (0, self.rows.shape[1])

    def made_of(self, values: LazyTensor, dtype: torch.dtype) -> LazyTensor:
        """See ``Change``."""

        def part(cuts: Cuts) -> Tensor:
            found = values.part(cuts)
            if found.is_meta:
                return found.to(dtype)
            wanted = np.asarray(cuts.get(0, range(values.shape[0])))
            own = {token: place for place, token in enumerate(self.ids)}
            pairs = [(place, own[token]) for place, token in enumerate(map(int, wanted)) if token in own]
            if pairs:
                places, rows = torch.tensor(pairs).unbind(1)
                others = {dim: cuts[dim] for dim in cuts if dim}
                found = found.index_copy(0, places.to(found.device), select(self.rows[rows], others).to(found))
            return found.to(dtype)

        return LazyTensor(values.shape, part)


@dataclass(frozen=True, slots=True)
class AddedBias:
    """A bias with ``scale`` times another.

    Attributes:
        names: see ``Change``.
        bias: ``[out]``.
        scale: of it.
    """

    names: tuple[str, ...]
    bias: Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Change``."""
        return tuple(self.bias.shape)

    def made_of(self, values: LazyTensor, dtype: torch.dtype) -> LazyTensor:
        """See ``Change``."""

        def part(cuts: Cuts) -> Tensor:
            found = values.part(cuts)
            if not found.is_meta:
                found = found + self.scale * select(self.bias, cuts).to(found.device, torch.float32)
            return found.to(dtype)

        return LazyTensor(values.shape, part)
