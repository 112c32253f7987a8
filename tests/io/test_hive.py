"""Folders whose names hold a key and its value: the key is a column of their rows."""

import csv
import json
import os

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import FlagError, UserError
from rosebatch.io.columns import Columns
from rosebatch.io.find_files import find_files, would_find
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow

FOLDERS = ["year=2024/day=01", "year=2025/day=a%20b%2F", "year=__HIVE_DEFAULT_PARTITION__/day=2", "k=-5/day=é"]


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    return str(tmp_path / "in") if request.param == "local" else f"memory://{tmp_path.name}"


def write(root, name, content):
    with fsspec.open(f"{root}/{name}", "wb", auto_mkdir=True) as file:
        if isinstance(content, dict):
            pq.write_table(pa.table(content), file)
        else:
            file.write(content)


@pytest.mark.parametrize("source", ["", "/**/*.parquet"])
def test_keys_are_columns_as_pyarrow_reads_them(tmp_path, root, source):
    """A folder was refused, and a pattern lost the keys. Types, nulls and escaped characters are PyArrow's."""
    for number, folder in enumerate(FOLDERS):
        write(root, f"{folder}/a.parquet", {"prompt": [f"p{number}"]})
        write(tmp_path / "oracle", f"{folder}/a.parquet", {"prompt": [f"p{number}"]})
    write(root, "year=2024/_SUCCESS", b"")
    write(root, "year=2024/day=01/.a.parquet.crc", b"crc")
    expected = ds.dataset(tmp_path / "oracle", partitioning="hive").to_table()
    reader = PromptReader(root + source, {})
    rows = sorted((row.metadata for row in reader), key=lambda row: row["prompt"])
    names = ["prompt", "year", "day", "k"]
    assert rows == expected.select(names).sort_by("prompt").to_pylist()
    assert {field.name: field.type for field in reader.schema} == {n: expected.schema.field(n).type for n in names}
    assert not any(isinstance(row, FailedRow) for row in reader)


def test_a_key_that_the_source_names(root):
    """Whoever names one folder or pattern knows its key; what the pattern leaves open is a column."""
    write(root, "year=2024/day=1/a.parquet", {"prompt": ["a"]})
    for source in (f"{root}/year=2024", f"{root}/year=2024/*/*.parquet"):
        assert [row.metadata for row in PromptReader(source, {})] == [{"prompt": "a", "day": 1}]


def test_keys_of_other_formats(tmp_path):
    """Lines, arrays and CSV carry them too. What a row has itself wins; a broken line stays an error of its own."""
    write(tmp_path, "day=1/a.jsonl", b'{"prompt": "a", "id": 1}\n{"prompt": "b", "day": "own"}\n{}\n[1]\nbad\n')
    write(tmp_path, "day=2/b.json", b'[{"prompt": "c"}]')
    write(tmp_path, "day=3/c.csv", b"prompt,x\nd,1\n")
    write(tmp_path, "d.csv", b"prompt,x\ne\n")
    rows = list(PromptReader(str(tmp_path), {}))
    assert [row.metadata for row in rows] == [
        {"prompt": "e", "day": None},
        {"day": 1, "id": 1},
        {"day": "own"},
        {"day": 1},
        {},
        {},
        {"day": 2},
        {"prompt": "d", "x": "1", "day": 3},
    ]
    codes = [row.error.code for row in rows if isinstance(row, FailedRow)]
    assert codes == ["invalid_value", "missing_prompt", "invalid_line", "invalid_json"]


