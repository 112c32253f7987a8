"""What the engine counts while it runs, for the report."""

import time
from dataclasses import dataclass, field

from rosebatch.engine.plan import StepPlan


@dataclass(slots=True)
class EngineStats:
    """Counters over all steps of a run; seconds of wall time."""

    steps: int = 0
    decode_steps: int = 0
    syncs: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    copied_blocks: int = 0
    max_running: int = 0
    max_blocks_used: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    first_token_time: float | None = field(default=None)

    def record(self, plan: StepPlan, seconds: float, blocks_used: int) -> None:
        """Count one step. A step in which any sequence brings several tokens is prefill, the others are decode."""
        self.steps += 1
        decode = all(chunk.length == 1 for chunk in plan.chunks)
        if decode:
            self.decode_steps += 1
            self.decode_seconds += seconds
        else:
            self.prefill_seconds += seconds
        if any(chunk.samples for chunk in plan.chunks):
            self.syncs += 1
            if self.first_token_time is None:
                self.first_token_time = time.perf_counter()
        self.preemptions += len(plan.preempted)
        self.computed_tokens += plan.num_tokens
        self.copied_blocks += len(plan.copies)
        self.max_running = max(self.max_running, len(plan.chunks))
        self.max_blocks_used = max(self.max_blocks_used, blocks_used)
