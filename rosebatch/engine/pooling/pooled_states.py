"""Hidden states of packed steps, pooled to one vector for each prompt, or to numbers of its tokens."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rosebatch.core.pooling_params import AnyPooling
from rosebatch.engine.plan import PackedStep, SequenceSpec
from rosebatch.engine.staging import Staging
from rosebatch.model.contract import NO_HEADS, PoolingHeads

# Poolings over all tokens, and how they reduce them.
_FOLDED: dict[AnyPooling, str] = {"mean": "sum", "max": "max"}
# Poolings that read the states of all tokens.
_OF_ALL = {*_FOLDED, "all"}


class PooledStates:
    """Pools the hidden states of prompts; keeps what is folded, and numbers of tokens, until all chunks have come.

    States are folded to a sum or a largest one in fp64, token by token, from chunk to chunk, so chunks change no bits.

    Args:
        heads: what pooled states go through.
    """

    def __init__(self, heads: PoolingHeads = NO_HEADS) -> None:
        self.heads = heads
        self._folded: dict[int, Tensor] = {}
        self._numbers: dict[int, list[Tensor]] = {}

    def update(self, plan: PackedStep) -> None:
        """Forget the sequences that a plan releases. A preempted one starts again."""
        if plan.reset:
            self._folded.clear()
            self._numbers.clear()
        for sequence_id in plan.released:
            self._folded.pop(sequence_id, None)
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
        poolings = [specs[chunk.id].pooling for chunk in plan.chunks]
        if not any(poolings):
            return dict
        numbers = plan.pooled_numbers
        vectors = ends[: len(numbers)]
        of_tokens = self._of_tokens(plan, specs, hidden, up) if "all" in poolings else {}
        for pooling in filter(poolings.__contains__, _FOLDED):
            assert hidden is not None, "it is over all tokens"
            vectors = self._with_folded(plan, [each == pooling for each in poolings], vectors, hidden, up, pooling)
        if not numbers:
            return dict
        whole = np.array([poolings[number] != "all" for number in numbers])
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

    def _with_folded(
        self,
        plan: PackedStep,
        mine: Sequence[bool],
        vectors: Tensor,
        hidden: Tensor,
        up: Staging,
        pooling: AnyPooling,
    ) -> Tensor:
        """``[P, H]``, what is folded so in the place of other states; keeps that of incomplete prompts.

        ``mine`` says of each chunk whether it is.
        """
        numbers = plan.pooled_numbers
        # All prompts in one division: one for each would keep the host longer than the step takes.
        lengths, own, counts, wanted = up.send(
            np.array([len(chunk.token_ids) for chunk in plan.chunks], np.int64),
            np.array(numbers, np.int64),
            np.array([plan.chunks[number].end for number in numbers], np.int64),
            np.array([mine[number] for number in numbers], np.int64),
        )
        folded = self._fold(plan, mine, hidden, lengths, pooling)
        for number, (chunk, is_folded) in enumerate(zip(plan.chunks, mine, strict=True)):
            if is_folded and not chunk.pools:
                self._folded[chunk.id] = folded[number].clone()
        found = folded[own] / counts[:, None] if pooling == "mean" else folded[own]
        return torch.where(wanted[:, None] > 0, found.float(), vectors.float())

    def _fold(
        self, plan: PackedStep, mine: Sequence[bool], hidden: Tensor, lengths: Tensor, pooling: AnyPooling
    ) -> Tensor:
        """The states of each chunk as one, ``[C, H]`` fp64, with those of the tokens before it."""
        rows, first = hidden.double(), 0
        for chunk, is_folded in zip(plan.chunks, mine, strict=True):
            if is_folded and (before := self._folded.pop(chunk.id, None)) is not None:
                rows[first] = rows[first] + before if pooling == "mean" else rows[first].maximum(before)
            first += len(chunk.token_ids)
        # Unsafe: to check the lengths would wait for the device.
        return torch.segment_reduce(rows, _FOLDED[pooling], lengths=lengths, unsafe=True)


def scores(plan: PackedStep, specs: Mapping[int, SequenceSpec]) -> bool:
    """Whether tokens of some prompt may get log-probabilities."""
    own = [(chunk, specs[chunk.id]) for chunk in plan.chunks]
    # Nearly all ask for none, and a property takes longer than these.
    asked = [(c, spec) for c, spec in own if spec.scoring is not None or spec.sampling.prompt_logprobs is not None]
    return any(spec.is_scored(chunk.end) for chunk, spec in asked)


def reads_all(plan: PackedStep, specs: Mapping[int, SequenceSpec]) -> bool:
    """Whether hidden states of all tokens are read: to fold them, for their numbers, or for log-probabilities."""
    poolings = {specs[chunk.id].pooling for chunk in plan.chunks}
    return not poolings.isdisjoint(_OF_ALL) or scores(plan, specs)
