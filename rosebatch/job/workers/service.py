"""A job over several processes, seen from the parent."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rosebatch.config import RunConfig
from rosebatch.io.parse import Record
from rosebatch.io.reader import PromptReader
from rosebatch.job.not_finite import require_finite
from rosebatch.job.service import Served, Work
from rosebatch.job.workers import messages as m
from rosebatch.job.workers.pool import Pool
from rosebatch.job.workers.serving import JobRows
from rosebatch.job.workers.task import RowTask


@contextmanager
def in_workers(config: RunConfig, *, quiet: bool) -> "Iterator[Workers]":
    """A service of several processes, which end with the ``with`` block.

    Args:
        config: of the run.
        quiet: no progress of a download, and no warning of a worker's death, on stderr.

    Raises:
        UserError: something that was asked for is missing, unreadable or impossible.
    """
    pool = Pool(config, quiet=quiet)
    try:
        pool.start()
        yield Workers(pool)
    finally:
        pool.close()


class Workers:
    """See ``rosebatch.job.service.Service``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._task: RowTask | None = None
        self.facts = pool.facts
        self.places: Sequence[str] = pool.places

    def fingerprint(self) -> Callable[[], str]:
        """See ``Service``."""
        self._pool.ask(m.Fingerprint())
        return self._pool.answer

    def count_bad(self, reader: PromptReader) -> int:
        """See ``Service``."""
        self._pool.ask(m.CountBad(reader.source, dict(reader.defaults), reader.input_format, reader.result_column))
        return int(self._pool.answer())

    def load(self) -> None:
        """See ``Service``: some worker can serve then; the others follow while rows are served."""
        self._pool.load()

    def run(self, work: Work) -> None:
        """See ``Service``."""
        serve = JobRows(work.shape, work.seed, work.return_token_ids)
        message = m.Begin(work.reader.parser, work.output.encode, serve)
        self._task = RowTask(
            self._pool, message, work.shape.failure, work.output, work.tally, work.progress, work.check
        )
        for _ in self._task.serve(_unanswered(work)):
            pass
        work.reader.require_unchanged()
        require_finite(work.tally, work.output.num_rows)
        work.output.finish()

    def served(self) -> Served:
        """See ``Service``."""
        assert self._task is not None, "the job has run"
        return self._task.served()


def _unanswered(work: Work) -> Iterator[list[Record]]:
    """Groups of the rows that have no result yet."""
    resumed = work.output.num_rows > 0
    for group in work.reader.records():
        yield [record for record in group if record.number not in work.output] if resumed else group
