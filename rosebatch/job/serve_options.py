"""How rows are parsed and served, and what their results look like: options that are sent to worker processes."""

from dataclasses import dataclass
from typing import Any, Protocol

from rosebatch.io.images.policy import NO_MEDIA, MediaPolicy
from rosebatch.io.parse import Record
from rosebatch.io.results import Shape
from rosebatch.io.rows import FailedRow, Row


class Parse(Protocol):
    """Makes rows of records."""

    def parse(self, record: Record) -> Row | FailedRow:
        """The row; a failed one if it cannot be served."""
        ...


@dataclass(frozen=True, slots=True)
class Parsed:
    """Records whose content is a row already."""

    def parse(self, record: Record) -> Row | FailedRow:
        """See ``Parse``."""
        row: Any = record.content
        return row  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How rows are served.

    Attributes:
        shape: of their results.
        seed: of the job.
        in_order: take rows as they come, see ``rosebatch.job.order``.
        decode: whether completions have texts.
        return_token_ids: whether choices have token ids.
        whole_texts: whether choices of chats have all of their text, too; see ``rosebatch.io.results.Choice.whole``.
        media: where images may come from.
    """

    shape: Shape
    seed: int | None = None
    in_order: bool = False
    decode: bool = True
    return_token_ids: bool = False
    whole_texts: bool = False
    media: MediaPolicy = NO_MEDIA
