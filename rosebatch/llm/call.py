"""The rows of one call of an ``LLM``, and their results."""

from collections import deque
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from threading import get_ident
from typing import Any

from rosebatch.io.results import Shape
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.prepared import END, End
from rosebatch.job.report.progress import Progress

# Results of a call that nobody has taken, before its rows wait.
_MAX_UNTAKEN = 1024


class Call:
    """The rows of a call, and their results.

    Args:
        rows: a sequence, or an iterator, which may have None: there is none at the moment.
        shape: of the results.
        seed: see ``rosebatch.job.serve_options.ServeOptions``.
        alone: nobody else uses the model meanwhile; it has no rows.
        progress: told of every step.

    Attributes:
        drawn: how many of its rows are under way, or have their results.
    """

    def __init__(
        self,
        rows: Iterable[Row | FailedRow | None] = (),
        shape: Shape | None = None,
        seed: int | None = None,
        *,
        alone: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.rows = rows
        self.shape = shape
        self.seed = seed
        self.alone = alone
        self.progress = progress or Progress(None, enabled=False)
        self.thread = get_ident()
        self.wake: SimpleQueue[None] = SimpleQueue()
        self.exhausted = False
        self._iterator = iter(rows)
        self._found: deque[tuple[int, Any]] = deque()
        # A backend may draw rows on another thread than the one that takes results.
        self.drawn = self._answered = 0
        self._ended = False
        self._error: BaseException | None = None

    @property
    def is_stream(self) -> bool:
        """Whether its rows come by and by."""
        return not isinstance(self.rows, Sequence)

    @property
    def ready(self) -> bool:
        """Whether there is something to take, or will never be."""
        return bool(self._found) or self.done

    @property
    def done(self) -> bool:
        """Whether no further result will come."""
        return self._ended or (self.exhausted and self._answered == self.drawn)

    @property
    def over(self) -> bool:
        """Whether all results were taken, and an error was raised."""
        return self.done and not self._found and self._error is None

    @property
    def expects_rows(self) -> bool:
        """Whether there may be another row."""
        return not (self.exhausted or self._ended)

    def draw(self) -> Row | FailedRow | None:
        """The next row; None if there is none now, or too many results wait."""
        if self.exhausted or self._ended or len(self._found) >= _MAX_UNTAKEN:
            return None
        try:
            row = next(self._iterator, END)
        except BaseException as error:
            # The interrupt of another thread, which steps for all calls, is not this one's.
            if not isinstance(error, Exception) and get_ident() != self.thread:
                raise
            self.end(error)
            return None
        if isinstance(row, End):
            self.exhausted = True
            return None
        self.drawn += row is not None
        return row

    def put(self, place: int, result: Any) -> None:
        """A row has its result."""
        if not self._ended:
            self._found.append((place, result))
        self._answered += 1

    def end(self, error: BaseException | None = None) -> None:
        """No further result will come, or is wanted."""
        self._error, self._ended = self._error or error, True

    def take(self) -> list[tuple[int, Any]]:
        """The results so far; an error is raised once there are none."""
        found = self._found
        if not found and self._error is not None:
            error, self._error = self._error, None
            raise error
        # A thread that steps for all calls may put others there meanwhile.
        return [found.popleft() for _ in range(len(found))]
