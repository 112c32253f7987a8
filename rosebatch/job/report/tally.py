"""The counts of a run, kept while it is under way.

TTFT is the time from entering the engine to the first token. TPOT is the mean time between a request's further
tokens. E2E is the time from entering to the last token.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rosebatch.core.errors import RowError
from rosebatch.core.request import Completion
from rosebatch.engine.metrics.durations import Durations

_NUMBERS = ("completed", "prompt_tokens", "cached_tokens", "output_tokens", "images")
_COUNTERS = ("finish_reasons", "errors", "ignored", "unclear", "adapters", "host_seconds")
_DURATIONS = ("ttft", "tpot", "e2e")


@dataclass(slots=True)
class Tally:
    """Counts over the completions of a run; times in seconds.

    Attributes:
        ignored: rows by the field that changes nothing in a local run.
        unclear: rows by the field that looks as if it should change something, and does not.
        adapters: rows by their own adapter.
        host_seconds: the host's time for each kind of work outside the engine.
    """

    completed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    images: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    unclear: Counter[str] = field(default_factory=Counter)
    adapters: Counter[str] = field(default_factory=Counter)
    host_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ttft: Durations = field(default_factory=Durations)
    tpot: Durations = field(default_factory=Durations)
    e2e: Durations = field(default_factory=Durations)

    def add(self, completion: Completion) -> None:
        """Count a row with one completion."""
        self.add_row([completion], [completion.finish_reason])

    def add_row(self, completions: Sequence[Completion], finish_reasons: Iterable[str]) -> None:
        """Count a row.

        Args:
            completions: all ``n`` of its first prompt, then those of the next.
            finish_reasons: of each completion, as in the result.
        """
        self.completed += 1
        for reason in finish_reasons:
            self.finish_reasons[reason] += 1
        if completions and (adapter := completions[0].request.adapter):
            self.adapters[adapter] += 1
        for completion in completions:
            tokens = len(completion.token_ids)
            if completion.sample == 0:
                self.prompt_tokens += len(completion.request.prompt_token_ids)
                self.cached_tokens += completion.cached_tokens
                self.images += len(completion.request.images)
            self.output_tokens += tokens
            self.ttft.add(completion.first_token_time - completion.arrival_time)
            self.e2e.add(completion.finish_time - completion.arrival_time)
            if tokens > 1:
                self.tpot.add((completion.finish_time - completion.first_token_time) / (tokens - 1))

    def add_fields(self, ignored: Sequence[str], unclear: Sequence[str]) -> None:
        """Count the fields of a row that were not served."""
        if ignored:
            self.ignored.update(ignored)
        if unclear:
            self.unclear.update(unclear)

    def add_error(self, error: RowError) -> None:
        """Count a failed row."""
        self.errors[error.code] += 1

    def take(self) -> "Tally":
        """The counts so far, to be merged elsewhere; this one starts again from nothing."""
        taken = Tally(
            **{name: getattr(self, name) for name in _NUMBERS},
            **{name: getattr(self, name).copy() for name in _COUNTERS},
            **{name: getattr(self, name) for name in _DURATIONS},
        )
        for name in _NUMBERS:
            setattr(self, name, 0)
        # Others hold on to these.
        for name in _COUNTERS:
            getattr(self, name).clear()
        for name in _DURATIONS:
            setattr(self, name, Durations())
        return taken

    def merge(self, other: "Tally") -> None:
        """Add the counts of another one."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("finish_reasons", "errors", "ignored", "unclear", "adapters"):
            getattr(self, name).update(getattr(other, name))
        for kind, seconds in other.host_seconds.items():
            self.host_seconds[kind] += seconds
        for name in _DURATIONS:
            getattr(self, name).merge(getattr(other, name))

    @property
    def failed(self) -> int:
        """Failed rows."""
        return self.errors.total()
