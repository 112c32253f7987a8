"""Parquet schemas: what pandas and datasets note there stays, and they still read the results."""

import json
from importlib.util import find_spec
from itertools import repeat

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.io.parquet import Carried, write_parquet

PANDAS = {
    "index_columns": ["__index_level_0__"],
    "column_indexes": [{"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}],
    "columns": [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": kind, "metadata": None}
        for name, kind in (
            ("prompt", "unicode"),
            ("logprobs", "int64"),
            ("price", "int8"),
            ("__index_level_0__", "int64"),
        )
    ],
    "attributes": {},
    "creator": {"library": "pyarrow", "version": "26.0.1"},
    "pandas_version": "3.0.0",
}
LABELS = {"names": ["bad", "good"], "_type": "ClassLabel"}
HUGGINGFACE = {
    "info": {
        "features": {
            "prompt": {"dtype": "string", "_type": "Value"},
            "logprobs": {"dtype": "int64", "_type": "Value"},
            "price": LABELS,
        }
    },
    "fingerprint": "abc",
}


@pytest.fixture
def write(tmp_path):
    """Writes results of an input of these columns; gives the path."""

    def results(metadata, result_column=None, column_metadata=None):
        table = pa.table(
            {"prompt": ["a", "b"], "logprobs": [1, 2], "price": pa.array([1, 0]), "__index_level_0__": [5, 7]}
        )
        schema = pa.schema([field.with_metadata(column_metadata) for field in table.schema], metadata)
        line = {
            "text": "t",
            "finish_reason": "stop",
            "logprobs": [],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1},
        }
        lines = [{"index": i, **line} for i in range(2)]
        if result_column:
            lines = [{result_column: each} for each in lines]
        kept = [{n: v for n, v in row.items() if result_column or n != "logprobs"} for row in table.to_pylist()]
        path = tmp_path / "out.parquet"
        rows = [json.dumps(each).encode() for each in lines]
        carried = Carried(schema, lambda: zip(kept, repeat(0)))
        write_parquet(path, lambda: iter(rows), carried, result_column=result_column)
        return path

    return results


def notes(path, name):
    return json.loads(pq.read_schema(path).metadata[name])


def test_what_the_schema_notes_is_kept(write):
    """pandas' index came back as a column, and datasets' labels as numbers."""
    path = write({b"pandas": json.dumps(PANDAS), b"huggingface": json.dumps(HUGGINGFACE), b"mine": b"\xff any"}, "out")
    assert pq.read_schema(path).metadata[b"mine"] == b"\xff any"
    assert notes(path, b"pandas") == PANDAS
    assert notes(path, b"huggingface") == HUGGINGFACE


def test_notes_of_columns_that_results_replace_go(write):
    """They would tell readers that a list is a number."""
    path = write({b"pandas": json.dumps(PANDAS), b"huggingface": json.dumps(HUGGINGFACE)})
    assert [each["name"] for each in notes(path, b"pandas")["columns"]] == ["prompt", "price", "__index_level_0__"]
    assert {**notes(path, b"pandas"), "columns": None} == {**PANDAS, "columns": None}
    assert list(notes(path, b"huggingface")["info"]["features"]) == ["prompt", "price"]
    assert notes(path, b"huggingface")["info"]["features"]["price"] == LABELS


@pytest.mark.parametrize("broken", [b"", b"{", b"\xff", b"5", b"[]", b"{}", b'{"columns": 5, "info": 5}', b"[" * 9999])
def test_notes_that_no_library_wrote(write, broken):
    """They must not end the job after its last row."""
    path = write({b"pandas": broken, b"huggingface": broken, b"mine": b"x"})
    assert pq.read_schema(path).metadata[b"mine"] == b"x"
    assert pq.read_table(path).num_rows == 2


def test_notes_of_single_columns_are_kept(write):
    """Units and descriptions that other tools write there."""
    schema = pq.read_schema(write(None, "out", {b"unit": b"kg"}))
    assert schema.field("price").metadata[b"unit"] == b"kg"
    assert schema.metadata is None


@pytest.mark.skipif(find_spec("pandas") is None, reason="pandas is not installed")
@pytest.mark.parametrize("column", [None, "out"])
def test_pandas_reads_results(write, column):
    """With its index, and with columns that its notes do not know."""
    import pandas

    frame = pandas.read_parquet(write({b"pandas": json.dumps(PANDAS)}, column))
    assert list(frame.index) == [5, 7]
    assert column in frame.columns if column else list(frame["text"]) == ["t", "t"]


@pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")
@pytest.mark.parametrize("column", [None, "out"])
def test_datasets_reads_results(write, tmp_path, column):
    """With its features, and with columns that its notes do not know."""
    import datasets

    found = datasets.Dataset.from_parquet(
        str(write({b"huggingface": json.dumps(HUGGINGFACE)}, column)), cache_dir=tmp_path
    )
    assert found.features["price"].names == ["bad", "good"]
    assert found[0][column]["text"] == "t" if column else found[0]["text"] == "t"
