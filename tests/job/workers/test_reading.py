"""The input of a job with many workers is read by a process of its own."""

import gzip
import json
import os
import signal
import threading

import pytest

from rosebatch.core.errors import UserError
from rosebatch.io.columns import Columns
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.shard import Shard
from rosebatch.job.workers.chunk import Chunk
from rosebatch.job.workers.reading import ReadingProcess
from tests.helpers.waiting import no_thread_left


@pytest.fixture
def reading():
    """A process, ended at the end."""
    process = ReadingProcess()
    yield process
    process.close()


def write(path, count, size=10):
    lines = (json.dumps({"id": f"row {number % 900}", "prompt": "x" * size}) for number in range(count))
    path.write_text("".join(f"{line}\n" for line in lines))
    return PromptReader(str(path), {"top_k": 3})


@pytest.mark.parametrize("sorts_within", [0, 1 << 20])
def test_rows_are_those_of_the_reader(reading, tmp_path, sorts_within):
    """Numbers, places, order and marks of repeated ids must not depend on who reads; a shard has its own rows only."""
    reader = write(tmp_path / "in.jsonl", 3000)
    reader.sorts_within = sorts_within
    reader.serves = Shard(2, 3).has
    expected = [record for group in reader.records() for record in group]
    chunks = [chunk for group in reading.read(reader) for chunk in group]
    assert [record for chunk in chunks for record in chunk.records] == expected
    assert [number for chunk in chunks for number in chunk.numbers] == [record.number for record in expected]
    assert sum(record.repeated is not None for record in expected) > 100
    assert max(map(len, chunks)) == 64


def test_an_input_that_is_gone(reading, tmp_path):
    """The job must end with the reader's own message."""
    reader = write(tmp_path / "in.jsonl", 3)
    (tmp_path / "in.jsonl").unlink()
    with pytest.raises(UserError) as expected:
        list(reader.records())
    with pytest.raises(UserError) as found:
        list(reading.read(reader))
    assert str(found.value) == str(expected.value)


def test_a_process_that_dies(reading, tmp_path):
    """The job would wait for ever for the next row."""
    rows = reading.read(write(tmp_path / "in.jsonl", 40_000, size=900))
    next(rows)
    os.kill(reading._process._process.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"the process that reads the input died \(SIGKILL\)"):
        list(rows)


def test_a_job_that_ends_early(tmp_path):
    """The process, or the thread that receives from it, would stay."""
    with no_thread_left():
        reading = ReadingProcess()
        next(reading.read(write(tmp_path / "in.jsonl", 40_000, size=900)))
        reading.close()
        assert reading._process._process.poll() is not None


def test_rows_that_are_answered_are_left_out(tmp_path):
    """A run that resumes would serve them again."""
    (records,) = write(tmp_path / "in.jsonl", 5).records()
    chunk = Chunk.of(records).pack()
    assert chunk.without(lambda number: False) is chunk
    assert chunk.without(lambda number: True) is None
    left = chunk.without({1, 2}.__contains__)
    assert (left.numbers, list(left.records)) == ([0, 3, 4], [records[0], *records[3:]])


def test_pipes_stay_in_the_parent(tmp_path):
    """Another process would find them empty."""
    assert write(tmp_path / "in.jsonl", 1).can_move
    assert not PromptReader("-", {}, "jsonl").can_move
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=(tmp_path / "pipe").write_text, args=('{"prompt": "a"}\n',), daemon=True).start()
    reader = PromptReader(str(tmp_path / "pipe"), {})
    assert not reader.can_move
    assert [record.content for group in reader.records() for record in group] == [b'{"prompt": "a"}']


def test_rows_of_all_formats(reading, tmp_path):
    """The process has its own copy of the reader: formats and names of columns must reach it."""
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(b'{"q": "a", "key": 1}\n{"q": "b", "key": 1}\n'))
    (tmp_path / "2.csv").write_text("q,key,x\nc,2,y\nd\n")
    reader = PromptReader(str(tmp_path), {}, columns=Columns("q", "key", ("key",)))
    expected = [record for group in reader.records() for record in group]
    found = [record for group in reading.read(reader) for chunk in group for record in chunk.records]
    assert found[:3] == expected[:3]
    assert (found[3].where, found[3].content.values) == (expected[3].where, {"q": "d"})
    assert [record.repeated for record in found] == [None, 1, None, None]
    assert [type(reader.parser.parse(record)) for record in found] == [Row, FailedRow, Row, FailedRow]
