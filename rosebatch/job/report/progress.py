"""Progress on stderr: a bar on a terminal, otherwise a plain line every few seconds."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

from rosebatch.core.words import counted
from rosebatch.engine.metrics.outlook import Outlook
from rosebatch.job.report.time_left import seconds_left

_PLAIN_SECONDS = 10.0
_BAR_SECONDS = 0.5


@dataclass(slots=True)
class _Place:
    """What one of several devices has finished."""

    name: str
    rows: int = 0
    tokens: int = 0
    task: Any = None


class Progress:
    """Counts finished rows, and tokens as they come, and shows rate and remaining time.

    Args:
        total: rows of the input; None if unknown.
        resumed: rows that an earlier run finished.
        enabled: False prints nothing.
        bar: whether a terminal gets a bar. It would share its line with whatever else is printed there.
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
        bar: bool = True,
        places: Sequence[str] = (),
        counts: Literal["output", "prompt"] = "output",
        doing: str = "generating",
    ) -> None:
        self._total = total
        self._resumed = resumed
        self._enabled = enabled
        self._has_bar = bar
        self._rows = resumed
        self._failed = 0
        # Of finished rows.
        self._tokens = 0
        self._started = time.perf_counter()
        self._last = self._started
        self._bar: Any = None
        self._task: Any = None
        self.counts = counts
        self._doing = doing
        self._places = [_Place(name) for name in places]
        self._look: Callable[[], Outlook] = Outlook
        self._before = Outlook()

    def __enter__(self) -> "Progress":
        if self._enabled and self._has_bar and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar
            from rich.table import Column

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[told]}", table_column=Column(no_wrap=True)),
                console=Console(stderr=True),
                expand=True,
                transient=True,
            )
            self._task = self._bar.add_task(self._doing, total=None if self._total is None else 1.0, told="")
            for place in self._places:
                place.task = self._bar.add_task(place.name, total=self._total, told="")
            self._bar.start()
            self._show()
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

    def watch(self, look: Callable[[], Outlook]) -> None:
        """Count tokens by the engine, from now on."""
        if not self._enabled:
            return
        self._look = look
        self._before = look().done

    def advance(self, rows: int = 1, *, tokens: int = 0, failed: int = 0, place: int | None = None) -> None:
        """Count finished rows, those of them that failed, and perhaps the number of the device that finished them."""
        self._rows += rows
        self._failed += failed
        self._tokens += tokens
        if place is not None:
            self._places[place].rows += rows
            self._places[place].tokens += tokens

    def tick(self) -> None:
        """Show the progress if it is time. Called after every step."""
        if not self._enabled:
            return
        now = time.perf_counter()
        if now - self._last >= (_PLAIN_SECONDS if self._bar is None else _BAR_SECONDS):
            self._last = now
            self._show()

    def rename(self, place: int, name: str) -> None:
        """Another device takes part in the place of an earlier one."""
        self._places[place].name = name
        if self._bar is not None:
            self._bar.update(self._places[place].task, description=name)

    def line(self) -> str:
        """The progress so far, in one line."""
        outlook = self._look().minus(self._before)
        parts = self._parts(outlook, self._seconds_left(outlook))
        if self._places:
            parts.append(" + ".join(f"{place.name} {self._per_second(place.tokens)}" for place in self._places))
        return ", ".join(parts)

    def _show(self) -> None:
        if self._bar is None:
            sys.stderr.write(self.line() + "\n")
            return
        outlook = self._look().minus(self._before)
        left = self._seconds_left(outlook)
        elapsed = self._elapsed
        share = elapsed / (elapsed + left) if left is not None else self._rows / (self._total or 1)
        self._bar.update(self._task, completed=min(1.0, share), told=", ".join(self._parts(outlook, left)))
        for place in self._places:
            told = f"{counted(place.rows, 'row')}, {self._per_second(place.tokens)} {self.counts} tokens/s"
            self._bar.update(place.task, completed=place.rows, told=told)

    def _parts(self, outlook: Outlook, left: float | None) -> list[str]:
        done = f"{self._rows}/{counted(self._total, 'row')}" if self._total is not None else counted(self._rows, "row")
        known = outlook.prompt_tokens if self.counts == "prompt" else outlook.output_tokens
        tokens = max(known, self._tokens)
        parts = [done, f"{tokens} {self.counts} tokens, {self._per_second(tokens)}/s"]
        if self._failed:
            parts.append(f"{self._failed} failed")
        if left is not None:
            parts.append(f"{timedelta(seconds=round(left))} left")
        return parts

    def _seconds_left(self, outlook: Outlook) -> float | None:
        if self._total is None:
            return None
        rows_left, done = self._total - self._rows, self._rows - self._resumed
        by_tokens = seconds_left(rows_left, outlook)
        if by_tokens is None and done:
            return self._elapsed / done * rows_left
        return by_tokens

    def _per_second(self, tokens: int) -> str:
        return f"{tokens / self._elapsed:.0f}"

    @property
    def _elapsed(self) -> float:
        return max(time.perf_counter() - self._started, 1e-9)
