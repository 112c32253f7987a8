"""A large row takes little more than its bytes while it waits, and its result has the bytes of a small row's."""

import json

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.token_ids import TokenIds
from rosebatch.io import parse
from rosebatch.io.columns import Columns
from rosebatch.io.large_rows import compact
from rosebatch.io.parquet import Carried, write_parquet
from rosebatch.io.reader import PromptReader
from rosebatch.io.results import PlainShape
from rosebatch.io.tasks.registry import TASKS
from rosebatch.job.memory_estimate import row_bytes

CARRIED = {"list": [1.5, 2**70, "é", None], "object": {"a": {"b": []}}, "text": "x,[", "top_K": [1]}
LINES = [
    {"prompt": "a", **CARRIED},
    {"messages": [{"role": "user", "content": "a"}], "sampling_params": {"max_tokens": 3}, **CARRIED},
    {"prompt_token_ids": [7] * 300, "stop_token_ids": [1, 2], "logit_bias": {"5": 1}, **CARRIED},
    {"prompt": "", **CARRIED},
    {"prompt": "a", "logprobs": [{"token": "a"}], **CARRIED},
    {"prompt": "a", "images": ["b"], **CARRIED},
    {"prompt": "a", **CARRIED, **{f"f{number}": [1.0] for number in range(2000)}},
]


def told(path, monkeypatch, limit, **options):
    """What becomes of each row: its fields, and its line as an error row's."""
    monkeypatch.setattr(parse, "LARGE_ROW", limit)
    rows = []
    for row in PromptReader(str(path), {}, **options):
        error = getattr(row, "error", None) or ValueError("none")
        failed = row if hasattr(row, "error") else row.failed(parse.RowError("x", "y"))
        own = {
            name: getattr(row, name, None) for name in ("index", "where", "prompt", "messages", "sampling", "unclear")
        }
        rows.append((own, str(error), msgspec.json.encode(PlainShape().failure(failed), enc_hook=str)))
    return rows


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize("result_column", [None, "answer"])
@pytest.mark.parametrize("small", [0, 64])
@pytest.mark.parametrize("columns", [None, Columns(prompt="text"), Columns(carried=("list", "object"))])
def test_results_are_those_of_small_rows(tmp_path, monkeypatch, task, result_column, columns, small):
    """How large a row is changes no byte of its result, whatever it carries."""
    monkeypatch.setattr(parse, "_SMALL_FIELD", small)
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    options = {"task": task, "result_column": result_column, "columns": columns}
    assert told(path, monkeypatch, 10, **options) == told(path, monkeypatch, 1 << 20, **options)


@pytest.mark.parametrize(
    "line",
    [
        *(b'{"prompt": "a", "x": ["\xff"]}', b'{"prompt": "a", "x": [1e999]}', b'{"prompt": "a", "x": [1,}', b"[1, 2]"),
        *(b'{"prompt": "a", "x": %s}' % (b"[" * n + b"]" * n) for n in (599, 600, 5000)),
        b'{"prompt": "a", "x": %s}' % (b'{"a":' * 600 + b"1" + b"}" * 600),
    ],
)
def test_errors_are_those_of_small_rows(tmp_path, monkeypatch, line):
    """With the place in the line, and what can be done."""
    monkeypatch.setattr(parse, "_SMALL_FIELD", 0)
    path = tmp_path / "in.jsonl"
    path.write_bytes(line)
    assert told(path, monkeypatch, 10) == told(path, monkeypatch, 1 << 20)


def test_tables(tmp_path, monkeypatch):
    """Of columns, values may be of types that JSON has not."""
    table = pa.table(
        {"prompt": ["a", "b"], "day": pa.array([1, 2], pa.date32()), "x": [[1.5, None], []], "y": [{"a": b"c"}] * 2}
    )
    pq.write_table(table, tmp_path / "in.parquet")
    assert told(tmp_path / "in.parquet", monkeypatch, 1) == told(tmp_path / "in.parquet", monkeypatch, 1 << 20)


def test_columns_of_tables_keep_their_types(tmp_path, monkeypatch):
    """A job from Parquet to Parquet or Arrow ended after its last row if a large row had a list: it was JSON."""
    columns = {"day": pa.array([1, 2], pa.date32()), "x": [[1.5, None], []], "y": [{"a": b"c"}, {"a": None}]}
    table = pa.table({"prompt": ["a", ""], **columns})
    pq.write_table(table, tmp_path / "in.parquet")
    monkeypatch.setattr(parse, "LARGE_ROW", 1)
    reader = PromptReader(str(tmp_path / "in.parquet"), {})
    names = reader.schema.names
    writing = Carried(reader.schema, reader.carried)
    results = [b'{"index":0}', b'{"index":1}']
    for name, writer in (("out.parquet", pq.ParquetWriter), ("out.arrow", pa.ipc.new_file)):
        write_parquet(tmp_path / name, lambda: iter(results), writing, writer=writer)
    found = [pq.read_table(tmp_path / "out.parquet"), pa.ipc.open_file(tmp_path / "out.arrow").read_all()]
    assert [each.select(names).to_pydict() for each in found] == [table.select(names).to_pydict()] * 2


def test_a_row_that_waits(tmp_path):
    """Two rows of 30 MB that waited for a third took 300 MiB: 32 bytes for a number of six characters, 48 for an id."""
    path = tmp_path / "in.jsonl"
    row = {"prompt_token_ids": [70_000] * 200_000, "x": [0.125] * 200_000}
    path.write_text(json.dumps(row))
    (found,) = PromptReader(str(path), {})
    assert found.metadata == {"x": msgspec.Raw(msgspec.json.encode(row["x"]))}
    assert isinstance(found.prompt_token_ids, TokenIds)
    assert found.prompt_token_ids.tolist() == row["prompt_token_ids"]
    # Of ids also what they will take in the engine.
    assert 200_000 * (6 + 4 + 32) <= row_bytes(found) < 200_000 * (6 + 4 + 32) + 5000


def test_ids_of_no_model_stay(tmp_path):
    """The engine refuses them with their number."""
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps({"prompt_token_ids": [2**40]}))
    (found,) = PromptReader(str(path), {})
    assert compact(found).prompt_token_ids == (2**40,)


def test_memory_is_given_back(tmp_path, monkeypatch):
    """The C library kept 90 MiB of rows that were gone, in holes between those that waited."""
    calls = []
    monkeypatch.setattr(parse, "give_back", lambda: calls.append(1))
    monkeypatch.setattr(parse, "_GIVEN_BACK_BYTES", 5 << 20)
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"prompt": "a", "x": "y" * 2_000_000}), *[json.dumps({"prompt": "a"})] * 5]
    path.write_text("\n".join(lines * 6))
    assert len(list(PromptReader(str(path), {}))) == 36
    assert len(calls) == 2
