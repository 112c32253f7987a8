"""Files of prompts as users have them: odd bytes cost only their own line."""

import io
import json
import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import UserError
from rosebatch.io import tables
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow, Row
from rosebatch.io.table_values import rows_of

GOOD = b'{"prompt":"a"}'


def summary(rows):
    """Index, place, and prompt or error code of each row."""
    return [(r.index, r.where, r.error.code if isinstance(r, FailedRow) else r.prompt) for r in rows]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\xef\xbb\xbf", []),
        (b"\n\r\n  \t\n", []),
        (GOOD, [1]),
        (GOOD + b"\n", [1]),
        (b"\xef\xbb\xbf" + GOOD + b"\n" + GOOD, [1, 2]),
        (GOOD + b"\r\n" + GOOD + b"\r\n", [1, 2]),
        (b"\n\n" + GOOD + b"\n \r\n\t\n" + GOOD + b"\n\n", [3, 6]),
    ],
    ids=["empty", "bom-only", "blank-only", "no-final-newline", "final-newline", "bom", "crlf", "blank-lines"],
)
def test_line_ends_and_blank_lines(read_bytes, content, lines):
    """Windows line ends, a byte order mark or blank lines must not fail a row or shift its line number."""
    assert summary(read_bytes(content)) == [(i, f"line {line}", "a") for i, line in enumerate(lines)]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"{", id="cut"),
        pytest.param(b"{'prompt': 'a'}", id="python-repr"),
        pytest.param(b'{"prompt":"a"} {"prompt":"b"}', id="two-objects"),
        pytest.param(b'{"prompt":"a"},', id="comma"),
        pytest.param(b"\x00", id="nul"),
        pytest.param(b"\x00\x00\x00\x00" + GOOD, id="nul-before"),
        pytest.param(b'{"prompt":"a\x00b"}', id="nul-in-string"),
        pytest.param(b'{"prompt":"\xff\xfe"}', id="invalid-utf8"),
        pytest.param(b'{"prompt":"\xed\xa0\x80"}', id="utf8-surrogate"),
        pytest.param(rb'{"prompt":"\ud800"}', id="lone-surrogate"),
        pytest.param(rb'{"prompt":"\ud800 and text behind it"}', id="lone-surrogate-then-text"),
        pytest.param(rb'{"prompt":"\udc00"}', id="low-surrogate"),
        pytest.param(rb'{"prompt":"a","extra":"\ud800\ud800"}', id="two-high-surrogates"),
        pytest.param(b'{"prompt":"a","temperature":NaN}', id="nan"),
        pytest.param(b'{"prompt":"a","extra":Infinity}', id="infinity"),
        pytest.param(b'{"prompt":"a","extra":-Infinity}', id="minus-infinity"),
        pytest.param(b'{"prompt":"a","extra":1e999}', id="number-too-large"),
        pytest.param(b'{"prompt":"a","extra":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="deep"),
        pytest.param(b'{"a":' * 100_000, id="deep-cut"),
        pytest.param('{"prompt":"a"}'.encode("utf-16"), id="utf-16"),
    ],
)
def test_a_line_that_is_no_json_costs_itself_only(read_bytes, line):
    """Rows around it are unharmed, and the error names its line number."""
    rows = summary(read_bytes(b"\n" + GOOD + b"\n" + line + b"\n" + GOOD))
    assert rows == [(0, "line 2", "a"), (1, "line 3", "invalid_json"), (2, "line 4", "a")]


def test_nesting_that_python_can_hold_is_carried(read_bytes):
    """A limit below the decoder's own would refuse good data."""
    (row,) = read_bytes(b'{"prompt":"a","extra":' + b"[" * 500 + b"]" * 500 + b"}")
    assert row.metadata == {"extra": json.loads("[" * 500 + "]" * 500)}


