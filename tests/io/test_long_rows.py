"""A row of more bytes than the limit costs itself alone: it is read past, in every form of input."""

import bz2
import gzip
import io
import json
import sys
from types import SimpleNamespace

import pytest

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import FlagError
from rosebatch.io import lines as io_lines
from rosebatch.io.lines import bounded_lines
from rosebatch.io.parsed_size import takes_more
from rosebatch.io.reader import PromptReader
from rosebatch.job.config import JobConfig

LIMIT = 60
ERROR = ("row_too_long", f"the row has more than {LIMIT} bytes; --max-row-bytes sets another limit")


def read(path, **options):
    """What each row is: the prompt, or the error."""
    rows = PromptReader(str(path), {}, max_row_bytes=LIMIT, **options)
    return [(row.index, row.where, what_of(row)) for row in rows]


def what_of(row):
    return row.prompt if hasattr(row, "prompt") else (row.error.code, row.error.message)


def line(size):
    """A row with so many bytes."""
    return json.dumps({"prompt": "x" * (size - len('{"prompt": ""}'))}).encode()


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress])
def test_lines(tmp_path, pack):
    """The limit itself is allowed; places of later lines stay right."""
    carriage = b"x" * LIMIT + b"\r\rx"
    lines = [line(LIMIT), line(LIMIT + 1), b"", b"[" * 5_000_000, carriage, line(50), line(LIMIT + 1)]
    (tmp_path / "in.jsonl").write_bytes(pack(b"\r\n".join(lines)))
    found = read(tmp_path / "in.jsonl")
    assert [each[:2] for each in found] == [(n, f"line {place}") for n, place in enumerate([1, 2, 4, 5, 6, 7])]
    assert [each[2] for each in found] == ["x" * 46, ERROR, ERROR, ERROR, "x" * 36, ERROR]


@pytest.mark.parametrize("place", [0, 1])
def test_stdin(monkeypatch, place):
    """Its first line is looked at before reading begins."""
    lines = [line(20), line(21)]
    lines.insert(place, line(5000))
    raw = SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(b"\n".join(lines) + b"\n")))
    monkeypatch.setattr(sys, "stdin", raw)
    assert [each[2] == ERROR for each in read("-")] == [number == place for number in range(3)]


def test_stdin_that_is_compressed(monkeypatch):
    """A compressed file may have no end of line for long."""
    packed = gzip.compress(b"\n".join([line(20), b"\0" * 10_000_000, line(21)]), mtime=0)
    assert b"\n" not in packed[: LIMIT + 1]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(packed))))
    assert [each[2] == ERROR for each in read("-")] == [False, True, False]


def test_a_batch_is_recognized_behind_a_long_line(tmp_path):
    """Its rows fail in their own form."""
    request = {"custom_id": "a", "body": {"prompt": "x"}}
    (tmp_path / "in.jsonl").write_bytes(line(5000) + b"\n" + json.dumps(request).encode())
    reader = PromptReader(str(tmp_path / "in.jsonl"), {}, max_row_bytes=LIMIT)
    assert reader.is_batch
    assert [what_of(row) for row in reader] == [ERROR, "x"]


def test_other_rows_do_not_wait(tmp_path):
    """A line is an error before it is read past: that may take minutes, where a few bytes make gigabytes."""

    class Endless(io.BufferedReader):
        def readline(self, size=-1):
            assert size == LIMIT + 2
            return next(lines)

        def peek(self, size=0):
            raise AssertionError("nobody asked for what follows")

    lines = iter([line(20) + b"\n", b"x" * (LIMIT + 2)])
    file = Endless(io.BytesIO())
    found = bounded_lines(file, "in.jsonl", LIMIT)
    assert next(found) == line(20) + b"\n"
    assert next(found).error.code == "row_too_long"
    with pytest.raises(AssertionError, match="nobody asked"):
        next(found)
    groups = PromptReader(str(write(tmp_path, [line(20), line(5000), line(21)])), {}, max_row_bytes=LIMIT).records()
    assert [len(group) for group in groups] == [2, 1]


