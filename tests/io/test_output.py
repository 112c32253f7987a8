"""Results as files: whole under their name or not there, and none of them lost on the way."""

import datetime
import errno
import io
import json
import os
import stat
from decimal import Decimal
from pathlib import Path

import pytest

from rosebatch.errors import UserError
from rosebatch.io.output import StreamOutput


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


def add(output, *indices):
    for index in indices:
        output.add(index, {"index": index}, failed=False)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_jsonl_rows(write_jsonl_rows):
    """Values come out as they went in, in the order they were given."""
    rows = [
        {"id": 123456789012345678901234567890, "text": "é\U0001f600\x00\n", "index": 0},
        {"nested": {"a": [1, None, 2.5]}, "text": None, "index": 1},
        {"deep": nested(500), "index": 2},
    ]
    assert write_jsonl_rows(rows) == rows
    assert [list(row) for row in write_jsonl_rows(rows)] == [list(row) for row in rows]


def test_jsonl_of_values_that_only_parquet_has(write_jsonl_rows):
    """A Parquet input with JSONL output: dates, decimals and bytes have no JSON type of their own."""
    carried = {
        "day": datetime.date(2024, 2, 29),
        "when": datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC),
        "price": Decimal("1.50"),
        "raw": b"\xff\x00",
        "map": [("a", 1)],
        "nan": float("nan"),
    }
    assert write_jsonl_rows([carried]) == [
        {
            "day": "2024-02-29",
            "when": "2024-02-29T12:00:00Z",
            "price": "1.50",
            "raw": "/wA=",
            "map": [["a", 1]],
            "nan": None,
        }
    ]


def test_a_file_appears_whole_under_its_name(tmp_path, open_jsonl):
    """A killed run must not leave half a file that looks like a result."""
    path = tmp_path / "out.jsonl"
    path.write_text("the result of an earlier run\n")
    output = open_jsonl()
    add(output, 1, 0)
    output.flush()
    assert path.read_text() == "the result of an earlier run\n"
    assert names(tmp_path) == ["out.jsonl", "out.jsonl.part"]
    output.finish()
    output.close()
    assert path.read_text() == '{"index":0}\n{"index":1}\n'
    assert names(tmp_path) == ["out.jsonl"]


def test_a_stream_gets_rows_in_order(monkeypatch):
    """Each row as soon as those before it are there, flushed for whoever reads along; the stream is not closed."""
    raw = io.BytesIO()
    output = StreamOutput(io.BufferedWriter(raw))
    add(output, 1)
    output.flush()
    assert raw.getvalue() == b""
    add(output, 0, 3)
    output.flush()
    assert raw.getvalue() == b'{"index":0}\n{"index":1}\n'
    add(output, 2)
    output.finish()
    output.close()
    assert raw.getvalue() == b"".join(b'{"index":%d}\n' % i for i in range(4))


def test_given_up_a_file_keeps_its_results(tmp_path, open_jsonl):
    """Hours of work must not vanish with the error that ended them; an empty file is no use to anyone."""
    for name, rows in (("some.jsonl", [0, 2]), ("none.jsonl", [])):
        output = open_jsonl(name)
        add(output, *rows)
        output.flush()
        output.close()
    assert names(tmp_path) == ["some.jsonl.part"]
    output = open_jsonl("some.jsonl", resume=True)
    assert [index in output for index in range(4)] == [True, False, True, False]
    assert output.kept == f": 2 rows are in {tmp_path / 'some.jsonl.part'}, --resume goes on with them"
    add(output, 1)
    output.finish()
    assert (tmp_path / "some.jsonl").read_text() == '{"index":0}\n{"index":1}\n{"index":2}\n'


def test_permissions_are_the_users(tmp_path, open_jsonl):
    """A temporary file's 0600 must not survive the rename."""
    open_jsonl().finish()
    (tmp_path / "plain").touch()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("out.jsonl", "plain")]
    assert modes[0] == modes[1]


def test_a_disk_that_is_full_at_the_end(tmp_path, open_jsonl, monkeypatch):
    """The finished file needs room beside the part file: without it the results stay, and half a file does not."""
    output = open_jsonl()
    add(output, 0, 1)
    real = os.fsync

    def full(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").resolve().suffix == ".tmp":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"No space left on device: 2 rows are in .*, --resume goes on"):
        output.finish()
    output.close()
    assert names(tmp_path) == ["out.jsonl.part"]
    monkeypatch.undo()
    output = open_jsonl(resume=True)
    output.finish()
    assert (tmp_path / "out.jsonl").read_text() == '{"index":0}\n{"index":1}\n'
