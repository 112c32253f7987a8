"""Counts of a run, for the report."""

from collections import Counter
from dataclasses import dataclass, field

from rosebatch.engine.metrics.durations import Durations
from rosebatch.engine.metrics.timeline import Timeline
from rosebatch.engine.plan import DecodeWindow, StepPlan, StepResult

_COUNTS = (
    *("steps", "decode_steps", "syncs", "graph_replays", "graph_captures", "preemptions", "computed_tokens"),
    *("finished", "stopped", "prompt_tokens", "output_tokens", "token_steps", "decoded", "squares", "products"),
    *("copied_blocks", "restored_blocks", "max_running", "max_blocks_used", "prefill_seconds", "decode_seconds"),
    *("images", "image_seconds", "drafted", "accepted", "forced", "adapter_loads"),
)


@dataclass(slots=True)
class EngineStats:
    """Counters over all steps; seconds are those in which the device was busy.

    Attributes:
        finished: sequences, by length, see ``rosebatch.engine.metrics.outlook``.
        stopped: those of them that ended before they had to.
        prompt_tokens, output_tokens: those that are counted as prefill, and those that were sampled.
        token_steps, decoded, squares, products: see ``steps``, ``decoded`` and so on of ``Outlook``.
        images, image_seconds: that were encoded, and what that took of the seconds of prompts.
        drafted, accepted, forced: see ``Committed``; forced tokens are output tokens, too.
        adapter_loads: adapters that were copied into a slot on the device.
        first_token_time: on the clock of ``time.perf_counter``; None before it.
        itl: inter-token latency, seconds between two moments at which tokens of a completion were known. The tokens of
            one decode window are known together and count once.
    """

    steps: int = 0
    decode_steps: int = 0
    syncs: int = 0
    graph_replays: int = 0
    graph_captures: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    finished: Counter[int] = field(default_factory=Counter)
    stopped: Counter[int] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    token_steps: int = 0
    decoded: int = 0
    squares: float = 0.0
    products: float = 0.0
    copied_blocks: int = 0
    restored_blocks: int = 0
    max_running: int = 0
    max_blocks_used: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    images: int = 0
    image_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0
    adapter_loads: int = 0
    first_token_time: float | None = None
    itl: Durations = field(default_factory=Durations)
    timeline: Timeline = field(default_factory=Timeline)
    _began: float | None = None

    def record(self, plan: StepPlan, result: StepResult, now: float, *, blocks_used: int, live: int) -> None:
        """Count one plan.

        A sequence that brings several tokens of a prompt to a step is in its prefill, one that brings a single token
        decodes, and so does one with drafts. The time of a step with both is divided by their tokens.

        Args:
            plan: the work.
            result: what it brought.
            now: when that was known.
            blocks_used: blocks of the KV cache with a holder, during the work.
            live: sequences that were running.
        """
        if self._began is None:
            self._began = now - result.seconds
        steps, lengths = 1, []
        if isinstance(plan, DecodeWindow):
            steps = plan.steps
        else:
            lengths = [len(chunk.token_ids) for chunk in plan.chunks if len(chunk.token_ids) > 1 and not chunk.decodes]
        prompt_tokens, output_tokens = sum(lengths), sum(map(len, result.token_ids))
        self.timeline.add(
            now - self._began,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            live=live,
            blocks=blocks_used,
        )
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self.steps += steps
        # How many tokens drafts bring is not planned.
        num_tokens = output_tokens if isinstance(plan, DecodeWindow) and plan.drafts else plan.num_tokens
        prefill = result.seconds * prompt_tokens / max(num_tokens, 1)
        self.prefill_seconds += prefill
        self.decode_seconds += result.seconds - prefill
        if decoded := num_tokens - prompt_tokens:
            self.token_steps += steps
            self.decoded += decoded
            self.squares += decoded * decoded / steps
            self.products += decoded / steps * (result.seconds - prefill)
        if not lengths:
            self.decode_steps += steps
        if result.token_ids and self.first_token_time is None:
            self.first_token_time = now
        self.syncs += result.syncs
        self.graph_replays += result.graph_replays
        self.graph_captures += result.graph_captures
        self.images += result.images
        self.image_seconds += result.image_seconds
        self.preemptions += plan.num_preempted
        self.computed_tokens += num_tokens
        self.copied_blocks += len(plan.copies)
        self.restored_blocks += len(plan.restores)
        self.adapter_loads += len(plan.adapter_loads)
        self.max_running = max(self.max_running, plan.num_sequences)
        self.max_blocks_used = max(self.max_blocks_used, blocks_used)

    def count_free(self, drafted: int, accepted: int, forced: int) -> None:
        """Count tokens that a plan got without a decode step of their own; see ``Committed``."""
        self.drafted += drafted
        self.accepted += accepted
        self.forced += forced
        self.output_tokens += forced

    def merge(self, other: "EngineStats") -> None:
        """Add the counts of another engine that worked at the same time: the most of each are added too."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        times = [time for time in (self.first_token_time, other.first_token_time) if time is not None]
        self.first_token_time = min(times, default=None)
        self.itl.merge(other.itl)
        self.timeline.merge(other.timeline)