def test_the_number_of_rows_is_not_counted_behind_a_long_one(tmp_path):
    """To count, or to look for names, would read past it once more each."""
    path = write(tmp_path, [line(20), line(5000), b'{"prompt": "x", "text": 1}'])
    reader = PromptReader(str(path), {}, max_row_bytes=LIMIT)
    assert reader.count() is None
    reader.require_free_names()
    assert [what_of(row)[0] for row in reader][1:] == ["row_too_long", "name_collision"]


@pytest.mark.parametrize("size", [0, "-1", "many"])
def test_no_limit_is_no_size(size):
    """With -1, no line of the input was read."""
    with pytest.raises(FlagError, match=r"must be >= 1|must be like"):
        JobConfig(input="in.jsonl", max_row_bytes=size)


def test_a_row_may_have_any_prompt_that_a_model_may_have():
    """JSON writes two bytes of a text as six at most."""
    config, job = RunConfig(model=None), JobConfig(input="-")
    assert (config.max_prompt_bytes, job.max_row_bytes) == ("8MiB", "32MiB")


OF_VALUES = (
    "row_too_long",
    "the row's values would take more than 50000 bytes in memory; a larger --max-row-bytes allows more",
)


@pytest.fixture
def few_values(monkeypatch):
    """Rows may take 50,000 bytes parsed, and those of more than 1000 bytes are looked at."""
    monkeypatch.setattr(io_lines, "SHORT_LINE", 1000)
    monkeypatch.setattr(io_lines, "VALUE_BYTES", 50_000)


@pytest.mark.parametrize(
    "inner",
    [
        *("[" * 500 + "]" * 500, '{"a":' * 200 + "1" + "}" * 200),
        *("[]," * 600 + "0", "{}," * 400 + "0", "1.5," * 2000 + "0", '"a",' * 800 + "0"),
    ],
)
@pytest.mark.parametrize("form", ["lines", "array", "stdin"])
def test_values_that_take_more_than_their_bytes(tmp_path, monkeypatch, few_values, form, inner):
    """A line of 24 MB took 1.1 GB as empty lists, and one of 20 MB was not parsed within minutes."""
    lines = [line(20), b'{"prompt": "a", "x": [%s]}' % inner.encode(), line(21)]
    text = b"[%s]" % b",".join(lines) if form == "array" else b"\n".join(lines)
    path = tmp_path / ("in.json" if form == "array" else "in.jsonl")
    path.write_bytes(text)
    if form == "stdin":
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BufferedReader(io.BytesIO(text))))
    reader = PromptReader("-" if form == "stdin" else str(path), {}, max_row_bytes=8100)
    assert [what_of(row) for row in reader] == ["x" * 6, OF_VALUES, "x" * 7]


def test_texts_that_look_like_values(tmp_path, few_values):
    """A carried text of JSON or CSV is one value, whatever is escaped in it."""
    texts = ["[]," * 600, '{"a": 1},' * 300, "\\" * 3 + '"' + ",[" * 600, '\\"[{' * 600 + "\\"]
    path = write(tmp_path, [json.dumps({"prompt": "a", "x": text}).encode() for text in texts])
    assert [row.metadata for row in PromptReader(str(path), {}, max_row_bytes=8100)] == [{"x": text} for text in texts]


def test_a_larger_limit_allows_more_values(tmp_path, few_values):
    """Whoever has such rows needs a way to run them."""
    path = write(tmp_path, [b'{"prompt": "a", "x": [%s0]}' % (b"[]," * 600)])
    assert [what_of(row) for row in PromptReader(str(path), {}, max_row_bytes=20_000)] == ["a"]


def test_short_lines_are_not_searched(tmp_path, monkeypatch):
    """To look at each line would take as long as to parse it."""
    monkeypatch.setattr(io_lines, "takes_more", None)
    assert [what_of(row) for row in PromptReader(str(write(tmp_path, [line(1 << 20)])), {})] == ["x" * ((1 << 20) - 14)]


def test_values_of_usual_rows_are_within_their_limit():
    """A chat of as many messages as are rendered, and all tools that a row may offer, still run."""
    messages = b'{"role": "user", "content": "hello"}, ' * 100_000
    tool = b'{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}, '
    assert not takes_more(messages, io_lines.VALUE_BYTES)
    assert not takes_more(tool * 30_000, io_lines.VALUE_BYTES)


def write(folder, lines):
    path = folder / "in.jsonl"
    path.write_bytes(b"\n".join(lines))
    return path
