"""Progress on stderr: a bar on a terminal, otherwise a plain line every few seconds."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

_PLAIN_SECONDS = 10.0


@dataclass(slots=True)
class _Place:
    """What one of several devices has finished."""

    name: str
    rows: int = 0
    tokens: int = 0
    task: Any = None


class Progress:
    """Counts finished rows and their tokens, and shows rate and remaining time.

    Args:
        total: rows of the input; None if unknown.
        resumed: rows that an earlier run finished.
        enabled: False prints nothing.
        places: names of the devices that finish rows, if there are several: each has a line of its own.
        counts: which tokens are counted: ``output``, or ``prompt`` where nothing is generated.
        doing: what the bar is called.
    """

    def __init__(
        self,
        total: int | None,
        *,
        resumed: int = 0,
        enabled: bool = True,
        places: Sequence[str] = (),
        counts: Literal["output", "prompt"] = "output",
        doing: str = "generating",
    ) -> None:
        self._total = total
        self._resumed = resumed
        self._enabled = enabled
        self._rows = resumed
        self._failed = 0
        self._tokens = 0
        self._started = time.perf_counter()
        self._last_line = self._started
        self._bar: Any = None
        self._task: Any = None
        self.counts = counts
        self._doing = doing
        self._places = [_Place(name) for name in places]

    def __enter__(self) -> "Progress":
        if self._enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(self._doing, total=self._total, completed=self._rows, rate="")
            for place in self._places:
                place.task = self._bar.add_task(place.name, total=self._total, rate="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def has_places(self) -> bool:
        """Whether there are several devices."""
        return bool(self._places)

    def advance(self, rows: int = 1, *, tokens: int = 0, failed: int = 0, place: int | None = None) -> None:
        """Count finished rows, those of them that failed, and perhaps the number of the device that finished them."""
        self._rows += rows
        self._failed += failed
        self._tokens += tokens
        own = None if place is None else self._places[place]
        if own is not None:
            own.rows += rows
            own.tokens += tokens
        if self._bar is not None:
            self._bar.update(self._task, advance=rows, rate=self._rate())
            if own is not None:
                self._bar.update(own.task, advance=rows, rate=f"{self._per_second(own.tokens)} {self.counts} tokens/s")
        elif self._enabled and time.perf_counter() - self._last_line >= _PLAIN_SECONDS:
            self._last_line = time.perf_counter()
            sys.stderr.write(self.line() + "\n")

    def rename(self, place: int, name: str) -> None:
        """Another device takes part in the place of an earlier one."""
        self._places[place].name = name
        if self._bar is not None:
            self._bar.update(self._places[place].task, description=name)

    def line(self) -> str:
        """The progress so far, in one line."""
        of_total = f"/{self._total}" if self._total is not None else ""
        elapsed = time.perf_counter() - self._started
        parts = [f"{self._rows}{of_total} rows", self._rate()]
        done = self._rows - self._resumed
        if self._total is not None and done:
            parts.append(f"ETA {elapsed / done * (self._total - self._rows):.0f} s")
        if self._places:
            parts.append(" + ".join(f"{place.name} {self._per_second(place.tokens)}" for place in self._places))
        return ", ".join(parts)

    def _rate(self) -> str:
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._per_second(self._tokens)} {self.counts} tokens/s{failed}"

    def _per_second(self, tokens: int) -> str:
        return f"{tokens / (time.perf_counter() - self._started):.0f}"
