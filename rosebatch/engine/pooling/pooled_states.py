"""Hidden states of packed steps, pooled to one vector for each prompt, or to numbers of its tokens."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from rosebatch.core.pooling_params import AnyPooling
from rosebatch.engine.plan import PackedStep, SequenceSpec
from rosebatch.engine.staging import Staging
from rosebatch.model.contract import NO_HEADS, PoolingHeads


class PooledStates:
    """Pools the hidden states of prompts; keeps sums, and numbers of tokens, until all chunks of a prompt have come.

    A sum is fp64 and adds token by token, from chunk to chunk, so chunks do not change its bits.

    Args:
        heads: what pooled states go through.
    """

    def __init__(self, heads: PoolingHeads = NO_HEADS) -> None:
        self.heads = heads
        self._sums: dict[int, Tensor] = {}
        self._numbers: dict[int, list[Tensor]] = {}

    def update(self, plan: PackedStep) -> None:
        """Forget the sequences that a plan releases. A preempted one starts again."""
        if plan.reset:
            self._sums.clear()
            self._numbers.clear()
        for sequence_id in plan.released:
            self._sums.pop(sequence_id, None)
            self._numbers.pop(sequence_id, None)

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
        of_tokens = self._of_tokens(plan, specs, hidden, up)
        if _has(plan, specs, "mean"):
            assert hidden is not None, "a mean is over all tokens"
            vectors = self._with_means(plan, specs, vectors, self._sum(plan, hidden, up))
        if not numbers:
            return dict
        whole = np.array([specs[plan.chunks[number].id].pooling != "all" for number in numbers])
        classified = np.array([specs[plan.chunks[number].id].classifies for number in numbers])
        parts = []
        for head, wanted in ((self.heads.embed, whole & ~classified), (self.heads.classify, whole & classified)):
            if not wanted.any():
                continue
            (rows,) = up.send(np.flatnonzero(wanted))
            states = vectors.float()[rows]
            fetch = down.fetch((states if head is None else head(states)).view(torch.int32))
            parts.append(([number for number, own in zip(numbers, wanted, strict=True) if own], fetch))
        fetch_tokens = down.fetch(torch.cat([*of_tokens.values()]).view(torch.int32)) if of_tokens else None

        def wait() -> dict[int, np.ndarray]:
            # Later transfers may overwrite what is fetched.
            found = {
                number: row
                for own, fetch in parts
                for number, row in zip(own, fetch().view(np.float32).copy(), strict=True)
            }
            if fetch_tokens is not None:
                ends = np.cumsum([len(own) for own in of_tokens.values()])
                found |= zip(of_tokens, np.split(fetch_tokens().view(np.float32).copy(), ends[:-1]), strict=True)
            return found

        return wait

    def _of_tokens(
        self, plan: PackedStep, specs: Mapping[int, SequenceSpec], hidden: Tensor | None, up: Staging
    ) -> dict[int, Tensor]:
        """``[N, labels]`` of the tokens of prompts that end, by the number of their chunks; keeps those of others."""
        if not _has(plan, specs, "all"):
            return {}
        assert hidden is not None and self.heads.classify is not None, "the head reads all states"
        places, first = list[np.ndarray](), 0
        for chunk in plan.chunks:
            places.append(specs[chunk.id].pooled_places(chunk.start, chunk.end) + (first - chunk.start))
            first += len(chunk.token_ids)
        (rows,) = up.send(np.concatenate(places))
        outputs = self.heads.classify(hidden[rows].float()) if len(rows) else None
        found, first = dict[int, Tensor](), 0
        for number, (chunk, own) in enumerate(zip(plan.chunks, places, strict=True)):
            if specs[chunk.id].pooling != "all":
                continue
            parts = self._numbers.pop(chunk.id, [])
            if outputs is not None and len(own):
                parts.append(outputs[first : first + len(own)])
                first += len(own)
            if chunk.pools:
                found[number] = torch.cat(parts)
            else:
                self._numbers[chunk.id] = parts
        return found

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


def _has(plan: PackedStep, specs: Mapping[int, SequenceSpec], pooling: AnyPooling) -> bool:
    """Whether some sequence is pooled so."""
    return any(specs[chunk.id].pooling == pooling for chunk in plan.chunks)


def reads_all(plan: PackedStep, specs: Mapping[int, SequenceSpec]) -> bool:
    """Whether hidden states of all tokens are read: for a mean, numbers of tokens, or a prompt's log-probabilities."""
    return any(
        specs[chunk.id].is_scored(chunk.end) or specs[chunk.id].pooling in ("mean", "all") for chunk in plan.chunks
    )
