"""What a worker does with the rows of a task. These objects are made in the parent and called in the workers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rosebatch.io.output import Output
from rosebatch.io.parse import Record, Row
from rosebatch.io.results import Shape
from rosebatch.report.progress import Progress
from rosebatch.report.tally import Tally

if TYPE_CHECKING:
    from rosebatch.launch.launch import Launched


class Parse(Protocol):
    """Makes rows of records."""

    def parse(self, record: Record) -> Row:
        """The row; a failed one if it cannot be served."""
        ...


class Serve(Protocol):
    """Serves rows."""

    def __call__(
        self,
        rows: Iterable[Row | None],
        launched: "Launched",
        output: Output,
        tally: Tally,
        check: Callable[[], None],
    ) -> None:
        """Serve all rows; None says that there is none at the moment. ``check`` is called before every step."""
        ...


@dataclass(frozen=True, slots=True)
class JobRows:
    """Rows of a job over files.

    Attributes:
        shape: of results.
        seed: of the job.
        return_token_ids: add ``token_ids`` to the results.
    """

    shape: Shape
    seed: int | None
    return_token_ids: bool

    def __call__(
        self,
        rows: Iterable[Row | None],
        launched: "Launched",
        output: Output,
        tally: Tally,
        check: Callable[[], None],
    ) -> None:
        """See ``Serve``."""
        from rosebatch.job.local import run_rows

        run_rows(
            rows,
            launched,
            output,
            self.shape,
            tally,
            Progress(None, enabled=False),
            seed=self.seed,
            return_token_ids=self.return_token_ids,
            check=check,
        )


@dataclass(frozen=True, slots=True)
class Given:
    """Records whose content is a row already."""

    def parse(self, record: Record) -> Row:
        """See ``Parse``."""
        row: Any = record.content
        return row  # type: ignore[no-any-return]