SETTINGS = {
    "temperature": "0.7",
    "max_tokens": "16",
    "top_p": "1",
    "ignore_eos": "True",
    "stop": '["a","b"]',
    "suffix": "7",
}


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_keys_that_are_settings(tmp_path, form):
    """``temperature=0.7`` was a text, which failed each row, and ``suffix=7`` a number: names are read as cells are."""
    folder = "/".join(f"{name}={value}" for name, value in SETTINGS.items())
    text = {"csv": b"prompt,n\np,1\n", "jsonl": b'{"prompt":"p","n":1}\n'}
    write(tmp_path, f"in/{folder}/a.{form}", text.get(form, {"prompt": ["p"], "n": [1]}))
    with (tmp_path / "cells.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "n", *SETTINGS], ["p", 1, *SETTINGS.values()]])
    (row,), (cells,) = (list(PromptReader(str(tmp_path / name), {})) for name in ("in", "cells.csv"))
    assert (row.sampling, row.options) == (cells.sampling, cells.options)
    assert (row.sampling.temperature, row.sampling.max_tokens, row.options.suffix) == (0.7, 16, "7")


def test_keys_of_several_kinds(tmp_path):
    """One type for the column of all files; what is no number stays a text, and fails its rows by name."""
    for name, value in {"a": "0.5", "b": "1", "c": "hot"}.items():
        write(tmp_path, f"in/temperature={value}/{name}.jsonl", b'{"prompt":"p"}\n')
    first, *others = (FailedRow, FailedRow, FailedRow)
    rows = list(PromptReader(str(tmp_path / "in"), {}))
    assert [type(row) for row in rows] == [first, *others]
    assert all("temperature" in row.error.message for row in rows)
    rows = list(PromptReader(str(tmp_path / "in" / "*" / "[ab].jsonl"), {}))
    assert [row.sampling.temperature for row in rows] == [0.5, 1.0]


def test_a_column_in_the_files_wins(tmp_path):
    """Some writers keep it there too."""
    write(tmp_path, "day=1/a.parquet", {"prompt": ["a"], "day": ["Monday"]})
    reader = PromptReader(str(tmp_path), {})
    assert [row.metadata for row in reader] == [{"prompt": "a", "day": "Monday"}]
    assert reader.schema.field("day").type == pa.string()


def test_keys_are_columns_for_flags(tmp_path):
    """They can be chosen, and their names may not be those of results."""
    write(tmp_path, "text=1/a.parquet", {"prompt": ["a"], "x": [1]})
    (row,) = PromptReader(str(tmp_path), {}, result_column="r", columns=Columns.of(None, None, "text"))
    assert row.metadata == {"text": 1}
    with pytest.raises(FlagError, match=r"results have fields of these names too: text\."):
        PromptReader(str(tmp_path), {}).require_free_names()


def test_an_openai_batch_has_no_columns(tmp_path):
    """Its requests would have an unknown field."""
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
    write(tmp_path, "day=1/a.jsonl", json.dumps(request).encode())
    reader = PromptReader(str(tmp_path), {})
    assert reader.is_batch and [row.prompt for row in reader] == ["x"]


def test_a_folder_without_a_key_among_those_with_keys(root):
    """Its rows would be missing."""
    write(root, "day=1/a.jsonl", b"{}\n")
    write(root, "day=1/more/b.jsonl", b"{}\n")
    with pytest.raises(UserError, match=r"day=1: more/ would not be read"):
        find_files(root)


@pytest.mark.parametrize("folder", ["day=%FF", "%FF=1", os.fsdecode(b"day=\xff")])
def test_names_that_are_not_utf8(tmp_path, folder):
    """They ended in an unexpected error, or in one that blamed a file for its folder."""
    write(tmp_path, f"{folder}/a.jsonl", b"{}\n")
    with pytest.raises(UserError, match="the name of this folder is not UTF-8; rename it"):
        PromptReader(str(tmp_path), {}).count()


def test_outputs_in_folders_with_keys(root):
    """A report in such a folder would be rows of the next run."""
    write(root, "day=1/a.jsonl", b"{}\n")
    found = [would_find(root, f"{root}/{folder}/r.json") for folder in ("day=1", "day=1/x=2", "logs")]
    assert found == [True, True, False]
