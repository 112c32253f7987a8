"""What passes between scheduler and runner; nothing else does. No torch."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from rosebatch.request import Logprobs, Sequence


class Chunk(NamedTuple):
    """Tokens ``start .. start + length - 1`` of a sequence, to be computed in one step or one window of steps.

    ``samples`` is True when the chunk reaches the end of the tokens so far, so that new ones are sampled: one, or in a
    decode window one for each of the chunk's tokens.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of work, or a window of decode steps.

    Attributes:
        chunks: what to compute; in a step, single-token chunks (decodes) first.
        copies: (source, destination) blocks to copy before the forward pass; no block is both.
        preempted: sequences that lost their blocks and went back to waiting.
        decode_steps: 0 for one step over packed chunks; otherwise so many decode steps back to back, in which every
            chunk takes part for its length, each token computed from the one sampled before it.
    """

    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[Sequence, ...] = ()
    decode_steps: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a plan brought.

    Attributes:
        token_ids: for each chunk that samples, in the plan's order, the tokens sampled: fewer than the chunk's length
            where the model's end token came first.
        logprobs: in the same order, of each token; an empty list where none are asked for.
        prompt_logprobs: by the number of a chunk in the plan, of the prompt's tokens behind its own.
        seconds: that the device was busy with it.
        syncs: waits for the device.
        graph_replays, graph_captures: of CUDA graphs.
    """

    token_ids: list[list[int]]
    logprobs: Seq[list[Logprobs]] = ()
    prompt_logprobs: Mapping[int, list[Logprobs]] = field(default_factory=dict)
    seconds: float = field(default=0.0, kw_only=True)
    syncs: int = field(default=0, kw_only=True)
    graph_replays: int = field(default=0, kw_only=True)
    graph_captures: int = field(default=0, kw_only=True)
