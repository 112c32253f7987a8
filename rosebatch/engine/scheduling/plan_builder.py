"""The next plan in the making."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rosebatch.engine.plan import (
    BlockCopy,
    Chunk,
    DecodeRow,
    DecodeWindow,
    HostCopy,
    PackedStep,
    SequenceSpec,
    StepPlan,
)


@dataclass(slots=True)
class PlanBuilder:
    """What the next plan computes, and what has changed since the last one; see ``rosebatch.engine.plan``.

    A plan has chunks, or rows of a decode window.
    """

    chunks: list[Chunk] = field(default_factory=list)
    rows: list[DecodeRow] = field(default_factory=list)
    steps: int = 0
    queries: int = 1
    answers: "array[int] | None" = None
    saves: list[HostCopy] = field(default_factory=list)
    wipes: list[tuple[int, int]] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    restores: list[HostCopy] = field(default_factory=list)
    state_loads: list[tuple[int, int]] = field(default_factory=list)
    state_saves: list[tuple[int, int]] = field(default_factory=list)
    adapter_loads: list[tuple[int, int]] = field(default_factory=list)
    started: list[SequenceSpec] = field(default_factory=list)
    num_preempted: int = 0
    reset: bool = False

    def build(self, released: Sequence[int]) -> StepPlan | None:
        """The plan; None if it computes nothing."""
        changes: dict[str, Any] = {
            "saves": tuple(self.saves),
            "wipes": tuple(self.wipes),
            "copies": tuple(self.copies),
            "restores": tuple(self.restores),
            "state_loads": tuple(self.state_loads),
            "state_saves": tuple(self.state_saves),
            "adapter_loads": tuple(self.adapter_loads),
            "started": tuple(self.started),
            "released": tuple(released),
            "num_preempted": self.num_preempted,
            "reset": self.reset,
        }
        if self.chunks:
            single = [chunk for chunk in self.chunks if len(chunk.token_ids) == 1]
            longer = [chunk for chunk in self.chunks if len(chunk.token_ids) != 1]
            return PackedStep(chunks=(*single, *longer), **changes)
        if not self.rows:
            return None
        return DecodeWindow(
            rows=tuple(self.rows), steps=self.steps, queries=self.queries, answers=self.answers, **changes
        )
