"""What parent and workers send each other, without processes."""

import pickle
from types import SimpleNamespace

import pytest

from rosebatch.core.errors import RowError
from rosebatch.io.parse import Record
from rosebatch.io.table_values import BadValues
from rosebatch.job.report.tally import Tally
from rosebatch.job.workers import child
from rosebatch.job.workers import messages as m
from rosebatch.job.workers.chunk import Chunk


def encode(index, row, *, failed):
    return b"%d" % index


@pytest.fixture
def pipe(monkeypatch):
    """An output that sends to a list, on a clock of its own."""
    clock, sent = SimpleNamespace(now=100.0), []
    monkeypatch.setattr(child.time, "monotonic", lambda: clock.now)
    pipe = child._Pipe(SimpleNamespace(send=sent.append), encode, Tally(), 4, 0.1)
    return SimpleNamespace(pipe=pipe, clock=clock, sent=sent)


def add(pipe, *indices, failed=False):
    for index in indices:
        pipe.add(index, {}, failed=failed)
    pipe.flush()


def test_rows_arrive_as_they_were():
    """Columns must come back as rows, with values of tables and marks of repeated ids."""
    error = BadValues({"a": 1}, None)
    rows = [Record(3, "line 4", b"{}", 2), Record(9, "row 10", {"id": 1}, 5, 1), Record(11, "row 12", error, 7)]
    read, packed = Chunk.of(rows), Chunk.of(rows).pack()
    for chunk in (read, packed):
        assert (len(chunk), chunk.numbers, chunk.size) == (3, [3, 9, 11], 14)
        assert list(chunk.records) == rows
        assert list(pickle.loads(pickle.dumps(m.Rows([chunk.packed, chunk.packed]))).records) == [*rows, *rows]


def test_results_wait_for_others(pipe):
    """A message for each step took the parent more time than the rows in it."""
    add(pipe.pipe, 0)
    assert [message.numbers for message in pipe.sent] == [[0]]
    add(pipe.pipe, 1, 2)
    add(pipe.pipe, 3, failed=True)
    assert len(pipe.sent) == 1
    add(pipe.pipe, 4)
    (_, message) = pipe.sent
    assert (message.numbers, message.lines, message.failed) == ([1, 2, 3, 4], [b"1", b"2", b"3", b"4"], {3})


def test_results_wait_for_a_moment_only(pipe):
    """The last rows of a job, or those before a long step, would come late: others wait for them."""
    add(pipe.pipe, 0)
    add(pipe.pipe, 1)
    pipe.clock.now += 0.2
    pipe.pipe.flush()
    add(pipe.pipe, 2)
    pipe.pipe.finish()
    pipe.pipe.finish()
    assert [message.numbers for message in pipe.sent] == [[0], [1], [2]]


def test_an_idle_worker_has_sent_all(pipe):
    """The parent waits for these rows before it ends the job, and the worker for the parent."""
    heard = iter([None, m.End()])
    link = SimpleNamespace(receive=lambda timeout: next(heard))
    rows = child._rows(link, None, pipe.pipe, lambda: False)
    add(pipe.pipe, 0)
    add(pipe.pipe, 1)
    assert next(rows) is None
    assert [message.numbers for message in pipe.sent] == [[0], [1]]


def test_a_failed_row_can_be_sent():
    """Its error could be pickled and not unpickled: the worker never heard of the rows, nor of any after them."""
    error = RowError("invalid_field", "x" * 5000)
    found = pickle.loads(pickle.dumps(error))
    assert (found.code, found.message, str(found)) == (error.code, error.message, str(error))


def test_many_workers_send_fewer_messages():
    """A thousand workers with a message every tenth of a second took the parent more than all of its time."""
    assert child.results_seconds(8) == 0.1
    assert 1024 / child.results_seconds(1024) == 1000