def test_escapes_and_pairs_of_surrogates(read_bytes):
    """A surrogate pair is one character, and an escaped NUL is an ordinary one."""
    (row,) = read_bytes(rb'{"prompt":"\ud83d\ude00\u0000\n"}')
    assert row.prompt == "\U0001f600\x00\n"


def test_a_30_digit_integer_is_carried_exactly(read_bytes):
    """Decoders that use floats or 64 bits change such ids."""
    (row,) = read_bytes(b'{"prompt":"a","id":123456789012345678901234567890,"n1":-18446744073709551617}')
    assert row.metadata == {"id": 123456789012345678901234567890, "n1": -18446744073709551617}


def test_a_line_of_10_mb(read_bytes):
    """No buffer limit cuts a line in two."""
    text = "x" * 10_000_000
    rows = read_bytes(json.dumps({"prompt": text}).encode() + b"\n" + GOOD)
    assert [len(row.prompt) for row in rows] == [10_000_000, 1]


def test_duplicate_ids(read_bytes):
    """The second row fails: results could not be told apart. 1 and "1" differ; rows without id never clash."""
    lines = [
        b'{"prompt":"a","id":"x"}',
        b'{"prompt":"b","id":"x","kept":1}',
        b'{"prompt":"c"}',
        b'{"prompt":"d"}',
        b'{"prompt":"e","id":1}',
        b'{"prompt":"f","id":"1"}',
        b'{"prompt":"g","id":null}',
        b'{"prompt":"h","id":null}',
    ]
    rows = read_bytes(b"\n".join(lines))
    assert [r[2] for r in summary(rows)] == ["a", "duplicate_id", "c", "d", "e", "f", "g", "h"]
    assert (rows[1].error.message, rows[1].where) == ("id 'x' was used by an earlier row", "line 2")
    assert rows[1].metadata == {"id": "x", "kept": 1}


def test_the_id_of_a_failed_row_is_taken(read_bytes):
    """Its error row carries the id too: two results would have the same one."""
    rows = read_bytes(b'{"prompt":"","id":5}\n{"prompt":"b","id":5}\n{"prompt":"c","id":5.0}\n{"prompt":"d","id":true}')
    assert [r[2] for r in summary(rows)] == ["empty_prompt", "duplicate_id", "duplicate_id", "invalid_field"]


def test_defaults_reach_every_row(read_bytes):
    """The run's flags apply where a line says nothing."""
    rows = read_bytes(GOOD + b'\n{"prompt":"a","max_tokens":2}', max_tokens=5)
    assert [row.sampling.max_tokens for row in rows] == [5, 2]


class Endless:
    """A pipe whose writer waits for results before it writes more."""

    def __init__(self, lines):
        self._lines = lines

    def readline(self, size):
        return next(self._lines)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def test_rows_are_read_one_by_one(monkeypatch):
    """Reading ahead without bound would fill memory, and block a pipe that waits for results."""
    read = []

    def lines():
        while True:
            read.append(1)
            yield GOOD

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Endless(lines())))
    rows = iter(PromptReader("-", {}))
    assert [next(rows).index for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(read) == 5


def test_stdin(monkeypatch):
    """``-`` reads JSONL from stdin; the number of rows is unknown."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n" + GOOD)))
    reader = PromptReader("-", {})
    assert reader.count() is None
    assert reader.schema is None
    assert summary(reader) == [(0, "line 1", "a"), (1, "line 3", "a")]


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet"])
def test_a_missing_file(tmp_path, name):
    """Found before a model is loaded."""
    with pytest.raises(UserError, match=r"none\.\w+: no such file or folder"):
        PromptReader(str(tmp_path / name), {})


def test_a_folder_as_input(tmp_path):
    """An empty folder must not be reported as a missing file."""
    with pytest.raises(UserError, match="no files found; a folder needs"):
        PromptReader(str(tmp_path), {})


@pytest.mark.parametrize("content", [b"", b"PAR1", b"prompt\na\n", b"PAR1" + bytes(100) + b"PAR1"])
def test_an_unreadable_parquet_file(tmp_path, content):
    """Found at once, with the file's name, not as a traceback of Arrow."""
    path = tmp_path / "in.parquet"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"in\.parquet: unreadable Parquet file"):
        PromptReader(str(path), {})


