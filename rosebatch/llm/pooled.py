"""Worker processes, each with the whole model. The parent does not import PyTorch."""

import pickle
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rosebatch.config.run import RunConfig
from rosebatch.io.parse import Record, Row
from rosebatch.job.memory_estimate import row_bytes
from rosebatch.job.service import Service
from rosebatch.job.workers import messages as m
from rosebatch.job.workers.chunk import Chunk
from rosebatch.job.workers.pool import Pool
from rosebatch.job.workers.service import Workers
from rosebatch.job.workers.serving import Given
from rosebatch.job.workers.task import RowTask
from rosebatch.llm.backend import Outputs
from rosebatch.llm.outputs import RequestOutput, failed_output
from rosebatch.llm.prompts import PromptRows, pickled


class PooledBackend:
    """See ``rosebatch.llm.backend.Backend``.

    Attributes:
        task: the last one.

    Raises:
        UserError: something that was asked for is missing, unreadable or impossible.
    """

    task: RowTask

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
        self.tokenizer_folder: Path | None = self._pool.tokenizer_folder

    def complete(self, rows: Sequence[Row], seed: int | None) -> Outputs:
        """See ``Backend``."""
        outputs, task = self._task(PromptRows(seed))
        return _outputs(task.serve_all(list(map(_record, rows))), outputs)

    def stream(self, rows: Iterable[Row], seed: int | None) -> Outputs:
        """See ``Backend``."""
        outputs, task = self._task(PromptRows(seed, in_order=True))
        return _outputs(task.serve([Chunk.of([_record(row)])] for row in rows), outputs)

    @contextmanager
    def service(self) -> Iterator[Service]:
        """See ``Backend``."""
        yield Workers(self._pool)

    def _task(self, serve: PromptRows) -> tuple["_Outputs", RowTask]:
        outputs = _Outputs()
        self.task = RowTask(self._pool, m.Begin(Given(), pickled, serve), failed_output, outputs)
        return outputs, self.task


class _Outputs:
    """See ``rosebatch.job.workers.task.Sink``: keeps results until they are taken."""

    full = False

    def __init__(self) -> None:
        self.num_rows = 0
        self._found: list[RequestOutput] = []

    def add(self, index: int, row: RequestOutput, *, failed: bool) -> None:
        self.num_rows += 1
        self._found.append(row)

    def add_lines(self, indices: Sequence[int], lines: Sequence[bytes], failed: Collection[int]) -> None:
        self.num_rows += len(lines)
        self._found += map(pickle.loads, lines)

    def flush(self) -> None:
        pass

    def take(self) -> list[RequestOutput]:
        """The results since the last call."""
        found, self._found = self._found, []
        return found


def _outputs(steps: Iterator[None], outputs: _Outputs) -> Outputs:
    """The results of a task, as they are ready."""
    try:
        for _ in steps:
            yield from outputs.take()
        yield from outputs.take()
    finally:
        steps.close()  # type: ignore[attr-defined]


def _record(row: Row) -> Record:
    content: Any = row
    return Record(row.index, row.where, content, row_bytes(row))
