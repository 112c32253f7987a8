"""Rows of an embedding job: what they may ask for, and how their vectors are written."""

from array import array
from base64 import b64decode

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import FlagError, RowError
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.io.columns import Columns
from rosebatch.io.parquet import write_parquet
from rosebatch.io.parse import Record, RowParser
from rosebatch.io.reader import PromptReader
from rosebatch.io.results import PlainShape
from rosebatch.io.rows import Row
from rosebatch.io.table_values import BadValues, TextValues
from rosebatch.io.tasks.embed import Embed
from rosebatch.io.tasks.generate import GENERATE
from tests.helpers.results import assert_failed, make_result


def parse(values, **options):
    return Embed().parse(values, index=3, where="line 4", defaults={}, **options)


def answer_of(vector, **metadata):
    counts = {"prompt_tokens": 5, "completion_tokens": 0, "cached_tokens": 0}
    return make_result(index=3, metadata=metadata, pooled=[array("f", vector)], **counts)


def test_a_row():
    """What an embedding has no use for is the user's own, and stays beside the vector."""
    values = {"prompt": "a", "id": "x", "dimensions": 7, "temperature": "hot", "text": "t"}
    row = parse({**values, "truncate_prompt_tokens": 3})
    assert isinstance(row, Row)
    assert (row.prompt, row.id, row.pooling) == ("a", "x", PoolingParams(dimensions=7))
    assert row.options.truncate_prompt_tokens == 3
    assert row.metadata == {"id": "x", "temperature": "hot", "text": "t"}


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        (TextValues({"text": "t", "usage": "u", "prompt": "a"}), Columns()),
        (BadValues({"text": "t", "usage": "u", "prompt": "a"}, RowError("invalid_value", "no")), Columns()),
        ({"text": "t", "usage": "u", "prompt": "a", "n": 1.0}, Columns()),
        ({"text": "t", "usage": "u", "prompt": "a"}, Columns(prompt="text")),
        (b'{"text":"t","usage":"u","prompt":"a","i":1}', Columns(id="i")),
    ],
)
def test_rows_of_every_kind_carry_the_same(content, columns):
    """Rows of CSV, and those with named columns, lost what only a generation's result has for itself."""
    row = RowParser(False, {}, columns=columns, task=Embed()).parse(Record(0, "row 1", content, 1))
    is_line = isinstance(content, bytes)
    assert (row.metadata["text"], "usage" in row.metadata, "prompt" in row.metadata) == ("t", False, not is_line)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_settings_that_are_not_carried(tmp_path, kind):
    """With --columns a row's dimensions were ignored, and those of CSV were a text, which failed the row."""
    path = tmp_path / f"in.{kind}"
    table = pa.table({"prompt": ["a"], "dimensions": [4.0], "prompt_name": ["query"], "x": ["y"]})
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        csv = "prompt,dimensions,prompt_name,x\na,4,query,y\n"
        path.write_text(csv if kind == "csv" else msgspec.json.encode(table.to_pylist()[0]).decode())
    (row,) = PromptReader(str(path), {}, columns=Columns(carried=("x",)), task=Embed())
    assert (row.pooling, row.metadata) == (PoolingParams(dimensions=4, prompt_name="query"), {"x": "y"})


def test_settings_of_embeddings_are_none_of_a_generation():
    """A field that is neither carried nor asked for would collide with the result's."""
    parser = RowParser(False, {}, "dimensions", Columns(carried=()))
    assert isinstance(parser.parse(Record(0, "line 1", b'{"prompt":"a","dimensions":4}', 1)), Row)


