"""Who serves the rows of a job: this process, or others."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.io.output import Output
from rosebatch.io.reader import PromptReader
from rosebatch.job.model_info import ModelInfo
from rosebatch.job.not_finite import MAX_NOT_FINITE, require_finite
from rosebatch.job.report.progress import Progress
from rosebatch.job.report.stopwatch import Stopwatch
from rosebatch.job.report.tally import Tally
from rosebatch.job.serve_options import ServeOptions


@runtime_checkable
class Loaded(Protocol):
    """A model that is loaded already: a ``rosebatch.LLM``."""

    def service(self) -> "AbstractContextManager[Service]":
        """It serves the rows of one job, and nobody else's meanwhile."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """The rows of a job, and where their results go.

    Attributes:
        reader: of the input. Rows that already have a result in ``output`` are left out.
        output: takes the results; it is finished by the service and closed by the caller.
        serving: how rows are served.
        tally: counts them.
        progress: counts them, too.
        check: called before every step and while waiting; what it raises ends the job there.
    """

    reader: PromptReader
    output: Output
    serving: ServeOptions
    tally: Tally
    progress: Progress
    check: Callable[[], None]

    def sort_rows(self, max_inflight_bytes: int) -> None:
        """Have rows of the whole input that begin alike follow each other, if the output takes them in any order."""
        if not self.output.in_order:
            self.reader.sorts_within = max_inflight_bytes // 4

    def run(self, steps: Generator[None, None, None]) -> None:
        """Take all steps of a loop that serves the rows, then make the output visible.

        Raises:
            UserError: no row has finite logits, or the input has changed meanwhile.
        """
        with closing(steps):
            for _ in steps:
                require_finite(self.tally, self.output.num_rows, at_least=MAX_NOT_FINITE)
        self.reader.require_unchanged()
        require_finite(self.tally, self.output.num_rows)
        with Stopwatch(self.tally.host_seconds, "writing"):
            self.output.finish()


@dataclass(frozen=True, slots=True)
class Served:
    """What served the rows, for the report.

    Attributes:
        stats: of the engine.
        description: model, device, sampler, limits and switches as decided.
        load_seconds: without the imports before it.
        peak_memory: bytes, on the host and on GPUs.
        gpu: its name, if there is one.
        workers: of a job over several processes, what each of them did.
    """

    stats: EngineStats
    description: Mapping[str, Any]
    load_seconds: float
    peak_memory: Mapping[str, int]
    gpu: str | None
    workers: Sequence[Mapping[str, Any]] = ()


class Service(Protocol):
    """A model that serves the rows of one job.

    Attributes:
        facts: of the model.
        places: names of the devices, if there are several.
    """

    facts: ModelInfo
    places: Sequence[str]

    def fingerprint(self) -> Callable[[], str]:
        """Begin to hash the weights, in the background. The returned function waits for the hash.

        Raises:
            UserError: by that function: a file is unreadable.
        """
        ...

    def count_bad(self, reader: PromptReader) -> int:
        """Rows of the input that cannot be served; each is a line on stderr."""
        ...

    def load(self) -> None:
        """Load the model.

        Raises:
            UserError: something is missing, unreadable or impossible.
        """
        ...

    def run(self, work: Work) -> None:
        """Serve all rows, and finish the output."""
        ...

    def served(self) -> Served:
        """What served the rows, after ``run``."""
        ...
