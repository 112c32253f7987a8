"""A job over several processes, seen from the parent."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rosebatch.config.run import RunConfig
from rosebatch.io.reader import PromptReader
from rosebatch.job.service import Served, Work
from rosebatch.job.workers import messages as m
from rosebatch.job.workers.chunk import Chunk, in_chunks
from rosebatch.job.workers.pool import Pool
from rosebatch.job.workers.reading import ReadingProcess
from rosebatch.job.workers.row_task import RowTask

# With so many, the input is read by a process of its own: that takes this one a third of its time for a row.
MANY_WORKERS = 16


@contextmanager
def in_workers(config: RunConfig, *, quiet: bool) -> "Iterator[Workers]":
    """A service of several processes, which end with the ``with`` block.

    Args:
        config: of the run.
        quiet: no progress of a download on stderr.

    Raises:
        UserError: something that was asked for is missing, unreadable or impossible.
    """
    pool, reading = Pool(config, quiet=quiet), None
    try:
        pool.start()
        if len(pool.workers) >= MANY_WORKERS:
            reading = ReadingProcess()
        yield Workers(pool, reading)
    finally:
        pool.close()
        if reading is not None:
            reading.close()


class Workers:
    """See ``rosebatch.job.service.Service``.

    Args:
        pool: of the workers.
        reading: reads the input; None if this process does.
    """

    def __init__(self, pool: Pool, reading: ReadingProcess | None = None) -> None:
        self._pool = pool
        self._reading = reading
        self._task: RowTask | None = None
        self.facts = pool.facts
        self.places: Sequence[str] = pool.places

    def fingerprint(self) -> Callable[[], str]:
        """See ``Service``."""
        self._pool.identify()
        return self._pool.fingerprint

    def count_bad(self, reader: PromptReader) -> int:
        """See ``Service``."""
        make_reader = partial(
            PromptReader,
            reader.source,
            dict(reader.defaults),
            reader.input_format,
            result_column=reader.result_column,
            columns=reader.columns,
            task=reader.task,
            max_row_bytes=reader.max_row_bytes,
            media=reader.media,
        )
        self._pool.ask(m.CountBad(make_reader))
        lines, bad = self._pool.answer()
        sys.stderr.write(lines)
        return bad

    def load(self) -> None:
        """See ``Service``: some worker can serve then; the others follow while rows are served."""
        self._pool.load()

    def run(self, work: Work) -> None:
        """See ``Service``."""
        if self.facts.shares_prefixes:
            work.sort_rows(self._pool.inflight * len(self._pool.workers))
        message = m.Begin(work.reader.parser, work.output.encode, work.serving)
        self._task = RowTask(self._pool, message, work.output, work.tally, work.progress, work.check)
        work.run(self._task.serve(_unanswered(work, self._chunks(work.reader))))

    def _chunks(self, reader: PromptReader) -> Iterator[Sequence[Chunk]]:
        if self._reading is not None and reader.can_move:
            return self._reading.read(reader)
        return (list(in_chunks(group)) for group in reader.records())

    def served(self) -> Served:
        """See ``Service``."""
        assert self._task is not None, "the job has run"
        return self._task.served()


def _unanswered(work: Work, groups: Iterable[Sequence[Chunk]]) -> Iterator[Sequence[Chunk]]:
    """The rows that have no result yet."""
    resumed = work.output.num_rows > 0
    for group in groups:
        yield [left for chunk in group if (left := chunk.without(work.output.__contains__))] if resumed else group
