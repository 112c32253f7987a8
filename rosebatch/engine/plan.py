"""What passes between scheduler and runner; nothing else does. No torch."""

from dataclasses import dataclass

from rosebatch.request import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start .. start + length - 1`` of a sequence, to be computed in one step.

    ``samples`` is True when the chunk reaches the end of the known tokens, so that a new one is sampled.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of work.

    Attributes:
        chunks: what to compute, single-token chunks (decodes) first.
        copies: (source, destination) blocks to copy before the forward pass; no block is both.
        preempted: sequences that lost their blocks and went back to waiting.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The sampled tokens of a step, one for each chunk that samples, in the plan's order."""

    token_ids: list[int]
