"""Worker processes, each with the whole model. The parent does not import PyTorch."""

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rosebatch.config.run import RunConfig
from rosebatch.engine.metrics.outlook import Outlook
from rosebatch.io.output import Sink
from rosebatch.io.parse import Record
from rosebatch.io.rows import FailedRow, Row
from rosebatch.io.tasks.classify import Classify
from rosebatch.job.memory_estimate import row_bytes
from rosebatch.job.serve_options import Parsed, ServeOptions
from rosebatch.job.service import Service
from rosebatch.job.workers import messages as m
from rosebatch.job.workers.chunk import Chunk
from rosebatch.job.workers.pool import Pool
from rosebatch.job.workers.row_task import RowTask
from rosebatch.job.workers.service import Workers
from rosebatch.llm.results import pickled


class WorkersBackend:
    """See ``rosebatch.llm.backend.Backend``.

    Attributes:
        task: the last one.

    Raises:
        UserError: something that was asked for is missing, unreadable or impossible.
    """

    joins = False
    task: RowTask | None = None

    def __init__(self, config: RunConfig) -> None:
        self._pool = Pool(config, quiet=False)
        # Also where nobody calls ``close``.
        self.close = weakref.finalize(self, self._pool.close)
        try:
            self._pool.start()
            self._pool.load_all()
        except BaseException:
            self.close()
            raise
        self.sampling: Mapping[str, Any] = self._pool.facts.sampling
        self.classifies = Classify.name not in self._pool.facts.refused
        self.tokenizer_folder: Path | None = self._pool.tokenizer_folder

    def outlook(self) -> Outlook:
        """See ``Backend``: of the call that is served."""
        return Outlook() if self.task is None else self.task.outlook()

    def run(
        self,
        rows: Iterable[Row | FailedRow | None],
        serving: ServeOptions,
        sink: Sink,
        expects_rows: Callable[[], bool],
    ) -> Generator[None, None, None]:
        """See ``Backend``."""
        self.task = RowTask(self._pool, m.Begin(Parsed(), pickled, serving), sink)
        if isinstance(rows, Sequence):
            return self.task.serve_all([_record(row) for row in rows if row is not None])
        return self.task.serve([Chunk.of([_record(row)])] for row in rows if row is not None)

    @contextmanager
    def service(self) -> Iterator[Service]:
        """See ``Backend``."""
        yield Workers(self._pool)


def _record(row: Row | FailedRow) -> Record:
    content: Any = row
    return Record(row.index, row.where, content, row_bytes(row))
