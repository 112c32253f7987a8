"""Results as CSV, as our own reader and PyArrow's read them back."""

import gzip
from functools import partial

import msgspec
import pyarrow.csv as pc
import pytest

from rosebatch.io.csv_output import write_csv
from rosebatch.io.csv_table import CsvTable
from rosebatch.io.formats import named
from rosebatch.io.result_names import RESULT_FIELDS

TEXTS = ["a,b", 'say "hi"', '"', "two\nlines", "\r", "\r\n", " x ", "\t", "\ufeffid", "é🌹", "null", "1", "\0"]


@pytest.fixture
def write(tmp_path):
    """Writes rows; returns the file."""

    def write(rows, name="out.csv", **options):
        encoded = [msgspec.json.encode(row) for row in rows]
        path = tmp_path / "out.tmp"
        write_csv(path, lambda: iter(encoded), **{"name": name, "own": RESULT_FIELDS} | options)
        return path

    return write


def cells(path, name="out.csv"):
    """The rows as the reader of inputs has them."""
    with path.open("rb") as raw:
        table = CsvTable(raw, name, named(name).separator, 1 << 20)
        return [row.values for row, _ in table.rows()]


@pytest.mark.parametrize("name", ["out.csv", "out.tsv"])
def test_texts_come_back(write, name):
    """Quotes, separators, line breaks of all kinds, a byte order mark inside of a cell or name."""
    rows = [{text: text, "index": number, "text": text} for number, text in enumerate(TEXTS)]
    found = cells(write(rows, name), name)
    assert [row["text"] for row in found] == TEXTS
    assert [row[text] for row, text in zip(found, TEXTS, strict=True)] == TEXTS


def test_other_values_are_json(write):
    """Numbers, flags, lists and objects have the bytes that they have in JSONL."""
    values = {"i": 2**70, "f": 1e22, "b": True, "list": ["a,", None], "object": {"k": {"x": 'q"'}}}
    (row,) = cells(write([values | {"index": 0}]))
    assert {name: msgspec.json.decode(row[name]) for name in values} == values


def test_an_empty_text_is_no_null(write):
    """PyArrow tells them apart by the quotes; our own reader, like pandas, has null for both."""
    path = write([{"e": "", "n": None, "index": 0, "text": ""}, {"index": 1, "error": {"code": "c"}}])
    first = b'"e","n","index","text","finish_reason","usage","error"\n'
    assert path.read_bytes() == first + b'"",,"0","",,,\n' + b',,"1",,,,"{""code"":""c""}"\n'
    options = pc.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False)
    table = pc.read_csv(path, convert_options=options)
    assert table["text"].to_pylist() == ["", None]
    assert [row["text"] for row in cells(path)] == [None, None]


def test_columns_without_rows(write):
    """A reader of several outputs finds the same names in each, as far as they are known."""
    assert write([], columns=["id", "day"]).read_bytes().startswith(b'"id","day","index","text"')
    assert write([{"index": 0, "x": 1, "n": {}}, {"index": 1, "y": 1, "token_ids": [3]}]).read_bytes() == (
        b'"x","n","y","index","text","finish_reason","usage","token_ids","error"\n'
        b'"1","{}",,"0",,,,,\n,,"1","1",,,,"[3]",\n'
    )


def test_one_column_for_the_result(write):
    """Names in it are no columns."""
    path = write([{"text": "mine", "r": {"index": 0, "text": "x"}}], own=("r",))
    assert cells(path) == [{"text": "mine", "r": '{"index":0,"text":"x"}'}]


def test_many_rows_and_compression(write):
    """Chunks follow each other under one line of names; the bytes hold no time."""
    rows = [{"index": number, "text": "x" * 100} for number in range(3000)]
    packed = write(rows, "out.csv.gz").read_bytes()
    plain = partial(gzip.decompress, packed)
    assert plain().count(b"\n") == 3001
    assert plain() == write(rows).read_bytes()
    assert packed == write(rows, "out.csv.gz").read_bytes()
