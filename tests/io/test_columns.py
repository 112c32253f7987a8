"""Columns of other names than a row's own fields, and integers that pandas made floats of."""

import datetime
import json
import math
import uuid
from decimal import Decimal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import FlagError
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.io.columns import Columns
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow


@pytest.fixture(params=["jsonl", "parquet"])
def write(request, tmp_path):
    def write(rows):
        path = tmp_path / f"in.{request.param}"
        if request.param == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
        return path

    return write


def read(path, **names):
    reader = PromptReader(str(path), {}, columns=Columns.of(names.get("prompt"), names.get("id"), names.get("columns")))
    reader.require_free_names()
    return list(reader)


def test_a_prompt_column(write):
    """A text is a prompt; what is called prompt counts for nothing then."""
    rows = read(write([{"question": "q", "prompt": "template", "max_tokens": 3}]), prompt="question")
    assert (rows[0].prompt, rows[0].messages, rows[0].sampling.max_tokens) == ("q", None, 3)


@pytest.mark.parametrize(
    ("value", "field"),
    [([{"role": "user", "content": "hi"}], "messages"), ([1, 2], "prompt_token_ids"), ("hi", "prompt")],
)
def test_what_a_prompt_column_holds(write, value, field):
    """Its values tell what it is."""
    (row,) = read(write([{"x": value}]), prompt="x")
    assert getattr(row, field) == ((1, 2) if field == "prompt_token_ids" else value)


def test_rows_without_the_prompt_column(write):
    """The row fails by itself, with the name that was asked for."""
    rows = read(write([{"q": "a", "n": 1}, {"q": None, "n": 1}, {"q": "", "n": 1}]), prompt="q")
    assert [row.error.code for row in rows if isinstance(row, FailedRow)] == ["missing_prompt", "empty_prompt"]
    assert "q, which --prompt-column names" in rows[1].error.message


def test_an_id_column(write):
    """It is unique, as ids are, and results carry it under its own name."""
    rows = read(write([{"uuid": "x", "prompt": "a", "id": 1}, {"uuid": "x", "prompt": "b", "id": 2}]), id="uuid")
    assert (rows[0].id, rows[0].metadata["uuid"], rows[0].metadata["id"]) == ("x", "x", 1)
    assert rows[1].error.code == "duplicate_id"
    assert "'x'" in rows[1].error.message


def test_carried_columns(write):
    """Those that were named, known fields too, and no others; settings count all the same."""
    rows = read(write([{"prompt": "a", "max_tokens": 7, "x": 1, "y": 2}]), columns="y,prompt")
    assert (dict(rows[0].metadata), rows[0].sampling.max_tokens) == ({"y": 2, "prompt": "a"}, 7)


def test_no_carried_columns(write):
    """An empty list of names is none, not all."""
    rows = read(write([{"prompt": "a", "id": 1, "x": 1}]), columns="")
    assert (rows[0].prompt, rows[0].id, dict(rows[0].metadata)) == ("a", 1, {})


def test_names_of_results_that_are_not_carried(write):
    """A data set with a column ``text`` was refused, though nobody wanted it in the results."""
    path = write([{"text": "a", "usage": 1, "x": 2}])
    with pytest.raises(FlagError, match=r"results have fields of these names too: .*usage"):
        read(path, prompt="text")
    (row,) = read(path, prompt="text", columns="x")
    assert (row.prompt, dict(row.metadata)) == ("a", {"x": 2})


@pytest.mark.parametrize("names", [{"prompt": "no"}, {"id": "no"}, {"columns": "prompt,no"}])
def test_a_column_that_is_not_there(tmp_path, names):
    """Of a table this is known before anything runs."""
    pq.write_table(pa.table({"prompt": ["a"], "x": [1]}), tmp_path / "in.parquet")
    with pytest.raises(FlagError, match=r"no: .*in\.parquet has no such column, but prompt, x$"):
        read(tmp_path / "in.parquet", **names)


@pytest.mark.parametrize("names", [("", None, None), (None, "", None), (None, None, "a,,b")])
def test_names_that_are_empty(names):
    """A variable of a shell that is not set."""
    with pytest.raises(FlagError, match="needs"):
        Columns.of(*names)