def test_a_chat_is_closed():
    """A template that opened an answer would put its tokens behind those of the document."""
    row = parse({"messages": [{"role": "user", "content": "a"}]})
    assert not row.options.template["add_generation_prompt"]
    # Null failed the row.
    assert parse({"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": None}) == row
    opened = parse({"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": True})
    assert opened.options.template["add_generation_prompt"]


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        ({}, "missing_prompt", "none"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "missing_prompt", "prompt and prompt_token_ids"),
        ({"prompt": ""}, "empty_prompt", "prompt"),
        ({"prompt": "a", "dimensions": 0}, "invalid_dimensions", "dimensions"),
        ({"prompt": "a", "dimensions": "7"}, "invalid_field", "dimensions"),
        ({"prompt": "a", "embedding": [1.0]}, "name_collision", "embedding"),
        ({"prompt": "a", "add_generation_prompt": True}, "invalid_field", "add_generation_prompt"),
    ],
)
def test_refused(values, code, message):
    """A row that cannot be embedded says which field is to blame."""
    assert_failed(parse(values), code, message)


def test_flags_are_for_what_a_row_leaves_open():
    """A flag that won over the row's own field would cut vectors that ask to be longer."""
    parser = RowParser(False, {}, task=Embed(PoolingParams(pooling="mean", dimensions=3)))
    rows = [
        parser.parse(Record(i, "", line, 1))
        for i, line in enumerate([b'{"prompt":"a"}', b'{"prompt":"a","dimensions":9}'])
    ]
    assert [row.pooling for row in rows] == [
        PoolingParams(pooling="mean", dimensions=3),
        PoolingParams(pooling="mean", dimensions=9),
    ]


# Numbers of fp32 that few decimals do not tell apart, the least and the largest among them.
VECTOR = np.array([0.1, 1 / 3, -2e-45, 1e-7, 3.4028235e38, -0.0, 16777217.0], np.float32)


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_vectors_survive_the_text(encoding_format):
    """Numbers with too few digits would be others for whoever reads them as fp32."""
    shape = PlainShape(None, Embed(encoding_format=encoding_format).result)
    line = msgspec.json.decode(msgspec.json.encode(shape.result(answer_of(VECTOR, label=1))))
    found = line.pop("embedding")
    found = np.frombuffer(b64decode(found), "<f4") if encoding_format == "base64" else np.array(found, np.float32)
    assert found.tobytes() == VECTOR.tobytes()
    assert line == {"label": 1, "index": 3, "usage": {"prompt_tokens": 5}}


def test_a_column_of_results():
    """Carried fields may then have any names."""
    shape = PlainShape("found", Embed().result)
    assert shape.result(answer_of([1.0], embedding="own")) == {
        "embedding": "own",
        "found": {"index": 3, "embedding": [1.0], "usage": {"prompt_tokens": 5}},
    }
    assert shape.failure(parse({"prompt": "", "embedding": "own"}, result_column="found")) == {
        "embedding": "own",
        "found": {"index": 3, "error": {"code": "empty_prompt", "message": "line 4: prompt is empty"}},
    }


def test_parquet_holds_lists_of_fp32(tmp_path):
    """Numbers of fp64 take twice the space, and a file of error rows alone must have the same types."""
    shape, path = PlainShape(None, Embed().result), tmp_path / "out.parquet"
    failed = shape.failure(parse({"prompt": ""}))
    for name, rows in {"both": [shape.result(answer_of(VECTOR)), failed], "failed": [failed]}.items():
        path = tmp_path / f"{name}.parquet"
        lines = [msgspec.json.encode(row) for row in rows]
        write_parquet(path, lambda lines=lines: iter(lines), types=Embed().types())
        table = pq.read_table(path)
        assert table.schema.field("embedding").type == pa.list_(pa.float32())
        assert table.column_names == ["index", "embedding", "usage", "error"]
    found = pq.read_table(tmp_path / "both.parquet")["embedding"].to_pylist()
    assert np.array(found[0], np.float32).tobytes() == VECTOR.tobytes()
    assert found[1] is None


def test_names_that_only_one_kind_of_job_takes(tmp_path):
    """A column of earlier answers must not stop an embedding job, nor one of vectors a completion."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a", "text": "b", "embedding": [1.0]}\n')
    for task, taken in ((GENERATE, "text"), (Embed(), "embedding")):
        with pytest.raises(FlagError, match=f"these names too: {taken}\\."):
            PromptReader(str(path), {}, task=task).require_free_names()