def test_a_parquet_file_with_broken_data(tmp_path):
    """With an intact footer the damage is found only while reading: still no traceback."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [f"{i}" * 50 for i in range(1000)]}), path)
    content = bytearray(path.read_bytes())
    content[4:2000] = b"\xff" * 1996
    path.write_bytes(bytes(content))
    with pytest.raises(UserError, match="unreadable Parquet file"):
        list(PromptReader(str(path), {}))


def test_parquet_columns(read_table):
    """Every column is carried, known fields included; a null is an absent field."""
    table = pa.table(
        {
            "prompt": ["a", None, "c"],
            "messages": [None, [{"role": "user", "content": "hi"}], None],
            "max_tokens": pa.array([3, None, 4], pa.int32()),
            "temperature": pa.array([0.5, None, None], pa.float32()),
            "stop": [["x"], None, None],
            "id": pa.array([7, 8, 7], pa.uint64()),
            "label": ["l", None, "m"],
        }
    )
    one, two, three = read_table(table)
    assert (one.prompt, one.sampling.max_tokens, one.sampling.temperature, one.sampling.stop) == ("a", 3, 0.5, ("x",))
    assert (two.messages, two.sampling.max_tokens) == ([{"role": "user", "content": "hi"}], 512)
    assert isinstance(three, FailedRow)
    assert (three.error.code, three.where) == ("duplicate_id", "row 3")
    assert [row.metadata for row in (one, two, three)] == table.to_pylist()


def test_parquet_token_ids(read_table):
    """Lists of any integer width work."""
    rows = read_table(pa.table({"prompt_token_ids": pa.array([[1, 2], [], None], pa.list_(pa.int32()))}))
    assert rows[0].prompt_token_ids == (1, 2)
    assert [row.error.code for row in rows[1:]] == ["empty_prompt", "missing_prompt"]


def test_parquet_message_parts(read_table):
    """Parts have every key, null where absent: they must not count as non-text; the column stays unchanged."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}]}]
    (row,) = read_table(pa.table({"messages": [messages]}))
    assert (row.messages, row.metadata) == ([{"role": "user", "content": "one"}], {"messages": messages})


def test_parquet_over_several_batches(read_table):
    """Indices and row numbers continue from one batch of 1024 rows to the next."""
    rows = read_table(pa.table({"prompt": [f"{i}" for i in range(2500)]}))
    assert summary(rows) == [(i, f"row {i + 1}", f"{i}") for i in range(2500)]


def test_an_empty_parquet_file(read_table):
    """A file with columns and no rows is an empty input."""
    assert read_table(pa.table({"prompt": pa.array([], pa.string())})) == []