def test_only_wanted_columns_are_read(tmp_path, monkeypatch):
    """All columns of a Parquet file were, however large. A name with a dot is no path into another column."""
    table = pa.table({"prompt": ["a"], "x": [{"y": 1, "z": 2}], "x.y": [3], "large": ["l"]})
    pq.write_table(table, tmp_path / "in.parquet")
    asked, own = [], pq.ParquetFile.iter_batches

    def iter_batches(file, *args, columns, **options):
        asked.append(columns)
        return own(file, *args, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    for carried, values in (("x.y", {"x.y": 3}), ("x", {"x": {"y": 1, "z": 2}})):
        assert read(tmp_path / "in.parquet", columns=carried)[0].metadata == values
    assert asked == [["prompt", "x.y"], ["prompt", "x"]]


def test_only_wanted_columns_are_decoded(tmp_path):
    """A year that Python has no date for failed rows that did not carry it."""
    when = pa.array([2**40], pa.timestamp("s"))
    pq.write_table(pa.table({"prompt": ["a"], "when": when}), tmp_path / "in.parquet")
    assert isinstance(read(tmp_path / "in.parquet")[0], FailedRow)
    assert read(tmp_path / "in.parquet", columns="prompt")[0].prompt == "a"


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("max_reasoning_tokens", "max_reasoning_tokens"),
        ("max_completion_tokens", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("min_new_tokens", "min_tokens"),
        ("num_return_sequences", "n"),
    ],
)
def test_integers_of_other_names_that_pandas_made_floats(tmp_path, name, field):
    """NaN was an error in them."""
    pq.write_table(pa.table({"prompt": ["a", "b"], name: [math.nan, 4.0]}), tmp_path / "in.parquet")
    none, four = read(tmp_path / "in.parquet")
    assert getattr(none.sampling, field) == getattr(SamplingParams(), field)
    assert getattr(four.sampling, field) == 4


def test_integers_that_pandas_made_floats(tmp_path):
    """A column of integers with a gap is one of floats in pandas: 4.0 failed, and so did NaN."""
    table = pa.table(
        {
            "prompt": ["a", "b", "c"],
            "max_tokens": pa.array([4.0, math.nan, 4.5]),
            "top_k": pa.array([None, 2.0, 1.0]),
            "id": pa.array([1.0, 2.0, 1.0]),
            "x": [4.0, 5.0, 6.0],
        }
    )
    pq.write_table(table, tmp_path / "in.parquet")
    one, two, three = read(tmp_path / "in.parquet")
    assert (one.sampling.max_tokens, one.id, one.metadata["x"]) == (4, 1, 4.0)
    assert (two.sampling.max_tokens, two.sampling.top_k) == (512, 2)
    assert (three.error.code, three.metadata["max_tokens"]) == ("invalid_field", 4.5)
    assert type(one.metadata["max_tokens"]) is float


DAY = datetime.date(2024, 1, 2)


@pytest.mark.parametrize("id_column", [None, "key"])
@pytest.mark.parametrize(
    ("values", "ids"),
    [
        (pa.array([Decimal(7), Decimal(10**37)], pa.decimal128(38, 0)), ["7", str(10**37)]),
        (pa.array([DAY, None]), ["2024-01-02", None]),
        (pa.array([datetime.datetime(2024, 1, 2, 3)] * 2), ["2024-01-02T03:00:00", None]),
        (pa.array([datetime.time(3, 4), datetime.time(5)]), ["03:04:00", "05:00:00"]),
        (pa.array([uuid.UUID(int=1).bytes, None], pa.uuid()), [str(uuid.UUID(int=1)), None]),
        (pa.array([b"ab", b"c"]), ["YWI=", "Yw=="]),
    ],
    ids=["decimal", "date", "timestamp", "time", "uuid", "binary"],
)
def test_ids_that_json_has_no_type_for(tmp_path, id_column, values, ids):
    """Every row of such a table failed, though its results hold the same ids as texts. Seeds depend on the ids."""
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], id_column or "id": values}), path)
    rows = read(path, id=id_column)
    assert [getattr(row, "id", None) for row in rows] == ids
    assert [row.metadata[id_column or "id"] for row in rows] == values.to_pylist()
    line = msgspec.json.encode(rows[0].metadata)
    assert json.loads(line)[id_column or "id"] == ids[0], "as in the result"
    assert [row.error.code for row in rows if isinstance(row, FailedRow)] == ["duplicate_id"] * (len(set(values)) == 1)


