"""Operators of a process that holds a shard of a model: they do their part, and put the parts of all together.

Attention and MLPs are divided by heads and inner channels. So each sub-layer has one sum over all processes, after its
last product (source: Megatron-LM, arXiv 1909.08053). Embeddings and logits are divided by the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch.ops.ops import AllReduce, Experts, Linear, Ops, Partial, RoutedExperts, WholeRMSNorm
from rosebatch.ops.select import parts_or_product, whole_product
from rosebatch.ops.shard import Shard


class Group(Protocol):
    """The processes that hold a model. All of them call the same functions in the same order.

    Attributes:
        shard: of this process.
    """

    shard: Shard

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place: the same bits in each of them. ``tensor`` is contiguous.

        The order of the additions may go by the number of rows.
        """
        ...

    def sum_in_order_(self, tensor: Tensor) -> Tensor:
        """``sum_``, added up in fp32 in the order of the processes: a row's bits do not depend on its neighbours."""
        ...

    def gather(self, tensor: Tensor) -> Tensor:
        """``[rows, columns]`` of each process -> ``[processes, rows, columns]``. ``tensor`` is contiguous."""
        ...

    def prepare(self, rows: int, size: int, dtype: torch.dtype) -> None:
        """Make ``all_reduce`` possible for up to so many rows of this size. Called once, before the first step."""
        ...

    def all_reduce(self, rows: int, size: int, dtype: torch.dtype) -> AllReduce | None:
        """For a kernel that sums so many rows over all processes; None if they are too many, for ``sum_``."""
        ...

    def all_min(self, numbers: Sequence[int]) -> list[int]:
        """The least of each number over all processes."""
        ...


def divide(ops: Ops, group: Group, *, in_order: bool) -> Ops:
    """The operators of a process of the group, made of those of a process that is alone.

    Args:
        ops: of a process that is alone.
        group: of all processes.
        in_order: whether a row's bits may not depend on the number of rows.
    """
    shard, sum_ = group.shard, group.sum_in_order_ if in_order else group.sum_

    product = parts_or_product if ops.fuses_all_reduce else whole_product

    def summed(partial: Partial, x: Tensor) -> Partial:
        """All-reduce across ranks. All have the bias, so the norm adds it once."""
        value = partial.value
        rows, size = value.shape[-2:]
        all_reduce = group.all_reduce(rows, size, x.dtype) if ops.fuses_all_reduce else None
        if all_reduce is not None:
            return partial._replace(all_reduce=all_reduce)
        parts = value.sum(0, keepdim=True) if value.ndim > x.ndim else value
        return Partial(sum_(parts.contiguous()), partial.bias)

    def project(projection: Linear, x: Tensor) -> Partial:
        return summed(product(projection, x), x)

    def project_to_clip(projection: Linear, x: Tensor) -> Partial:
        return Partial(sum_(projection.product(x).contiguous()))

    def experts(layer: Experts) -> RoutedExperts:
        own = ops.experts(layer)

        def run(x: Tensor, logits: Tensor, shared: Tensor | None) -> Partial:
            return summed(own(x, logits, shared), x)

        return run

    def embed(ids: Tensor, rows: Tensor, vocab_size: int) -> Tensor:
        # All parts of a sum but one are 0, so their order is of no matter.
        own = shard.vocabulary(vocab_size)
        if not own:
            return group.sum_(rows.new_zeros(*ids.shape, rows.shape[1]))
        places = ids - own.start
        others = (places < 0) | (places >= len(own))
        found = functional.embedding(places.masked_fill(others, 0), rows)
        return group.sum_(found.masked_fill(others.unsqueeze(-1), 0))

    def gather(logits: Tensor, vocab_size: int) -> Tensor:
        missing = shard.max_rows(vocab_size) - logits.shape[1]
        parts = group.gather(functional.pad(logits, (0, missing)).contiguous())
        return parts.transpose(0, 1).flatten(1)[:, :vocab_size].contiguous()

    return replace(
        ops,
        shard=shard,
        project=project,
        project_to_clip=project_to_clip,
        experts=experts,
        embed=embed,
        gather=gather,
        whole_norm=lambda projection, norm: _NormedProjection(projection, norm, shard.size, sum_),
    )


@dataclass(slots=True)
class _NormedProjection(Linear):
    """q, k and v of this process's heads; q and k are normed over the heads of all, see ``WholeRMSNorm``."""

    projection: Linear
    norm: WholeRMSNorm
    ranks: int
    sum_: Callable[[Tensor], Tensor]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        qkv, (q_weight, k_weight, eps) = self.projection(x), self.norm
        q, k = qkv[:, : len(q_weight)], qkv[:, len(q_weight) : len(q_weight) + len(k_weight)]
        squares = torch.stack([each.float().square().mean(1) for each in (q, k)])
        scales = torch.rsqrt(self.sum_(squares) / self.ranks + eps)
        for each, scale, weight in zip((q, k), scales, (q_weight, k_weight), strict=True):
            normed = each.float() * scale[:, None]
            each.copy_(weight * normed.to(each.dtype) if weight.dtype == each.dtype else weight * normed)
        return qkv

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self(x)
