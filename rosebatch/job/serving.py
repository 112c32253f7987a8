"""How rows are parsed and served, and what their results look like. These objects are sent to worker processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rosebatch.io.parse import Record, Row
from rosebatch.io.results import Shape
from rosebatch.io.rows import FailedRow

if TYPE_CHECKING:
    from rosebatch.job.serve import ServedRow
    from rosebatch.text.tokenizer import Tokenizer


class Parse(Protocol):
    """Makes rows of records."""

    def parse(self, record: Record) -> Row:
        """The row; a failed one if it cannot be served."""
        ...


@dataclass(frozen=True, slots=True)
class Parsed:
    """Records whose content is a row already."""

    def parse(self, record: Record) -> Row:
        """See ``Parse``."""
        row: Any = record.content
        return row  # type: ignore[no-any-return]


class Form(Protocol):
    """What the results of rows look like."""

    def result(self, served: "ServedRow", tokenizer: "Tokenizer | None") -> tuple[Sequence[str], Any]:
        """The finish reasons of a row's completions, and its result. An error makes the row a failed one."""
        ...

    def failure(self, row: FailedRow) -> Any:
        """The result of a row that failed."""
        ...


@dataclass(frozen=True, slots=True)
class Lines:
    """Output lines of a job.

    Attributes:
        shape: of the lines.
        return_token_ids: add ``token_ids`` to the lines.
    """

    shape: Shape
    return_token_ids: bool = False

    def result(self, served: "ServedRow", tokenizer: "Tokenizer | None") -> tuple[Sequence[str], Any]:
        """See ``Form``."""
        # The parent of workers has no use for the engine.
        from rosebatch.job.answers import answer

        found = answer(served, tokenizer, return_token_ids=self.return_token_ids)
        return found.finish_reasons, self.shape.result(found)

    def failure(self, row: FailedRow) -> Any:
        """See ``Form``."""
        return self.shape.failure(row)


@dataclass(frozen=True, slots=True)
class Serving:
    """How rows are served.

    Attributes:
        form: of their results.
        seed: of the job.
        in_order: take rows as they come, see ``rosebatch.job.order``.
        decode: whether completions have texts.
        tell_apart: whether reasoning and tool calls are taken out of the texts of chats.
    """

    form: Form
    seed: int | None = None
    in_order: bool = False
    decode: bool = True
    tell_apart: bool = True
