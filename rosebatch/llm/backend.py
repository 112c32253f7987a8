"""What an ``LLM`` needs of whatever computes its prompts, and how that is loaded."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rosebatch.config.run import RunConfig
from rosebatch.engine.metrics.outlook import Outlook
from rosebatch.io.output import Sink
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.serve_options import ServeOptions
from rosebatch.job.service import Service

if TYPE_CHECKING:
    from rosebatch.launch.launch import Launched


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

    @property
    def classifies(self) -> bool:
        """Whether the model has a classification head."""
        ...

    def outlook(self) -> Outlook:
        """What was done, and what is under way."""
        ...

    @property
    def joins(self) -> bool:
        """Whether rows of several calls can be served together: those that come later begin at the next step."""
        ...

    def run(
        self,
        rows: Iterable[Row | FailedRow | None],
        serving: ServeOptions,
        sink: Sink,
        expects_rows: Callable[[], bool],
    ) -> Generator[None, None, None]:
        """Serve rows, a step at a time; closing the generator drops what is unfinished.

        Args:
            rows: perhaps a sequence; None says that there is none at the moment.
            serving: how.
            sink: takes the results.
            expects_rows: whether a row may come after a None.
        """
        ...

    def service(self) -> AbstractContextManager[Service]:
        """The model as one that serves the rows of a job."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


def load_backend(config: RunConfig) -> Backend:
    """Load a model, in this process or in workers.

    Raises:
        UserError: something that was asked for is missing, unreadable or impossible.
    """
    if config.data_parallel_size != 1:
        from rosebatch.llm.workers import WorkersBackend

        return WorkersBackend(config)
    # Only now, since these import PyTorch.
    from rosebatch.launch.launch import launch
    from rosebatch.llm.local import LocalBackend

    return LocalBackend(launch(config))


def launched_of(backend: Backend) -> "Launched":
    """The engine of this process.

    Raises:
        RuntimeError: it is in others.
    """
    launched: Launched | None = getattr(backend, "launched", None)
    if launched is None:
        raise RuntimeError("this LLM computes in worker processes: its engine cannot be reached")
    return launched
