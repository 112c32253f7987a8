"""The messages between the parent and its workers; see ``rosebatch.host.child_process``."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rosebatch.config.run import RunConfig
from rosebatch.engine.metrics.outlook import Outlook
from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.io.output import Encode
from rosebatch.io.parse import Record
from rosebatch.job.model_info import ModelInfo
from rosebatch.job.report.tally import Tally
from rosebatch.job.serve_options import Parse, ServeOptions
from rosebatch.job.workers.chunk import unpack

if TYPE_CHECKING:
    from rosebatch.io.reader import PromptReader


@dataclass(frozen=True, slots=True)
class Setup:
    """To a worker, first of all.

    Attributes:
        config: of the run.
        quiet: no progress of a download on stderr.
    """

    config: RunConfig
    quiet: bool


@dataclass(frozen=True, slots=True)
class Load:
    """To a worker: load the model.

    Attributes:
        fingerprint: that its files must have; None if they are known to be those that the run began with.
    """

    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """To a worker: send the hash of the model's files as ``Identified``."""


@dataclass(frozen=True, slots=True)
class CountBad:
    """To a worker: send a line for each row that cannot be served, and their number, as ``Answer``.

    Attributes:
        make_reader: opens the input in the worker.
    """

    make_reader: Callable[[], "PromptReader"]


@dataclass(frozen=True, slots=True)
class Begin:
    """To a worker: a task begins.

    Attributes:
        parser: of records.
        encode: makes the lines of results.
        serving: how rows are served.
    """

    parser: Parse
    encode: Encode
    serving: ServeOptions


class Rows(NamedTuple):
    """To a worker: rows to serve, each item as in ``Chunk.packed``."""

    packed: list[bytes]

    @property
    def records(self) -> Iterator[Record]:
        """The rows."""
        return chain.from_iterable(map(unpack, self.packed))


@dataclass(frozen=True, slots=True)
class End:
    """To a worker: no more rows follow, and all of its rows are answered, unless it should ``drop`` them."""

    drop: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """From a worker: what the job needs of the model.

    Attributes:
        facts: of the model.
        state: of its files, see ``rosebatch.model.source.ModelSource``.
        tokenizer_folder: None for a model that works on token ids.
    """

    facts: ModelInfo
    state: str
    tokenizer_folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Identified:
    """From a worker: the hash of the model's files."""

    fingerprint: str


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker: the model is loaded.

    Attributes:
        slots: maximum number of concurrent sequences.
        description: for the report.
        load_seconds: without the imports before it.
    """

    slots: int
    description: Mapping[str, Any]
    load_seconds: float


class Results(NamedTuple):
    """From a worker: finished rows.

    Attributes:
        numbers: of the rows.
        lines: the result of each row, by the ``encode`` of ``Begin``.
        failed: numbers of the error rows.
        tally: what the rows add to the counts.
    """

    numbers: list[int]
    lines: list[bytes]
    failed: frozenset[int]
    tally: Tally


@dataclass(frozen=True, slots=True)
class Beat:
    """From a worker, every second: it is alive.

    Attributes:
        outlook: of its engine; None before the model is loaded.
    """

    outlook: Outlook | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """From a worker: lines about bad rows, or the message of the error.

    Attributes:
        value: the text.
        num_bad: rows that cannot be served; None: the text is of an error.
    """

    value: str
    num_bad: int | None


@dataclass(frozen=True, slots=True)
class Lost:
    """From a worker, the last thing: a process that holds a part of its model is gone, and it cannot go on.

    Attributes:
        why: for people.
    """

    why: str


@dataclass(frozen=True, slots=True)
class InputEnd:
    """From the process that reads the input: there are no more rows."""


@dataclass(frozen=True, slots=True)
class Done:
    """From a worker: the task is done.

    Attributes:
        stats: of its engine; the first token's time counts from the task's begin in the worker.
        peak_memory: bytes, on the host and on its GPU.
        gpu: its name, if there is one.
    """

    stats: EngineStats
    peak_memory: Mapping[str, int]
    gpu: str | None
