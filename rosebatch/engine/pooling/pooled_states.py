"""Hidden states of packed steps, pooled to one vector for each prompt."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from rosebatch.engine.plan import PackedStep, SequenceSpec
from rosebatch.engine.staging import Staging
from rosebatch.model.contract import NO_HEADS, PoolingHeads


class PooledStates:
    """Pools the hidden states of prompts; keeps the sums of those whose chunks have not all come.

    A sum is fp64 and adds token by token, from chunk to chunk, so chunks do not change its bits.

    Args:
        heads: what pooled states go through.
    """

    def __init__(self, heads: PoolingHeads = NO_HEADS) -> None:
        self.heads = heads
        self._sums: dict[int, Tensor] = {}

    def update(self, plan: PackedStep) -> None:
        """Forget the sequences that a plan releases. A preempted one starts again."""
        if plan.reset:
            self._sums.clear()
        for sequence_id in plan.released:
            self._sums.pop(sequence_id, None)

    def fetch(
        self,
        plan: PackedStep,
        specs: Mapping[int, SequenceSpec],
        ends: Tensor,
        hidden: Tensor | None,
        up: Staging,
        down: Staging,
    ) -> Callable[[], dict[int, np.ndarray]]:
        """Pool the hidden states of a step, and begin to fetch what ``StepResult.pooled`` holds.

        Args:
            plan: the step.
            specs: the specs of its sequences, by id.
            ends: ``[at least P, H]``, the last hidden state of each of the P chunks that pool; for ``cls``, the first.
            hidden: ``[T, H]``, all hidden states; None if ``reads_all`` is False.
            up, down: copy in stream order.

        Returns:
            a function that waits for them; it waits for nothing if no chunk pools.
        """
        numbers = plan.pooled_numbers
        vectors = ends[: len(numbers)]
        if _has_means(plan, specs):
            assert hidden is not None, "a mean is over all tokens"
            vectors = self._with_means(plan, specs, vectors, self._sum(plan, hidden, up))
        if not numbers:
            return dict
        classified = np.array([specs[plan.chunks[number].id].classifies for number in numbers])
        parts = []
        for head, wanted in ((self.heads.embed, ~classified), (self.heads.classify, classified)):
            if not wanted.any():
                continue
            (rows,) = up.send(np.flatnonzero(wanted))
            states = vectors.float()[rows]
            fetch = down.fetch((states if head is None else head(states)).view(torch.int32))
            parts.append(([number for number, own in zip(numbers, wanted, strict=True) if own], fetch))
        # Later transfers may overwrite what is fetched.
        return lambda: {
            number: row
            for own, fetch in parts
            for number, row in zip(own, fetch().view(np.float32).copy(), strict=True)
        }

    def _with_means(self, plan: PackedStep, specs: Mapping[int, SequenceSpec], ends: Tensor, sums: Tensor) -> Tensor:
        """``[P, H]``, means in the place of last states where they are wanted; keeps the sums of incomplete prompts."""
        pooled: list[Tensor] = []
        for number, chunk in enumerate(plan.chunks):
            mean = specs[chunk.id].pooling == "mean"
            if chunk.pools:
                pooled.append((sums[number] / chunk.end).float() if mean else ends[len(pooled)].float())
            elif mean:
                self._sums[chunk.id] = sums[number].clone()
        return torch.stack(pooled) if pooled else ends

    def _sum(self, plan: PackedStep, hidden: Tensor, up: Staging) -> Tensor:
        """The sum of each chunk, ``[C, H]`` fp64, with that of the tokens before it."""
        rows, first = hidden.double(), 0
        for chunk in plan.chunks:
            before = self._sums.pop(chunk.id, None)
            if before is not None:
                rows[first] += before
            first += len(chunk.token_ids)
        (lengths,) = up.send(np.array([len(chunk.token_ids) for chunk in plan.chunks], np.int64))
        # Unsafe: to check the lengths would wait for the device.
        return torch.segment_reduce(rows, "sum", lengths=lengths, unsafe=True)


def _has_means(plan: PackedStep, specs: Mapping[int, SequenceSpec]) -> bool:
    """Whether the mean over all tokens of some sequence is wanted."""
    return any(specs[chunk.id].pooling == "mean" for chunk in plan.chunks)


def reads_all(plan: PackedStep, specs: Mapping[int, SequenceSpec]) -> bool:
    """Whether hidden states of all tokens are read: for a mean, or for log-probabilities of a prompt."""
    return any(specs[chunk.id].is_scored(chunk.end) for chunk in plan.chunks) or _has_means(plan, specs)
