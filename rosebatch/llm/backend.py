"""What an ``LLM`` needs of whatever computes its prompts."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.service import Service
from rosebatch.job.serving import Serving

# Results, as they are ready; closing the generator drops what is unfinished.
Outputs = Generator[Any, None, None]


class Backend(Protocol):
    """A loaded model."""

    @property
    def sampling(self) -> Mapping[str, Any]:
        """The model's own sampling defaults, as fields of a row."""
        ...

    @property
    def tokenizer_folder(self) -> Path | None:
        """None for a model that works on token ids."""
        ...

    def complete(self, rows: Sequence[Row | FailedRow], serving: Serving) -> Outputs:
        """The results of rows, in any order."""
        ...

    def stream(self, rows: Iterable[Row | FailedRow], serving: Serving) -> Outputs:
        """The results of rows as they come; they are read on a thread."""
        ...

    def service(self) -> AbstractContextManager[Service]:
        """The model as one that serves the rows of a job."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...