def test_an_id_that_is_no_scalar(tmp_path):
    """It is no id: the row's error names it, whatever else the row has."""
    pq.write_table(pa.table({"prompt": ["a"], "id": [[1]], "seed": [Decimal(2)]}), tmp_path / "in.parquet")
    (row,) = read(tmp_path / "in.parquet")
    assert row.error.message == "Expected `int | str | null`, got `array` - at `id`"


def test_settings_that_are_decimals(tmp_path):
    """Databases have no floats for them, nor unsigned integers. Every row of such a table failed."""
    columns = {"temperature": Decimal("0.5"), "max_tokens": Decimal(7), "seed": Decimal(2**64 - 1), "n": None}
    nested = {"top_p": Decimal("0.25"), "stop_token_ids": [Decimal(3)]}
    pq.write_table(
        pa.table({"prompt": ["a"], **{k: [v] for k, v in columns.items()}, "sampling_params": [nested]}),
        tmp_path / "in.parquet",
    )
    (row,) = read(tmp_path / "in.parquet")
    expected = {"temperature": 0.5, "max_tokens": 7, "seed": 2**64 - 1, "top_p": 0.25, "stop_token_ids": (3,)}
    assert row.sampling == SamplingParams(**expected)
    assert row.metadata["temperature"] == Decimal("0.5")


def test_a_setting_that_is_a_large_decimal(tmp_path):
    """Past 28 digits, the row failed as unexpected. In JSON lines, the number is served."""
    table = pa.table({"prompt": ["a"], "max_tokens": pa.array([Decimal(10**37)], pa.decimal128(38, 0))})
    pq.write_table(table, tmp_path / "in.parquet")
    (tmp_path / "in.jsonl").write_text(f'{{"prompt":"a","max_tokens":{10**37}}}')
    assert [read(tmp_path / name)[0].sampling for name in ("in.parquet", "in.jsonl")] == [
        SamplingParams(max_tokens=10**37)
    ] * 2


def absent_of(tmp_path, text, name="in.jsonl", **names):
    (tmp_path / name).write_text(text)
    columns = Columns.of(None, names.get("id"), names["columns"])
    return PromptReader(str(tmp_path / name), {}, columns=columns).require_free_names()


def test_columns_that_no_line_has(tmp_path):
    """They were dropped without a word. A broken line has none, and one that some line has is there."""
    rows = '{"prompt": "a"}\n{\n{"prompt": "b", "x": 1}\n'
    assert absent_of(tmp_path, rows, columns="x,zz", id="yy") == ["yy", "zz"]
    assert absent_of(tmp_path, rows, columns="x,prompt") == []
    assert absent_of(tmp_path, "", columns="zz") == [], "no row lacks it"
    assert absent_of(tmp_path, '[{"prompt": "a"}]', "in.json", columns="zz") == ["zz"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "has none of the columns prompt, messages, prompt_token_ids, but a, b: --prompt-column NAME says which"),
        ({"prompt": "q"}, "--prompt-column q: .* has no such column, but a, b"),
        ({"template": "{q}"}, "--prompt-template: .* has no column q, but a, b"),
    ],
)
def test_no_row_of_lines_has_a_prompt(tmp_path, columns, message):
    """The model was loaded, and each row failed. Of a table, that was an error before the run."""
    names = {"carried": None, "prompt": None, "id": None} | columns
    path = tmp_path / "in.jsonl"
    path.write_text('{"a":1}\n[1]\n\n{"b":2,"a":null}\nnone\n')
    with pytest.raises(FlagError, match=message):
        PromptReader(str(path), {}, columns=Columns.of(**names)).require_free_names()
    with path.open("a") as file:
        file.write('{"q":null,"prompt":null}\n')
    PromptReader(str(path), {}, columns=Columns.of(**names)).require_free_names()
    # What cannot be read fails by itself.
    path.write_text('{"a"\n[1]\n')
    PromptReader(str(path), {}, columns=Columns.of(**names)).require_free_names()


def test_a_file_of_lines_is_read_once_for_names_and_count(tmp_path, monkeypatch):
    """Its rows were counted in a pass of their own, and it was opened again to see whether it is empty."""
    (tmp_path / "1.jsonl").write_text('{"prompt":"a"}\n\n{"prompt":"b"}\n')
    (tmp_path / "2.jsonl").write_text("\n")
    reader = PromptReader(str(tmp_path), {})
    reader.require_free_names()
    monkeypatch.setattr("rosebatch.io.input_files.InputFiles.open", None)
    assert (reader.count(), reader.is_empty) == (2, False)