def test_parquet_endings(tmp_path):
    """The extension decides, in upper case too."""
    for name in ("in.PARQUET", "in.pq"):
        pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / name)
        (row,) = PromptReader(str(tmp_path / name), {})
        assert isinstance(row, Row)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1], pa.timestamp("ns")),
        pa.array([1], pa.duration("ns")),
        pa.array([1], pa.time64("ns")),
        pa.array([2**40], pa.timestamp("s")),
        pa.Array.from_buffers(
            pa.string(), 1, [None, pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0])), pa.py_buffer(b"\xff")]
        ),
    ],
    ids=["nanosecond-timestamp", "nanosecond-duration", "nanosecond-time", "year-36812", "string-not-utf8"],
)
def test_a_parquet_value_that_python_has_no_type_for(tmp_path, column):
    """It may be carried or fail its row; it ended the job, with all other rows."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "when": column}), path)
    (row,) = PromptReader(str(path), {})
    if isinstance(row, FailedRow):
        assert row.error.code == "invalid_value"
        assert "column when" in row.error.message
        assert row.metadata == {"prompt": "a"}


def test_bad_values_of_a_table_fail_their_rows_only(tmp_path):
    """All rows beside one date past year 9999, or one text that is not UTF-8, were lost."""
    path, count = tmp_path / "in.parquet", 1500
    when = pa.array([2**40 if i in (3, 1400) else 5 for i in range(count)], pa.timestamp("s"))
    raw = pa.array([b"\xff" if i == 1400 else b"ok" for i in range(count)])
    text = pa.Array.from_buffers(pa.string(), count, raw.buffers())
    nested = pa.StructArray.from_arrays([text], ["text"])
    table = pa.table({"prompt": [f"{i}" for i in range(count)], "when": when, "deep": nested, "text id": text})
    pq.write_table(table, path)
    reader = PromptReader(str(path), {})
    rows = list(reader)
    failed = [row for row in rows if isinstance(row, FailedRow)]
    assert [(row.index, row.where, row.error.code) for row in failed] == [
        (3, "row 4", "invalid_value"),
        (1400, "row 1401", "invalid_value"),
    ]
    assert failed[0].metadata == {"prompt": "3", "deep": {"text": "ok"}, "text id": "ok"}
    assert failed[1].metadata == {"prompt": "1400"}
    assert [row.index for row in rows] == list(range(count))
    assert [dict(each) for each, _ in reader.carried()] == [dict(row.metadata) for row in rows]


@pytest.mark.parametrize("scale", [-1000, 2**31 - 1])
def test_a_decimal_of_any_scale(tmp_path, scale):
    """One that Python's decimals cannot hold ended the job with an unexpected error."""
    digits = [number.to_bytes(16, "little") for number in (0, 1234)]
    price = pa.Array.from_buffers(pa.decimal128(18, scale), 2, [pa.py_buffer(b"\2"), pa.py_buffer(b"".join(digits))])
    table = pa.table({"prompt": ["a", "b"], "price": price})
    with pa.ipc.new_file(tmp_path / "in.arrow", table.schema) as writer:
        writer.write_table(table)
    good, bad = PromptReader(str(tmp_path / "in.arrow"), {})
    assert good.metadata == {"prompt": "a", "price": None}
    assert (bad.error.code, bad.metadata) == ("invalid_value", {"prompt": "b"})
    assert bad.error.message.startswith("column price has a value that cannot be read")


def test_long_rows_of_a_table_are_decoded_a_few_at_a_time(tmp_path, monkeypatch):
    """A thousand rows of 1 MB were in memory at once, and again as Python's own values."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [str(i) * 500_000 for i in range(40)]}), path, use_dictionary=False)
    sizes = []
    monkeypatch.setattr(tables, "rows_of", lambda batch: sizes.append(batch.nbytes) or rows_of(batch))
    assert [row.prompt[:2] for row in PromptReader(str(path), {})] == [(str(i) * 2)[:2] for i in range(40)]
    assert len(sizes) >= 8
    assert max(sizes) < 5_000_000


def test_repeated_ids_between_broken_lines(tmp_path):
    """One line that is no JSON, or an id of another type, hid the ids of all lines read with it."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"id": 1}\n{"id": "1"}\n{"id": \n{"id": [2]}\n{"id": true}\n{"id": 1}\n\xff\n{"id": true}\n{}\n')
    (group,) = PromptReader(str(path), {}).records()
    assert [record.repeated for record in group] == [None, None, None, None, None, 1, None, None, None]
    path.write_bytes(b'{"id": 1}\n{"id": true}\n{"id": "a"}\n{"id": true}\n{"id": "a"}\n{"id": null}\n{"id": null}\n')
    (group,) = PromptReader(str(path), {}).records()
    assert [record.repeated for record in group] == [None, None, None, None, "a", None, None]
