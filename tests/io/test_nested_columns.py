"""Structs and maps of tables are the objects that JSON has: rows mean the same in both."""

import random

import pyarrow as pa
import pytest
from msgspec.structs import replace

from rosebatch.io import table_values
from rosebatch.io.rows import FailedRow
from tests.helpers.json_lines import write_lines
from tests.io.conftest import rows_of

CHAT = [{"role": "user", "content": "hi"}]


def schema_of(name):
    values = {"type": "object", "properties": {name: {"const": 1}}, "required": [name], "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"schema": values}}


def call(arguments):
    function = {"name": "f", "arguments": arguments}
    return [*CHAT, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]


def tool(**properties):
    parameters = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def requests_of(rows):
    """Rows without their places and what they carry."""
    assert not any(isinstance(row, FailedRow) for row in rows), rows
    return [replace(row, where="", metadata={}) for row in rows]


def both(first, second, **common):
    return [{**common, **first}, {**common, **second}]


@pytest.mark.parametrize(
    "rows",
    [
        both({"chat_template_kwargs": {"effort": "low"}}, {"chat_template_kwargs": {"x": 1}}, messages=CHAT),
        both({"response_format": schema_of("a")}, {"response_format": schema_of("b")}, messages=CHAT),
        both({"structured_outputs": {"json": {"const": "x"}}}, {"structured_outputs": {"regex": "b"}}, prompt="a"),
        both({"logit_bias": {"5": 1.5}}, {"logit_bias": {"6": 1.5}}, prompt="a"),
        both({"tools": tool(a={"type": "string"})}, {"tools": tool(b={"type": "integer"})}, messages=CHAT),
        both({"messages": call({"city": "Rome"})}, {"messages": call({"where": {"lat": 1.5}})}),
        both({"messages": CHAT}, {"messages": [{"role": "user", "content": "a", "name": "b"}]}),
        both({"messages": CHAT}, {"messages": [*CHAT, {"role": "assistant", "content": None, "reasoning": "r"}]}),
        both({"messages": [*CHAT, {"role": "assistant"}]}, {"messages": CHAT}),
    ],
    ids=["kwargs", "response_format", "outputs", "bias", "tools", "calls", "names", "no content", "content left out"],
)
def test_keys_of_other_rows(tmp_path, read_table, rows):
    """All rows of a column have one struct. Keys of other rows stood as null in prompts, schemas and arguments."""
    lines = requests_of(rows_of(write_lines(tmp_path / "in.jsonl", rows)))
    assert requests_of(read_table(pa.Table.from_pylist(rows))) == lines


def random_object(numbers, depth):
    """The name of a key says the type of its value, as in a column. One key is always there: Parquet needs one."""
    found = {"s": "x"}
    for name in "tuiolm":
        if numbers.random() < 0.5:
            found[name] = random_value(numbers, name, depth)
    return dict(numbers.sample(list(found.items()), len(found)))


def random_value(numbers, name, depth):
    if name in "tu" or not depth:
        return "text" if name in "tus" else {"s": "y"} if name == "o" else [] if name in "lm" else 7
    if name == "i":
        return numbers.randrange(2**40)
    if name == "o":
        return random_object(numbers, depth - 1)
    return [random_object(numbers, depth - 1) if name == "l" else "z" for _ in range(numbers.randrange(3))]


@pytest.mark.thorough
def test_random_files(tmp_path, read_table):
    """The same rows as JSONL and as Parquet are the same requests, whatever lies in whatever."""
    numbers = random.Random(0)
    for _ in range(60):
        rows = [
            {"messages": call(random_object(numbers, 3)), "chat_template_kwargs": random_object(numbers, 2)}
            | {"tools": tool(p=random_object(numbers, 2)), "top_k": numbers.choice([None, 5])}
            for _ in range(numbers.randrange(1, 6))
        ]
        lines = requests_of(rows_of(write_lines(tmp_path / "in.jsonl", rows)))
        assert requests_of(read_table(pa.Table.from_pylist(rows))) == lines


def test_maps_are_objects(read_table):
    """Spark and DuckDB write maps. They were lists of pairs, which no field takes. Keys are texts, as in JSON."""
    message = pa.map_(pa.string(), pa.string())
    table = {
        "messages": pa.array([[{"role": "user", "content": "hi"}]], pa.list_(message)),
        "logit_bias": pa.array([{5: 1.5}], pa.map_(pa.int32(), pa.float32())),
        "chat_template_kwargs": pa.array([{"effort": "low", "empty": None}], message),
        "carried": pa.array([{"a": [{"b": None}]}], pa.map_(pa.string(), pa.list_(message))),
    }
    (row,) = read_table(pa.table(table))
    assert row.messages == CHAT
    assert row.sampling.logit_bias == ((5, 1.5),)
    assert row.options.chat_template_kwargs == {"effort": "low", "empty": None}
    assert row.metadata["carried"] == {"a": [{"b": None}]}


def test_a_map_with_one_key_twice(read_table):
    """An object has each key once: the row fails, and no other."""
    twice = pa.array([[("a", "b"), ("a", "c")], [("a", "b")]], pa.map_(pa.string(), pa.string()))
    bad, good = read_table(pa.table({"prompt": ["x", "y"], "log": twice}))
    assert (bad.error.code, good.metadata["log"]) == ("invalid_value", {"a": "b"})
    assert "column log has a value that cannot be read (a map has one key twice)" in bad.error.message


@pytest.mark.parametrize(("kind", "key"), [(pa.list_(pa.int64()), [1]), (pa.struct([("a", pa.int64())]), {"a": 1})])
def test_a_map_whose_keys_are_no_values_of_a_row(read_table, kind, key):
    """Python has no such object, and the error of it ended the job."""
    bad, good = read_table(
        pa.table({"prompt": ["x", "y"], "log": pa.array([[(key, 1)], None], pa.map_(kind, pa.int64()))})
    )
    assert (bad.error.code, good.metadata["log"]) == ("invalid_value", None)
    assert "(a map has a key that is a list or an object)" in bad.error.message


@pytest.mark.parametrize("also", [pa.int64(), pa.time64("ns"), pa.map_(pa.string(), pa.null())])
def test_a_key_that_is_null_in_all_rows(also):
    """PyArrow's cast of such a column ended the process: of an Arrow file from the 257th row on."""
    inner = pa.struct([("a", pa.int64()), ("null", pa.null())])
    kind = pa.struct([("inner", inner), ("null", pa.null()), ("list", pa.list_(inner)), ("also", also)])
    values = [{"inner": {"a": n}, "list": [{"a": n}, None]} for n in range(4)]
    batch = pa.record_batch({"c": pa.array(values, kind), "n": pa.nulls(4)})
    assert list(table_values.rows_of(batch.slice(2))) == [{"c": value, "n": None} for value in values[2:]]


def test_nulls_of_lists_stay(read_table):
    """A place in a list is no key."""
    kind = pa.list_(pa.struct([("a", pa.int64())]))
    (row,) = read_table(pa.table({"prompt": ["x"], "log": pa.array([[None, {"a": None}, {"a": 1}]], kind)}))
    assert row.metadata["log"] == [None, {}, {"a": 1}]


@pytest.mark.parametrize("kind", ["plain", "dictionary", "run"])
def test_a_null_that_no_count_shows_is_no_key(kind):
    """Structs without nulls are taken as they are. The count of a slice, or of a null in a dictionary, may be 0."""
    name = pa.array(["a", None])
    if kind == "dictionary":
        name = pa.DictionaryArray.from_arrays(pa.array([0, 1]), name)
    elif kind == "run":
        name = pa.RunEndEncodedArray.from_arrays(pa.array([1, 2], pa.int32()), name)
    column = pa.ListArray.from_arrays([0, 1, 2], pa.StructArray.from_arrays([name], ["name"]))
    batch = pa.record_batch([column], ["messages"])
    assert [row["messages"] for row in table_values.rows_of(batch)] == [[{"name": "a"}], [{}]]
    assert [row["messages"] for row in table_values.rows_of(batch.slice(1))] == [[{}]]
