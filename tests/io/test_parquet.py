"""Results as Parquet, in one file or many: one type for each column, and no value of the input changed."""

import json
from decimal import Decimal
from itertools import repeat

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import dataset

from rosebatch.io.parquet import Carried, write_parquet, write_parquet_parts
from rosebatch.io.reader import PromptReader
from rosebatch.io.result_names import RESULT_FIELDS

USAGE = pa.struct([(name, pa.int64()) for name in ("prompt_tokens", "completion_tokens")])
RESULTS = [
    ("index", pa.int64()),
    ("text", pa.string()),
    ("finish_reason", pa.string()),
    ("usage", USAGE),
    ("error", pa.struct([("code", pa.string()), ("message", pa.string())])),
]

LOGPROB = [("token", pa.string()), ("token_id", pa.int64()), ("logprob", pa.float64())]
LOGPROBS = pa.list_(pa.struct([*LOGPROB, ("top_logprobs", pa.list_(pa.struct(LOGPROB)))]))
FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
CALLS = pa.list_(pa.struct([("id", pa.string()), ("type", pa.string()), ("function", FUNCTION)]))
CHOICE = [
    ("index", pa.int64()),
    ("text", pa.string()),
    ("reasoning_content", pa.string()),
    ("tool_calls", CALLS),
    ("finish_reason", pa.string()),
    ("token_ids", pa.list_(pa.int64())),
    ("logprobs", LOGPROBS),
]
TYPES = {
    "token_ids": pa.list_(pa.int64()),
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
    "choices": pa.list_(pa.struct(CHOICE)),
}
ONE = {"token": "a", "token_id": 5, "logprob": -0.1}
FIRST = {"token": "b", "token_id": 6, "logprob": None, "top_logprobs": []}
OPTIONAL = {
    "token_ids": [5, 6, 7],
    "logprobs": [ONE | {"top_logprobs": [ONE, ONE | {"token_id": 7, "logprob": -2.5}]}],
    "prompt_logprobs": [FIRST, ONE | {"top_logprobs": [ONE]}, FIRST],
    "choices": [
        {"index": 0, "text": "x", "finish_reason": "stop"},
        {"index": 1, "text": None, "finish_reason": "length", "token_ids": [5], "logprobs": [FIRST]},
    ],
}


def columns(table):
    """Name and type of each column."""
    return [(field.name, field.type) for field in table.schema]


def as_read(name, value):
    """A value of ``OPTIONAL`` as Parquet gives it back: every choice has every field."""
    rest = dict.fromkeys(("token_ids", "logprobs", "reasoning_content", "tool_calls"))
    return [rest | each for each in value] if name == "choices" else value


def nested(depth):
    return json.loads("[" * depth + "]" * depth)


def test_parquet_result_columns(write_table):
    """Types must not depend on failed rows, or two runs' files cannot be read as one table."""
    good = write_table([{}, {}])
    mixed = write_table([{}, {}], errors=(1,))
    assert columns(good) == columns(mixed) == columns(write_table([])) == RESULTS
    usage, error = {"prompt_tokens": 2, "completion_tokens": 3}, {"code": "some_code", "message": "line 1: no"}
    assert mixed.to_pylist() == [
        {"index": 0, "text": "t", "finish_reason": "stop", "usage": usage, "error": None},
        {"index": 1, "text": None, "finish_reason": None, "usage": None, "error": error},
    ]


@pytest.mark.parametrize("name", ["token_ids", "logprobs", "prompt_logprobs", "choices"])
@pytest.mark.parametrize("schema", [None, pa.schema([("a", pa.int64())])], ids=["from-json", "from-parquet"])
def test_optional_columns(write_table, name, schema):
    """A column exists if any row has it, even the last of many; its type does not depend on the values."""
    value = OPTIONAL[name]
    carried = [{"a": 1}] * 1025
    assert columns(write_table(carried, columns=schema)) == [("a", pa.int64()), *RESULTS]
    for last in (value, value[-1:], []):
        table = write_table(carried, columns=schema, extra={1024: {name: last}})
        assert columns(table) == [("a", pa.int64()), *RESULTS[:4], (name, TYPES[name]), RESULTS[4]]
        assert table.column(name).to_pylist() == [None] * 1024 + [as_read(name, last)]


def test_the_order_of_optional_columns(write_table):
    """It must not depend on which row comes first."""
    table = write_table([{}, {}], extra={0: {"choices": []}, 1: {name: [] for name in list(OPTIONAL)[:3]}})
    assert table.column_names == ["index", "text", "finish_reason", "usage", *OPTIONAL, "error"]


def test_a_row_of_choices_alone(tmp_path, encode):
    """A row with several completions has no text or finish_reason of its own."""
    rows = [{"index": 0, "text": "t", "finish_reason": "stop"}, {"index": 1, "choices": OPTIONAL["choices"]}]
    write_parquet(tmp_path / "out.parquet", encode(rows))
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column("text").to_pylist() == ["t", None]
    assert table.column("finish_reason").to_pylist() == ["stop", None]
    assert table.column("choices").to_pylist() == [None, as_read("choices", OPTIONAL["choices"])]


def test_every_result_field_has_a_type(write_table):
    """A result field without a fixed type would be taken for a carried one."""
    call = {"id": "call_0_0_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    table = write_table([{}], extra={0: OPTIONAL | {"reasoning_content": "so", "tool_calls": [call]}})
    assert table.column("tool_calls").to_pylist() == [[call]]
    assert set(RESULT_FIELDS) <= set(table.column_names)


@pytest.mark.parametrize("name", ["token_ids", "choices"])
def test_a_column_of_the_name_of_an_optional_result(write_table, name):
    """The result replaces the column with its type; without such a result the column goes."""
    schema = pa.schema([(name, pa.string()), ("a", pa.int64())])
    assert columns(write_table([{"a": 1}], columns=schema)) == [("a", pa.int64()), *RESULTS]
    table = write_table([{"a": 1}], columns=schema, extra={0: {name: OPTIONAL[name]}})
    assert dict(columns(table))[name] == TYPES[name]


def test_rows_that_are_long(write_table, tmp_path, monkeypatch):
    """A thousand rows with log-probabilities are gigabytes once decoded: row groups must be smaller."""
    monkeypatch.setattr("rosebatch.io.parquet._CHUNK_BYTES", 2**16)
    assert write_table([{"a": "x" * 20_000}] * 9).num_rows == 9
    groups = pq.read_metadata(tmp_path / "out.parquet")
    assert [groups.row_group(group).num_rows for group in range(groups.num_row_groups)] == [4, 4, 1]


@pytest.fixture
def carry_through(tmp_path, write_table):
    """Writes a table to a Parquet file, reads it as an input, and gives the output with the columns carried through."""

    def carry(table):
        path = tmp_path / "in.parquet"
        pq.write_table(table, path)
        reader = PromptReader(str(path), {})
        return write_table([dict(row.metadata) for row in reader], columns=reader.schema)

    return carry


def test_parquet_columns_carried_from_parquet(tmp_path, carry_through):
    """Types of the input are kept, not guessed: a column of nulls keeps its type."""
    table = pa.table(
        {
            "prompt": ["a", None],
            "small": pa.array([1, None], pa.int8()),
            "nothing": pa.array([None, None], pa.float64()),
            "price": pa.array([Decimal("1.50"), None]),
            "when": pa.array([1, None], pa.timestamp("us", tz="Europe/Berlin")),
            "raw": pa.array([b"\xff", None]),
            "category": pa.array(["x", None]).dictionary_encode(),
            "pairs": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
            "tags": pa.array([["t"], []], pa.list_(pa.large_string())),
        }
    )
    written = carry_through(table)
    assert written.select(table.column_names).to_pylist() == table.to_pylist()
    assert columns(written)[: len(table.column_names)] == columns(pq.read_table(tmp_path / "in.parquet"))


def test_parquet_column_of_the_name_of_a_result(write_table):
    """The result replaces the column, as in JSONL, and its old type goes."""
    schema = pa.schema([("text", pa.int64()), ("error", pa.string()), ("token_ids", pa.string()), ("a", pa.int64())])
    table = write_table([{"a": 1}], columns=schema)
    assert (columns(table), table.column("text").to_pylist()) == ([("a", pa.int64()), *RESULTS], ["t"])


def test_deep_columns_of_parquet_keep_their_type(carry_through):
    """JSON text would not fit the type of a deeply nested input column."""
    kind, value = pa.int64(), 1
    for _ in range(20):
        kind, value = pa.list_(kind), [value]
    written = carry_through(pa.table({"prompt": ["a"], "deep": pa.array([value], kind)}))
    assert written.column("deep").to_pylist() == [value]


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()])
@pytest.mark.parametrize("outer", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view])
def test_views_in_lists_of_structs(write_table, kind, outer):
    """Parquet's writer failed where one of the lists was null, when all rows had been served."""
    values = [[{"a": "text" if kind == pa.string_view() else b"bytes"}], None, [{"a": None}]]
    columns = pa.schema([("c", outer(pa.struct([("a", kind)])))])
    assert write_table([{"c": value} for value in values], columns=columns).column("c").to_pylist() == values


def test_views_keep_what_is_around_them(write_table):
    """Fields inside keep their names, and whether they may be null; a column of views stays one."""
    inner = pa.list_(pa.field("each", pa.string_view(), nullable=False), 1)
    table = write_table(
        [{"c": {"x": ["a"]}, "d": "b"}], columns=pa.schema([("c", pa.struct([("x", inner)])), ("d", pa.string_view())])
    )
    assert table.schema.field("d").type == pa.string_view()
    assert table.schema.field("c").type == pa.struct(
        [("x", pa.list_(pa.field("each", pa.string(), nullable=False), 1))]
    )


def test_nanoseconds_are_carried_through(carry_through):
    """Arrow refuses to make Python datetimes of nanoseconds, which are pandas' default; the same inside other types."""
    moments = [1_700_000_000_123_456_789]
    when = pa.array(moments, pa.timestamp("ns"))
    log = pa.array([{"when": moments}], pa.struct([("when", pa.list_(pa.timestamp("ns")))]))
    written = carry_through(pa.table({"prompt": ["a"], "when": when, "log": log}))
    assert written.schema.field("log").type == log.type
    inside = written.column("log").combine_chunks().field("when").values
    for times in (written.column("when"), inside):
        assert times.cast(pa.int64()).to_pylist() == moments


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.large_list(pa.timestamp("ns")), [1_123_456_789]),
        (pa.list_(pa.timestamp("ns"), 1), [1_123_456_789]),
        (pa.map_(pa.string(), pa.duration("ns")), {"a": 1_123_456_789}),
    ],
)
def test_nanoseconds_inside_lists_of_all_kinds_and_maps(read_table, kind, value):
    """Rows failed as unreadable, or became times of pandas where that is installed."""
    (row,) = read_table(pa.table({"prompt": ["a"], "x": pa.array([value], kind)}))
    assert row.metadata["x"] == value


def test_parquet_of_carried_json_values(write_table):
    """Types fit all rows, missing fields are null, columns are in the order of their first appearance."""
    table = write_table(
        [
            {"zeta": 1, "alpha": "x", "mean": 1, "flag": True, "tags": [], "info": {"a": 1}},
            {"zeta": None, "mean": 0.5, "tags": ["t"], "info": {"b": None, "a": 2}, "late": 5},
        ]
    )
    assert [name for name, _ in columns(table)][:7] == ["zeta", "alpha", "mean", "flag", "tags", "info", "late"]
    assert table.select(range(7)).to_pylist() == [
        {"zeta": 1, "alpha": "x", "mean": 1.0, "flag": True, "tags": [], "info": {"a": 1, "b": None}, "late": None},
        {"zeta": None, "alpha": None, "mean": 0.5, "flag": None, "tags": ["t"], "info": {"a": 2, "b": None}, "late": 5},
    ]
    assert dict(columns(table))["mean"] == pa.float64()


@pytest.mark.parametrize(
    "values",
    [
        *([1, "a"], [10**29, 1], [1, 10**29], [2**63, -1], [2**60 + 1, 0.5], ["a", {"b": 1}], [{"a": 1}, [1]]),
        *([{"a": 1}, {"a": "x"}], [{"a": 2**60 + 1}, {"a": 0.5}], [[1, "a"], None], [[2**60 + 1], [0.5]]),
        *([True, 1], [1, True], [1.5, True], [True, 1.5], [None, 0.5, False], [[1.5], [True]], [[True, 1.5]]),
        *([{"a": True}, {"a": 1.5}], [{"a": [{"b": 1.5}]}, {"a": [{"b": False}]}]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("apart", [0, 1500])
def test_values_without_a_common_type_become_json_text(write_table, json_text, values, apart):
    """Failing at the end would lose hours of work, and casting would change values: True became 1.0.

    Types are found chunk by chunk: the same rule must apply between chunks.
    """
    first, *rest = values
    table = write_table([{"a": value} for value in [first, *[None] * apart, *rest]])
    found = [value for value in table.column("a").to_pylist() if value is not None]
    assert table.schema.field("a").type == pa.string()
    assert found == [json_text(value) for value in values if value is not None]


def test_types_that_widen_far_apart_in_the_file(write_table):
    """Later chunks may widen nulls, lists, structs and integers of the first."""
    first = {"a": None, "b": [], "c": {"x": 1}, "d": 1}
    table = write_table([first] * 1024 + [{"a": "s", "b": [1], "c": {"y": 2}, "d": 0.5}])
    rows = table.select(["a", "b", "c", "d"]).to_pylist()
    assert rows[0] == {"a": None, "b": [], "c": {"x": 1, "y": None}, "d": 1.0}
    assert rows[1024] == {"a": "s", "b": [1], "c": {"x": None, "y": 2}, "d": 0.5}


def test_a_column_of_nulls_is_text(write_table):
    """Arrow's null type would not fit the values of the next file."""
    assert write_table([{"a": None}, {"a": None}]).schema.field("a").type == pa.string()


@pytest.mark.parametrize("value", [{}, [{}], {"a": {}}], ids=["empty", "in-list", "in-object"])
def test_an_empty_object_is_carried(write_table, value):
    """Parquet has no struct without fields, and Arrow says so only when writing."""
    (written,) = write_table([{"meta": value}]).column("meta").to_pylist()
    assert (json.loads(written) if isinstance(written, str) else written) == value


@pytest.mark.parametrize("depth", [10, 60, 900])
def test_deep_carried_values_can_be_read_again(write_table, depth):
    """Parquet readers refuse deep schemas: the file would be unreadable after the run."""
    (written,) = write_table([{"deep": nested(depth)}]).column("deep").to_pylist()
    assert written == ("[" * depth + "]" * depth if isinstance(written, str) else nested(depth))


def test_integers_of_64_bits_are_exact(write_table):
    """Floats cannot hold the ends of the range."""
    values = [2**63 - 1, -(2**63)]
    assert write_table([{"a": value} for value in values]).column("a").to_pylist() == values


def test_parquet_over_several_groups_of_rows(write_table):
    """No row is lost, doubled or misplaced where chunks meet."""
    table = write_table([{"a": i} for i in range(2050)])
    assert table.column("a").to_pylist() == table.column("index").to_pylist() == list(range(2050))


def test_parquet_bytes_are_the_same_each_time(tmp_path, encode):
    """People compare two runs with cmp: columns from a set of names would change order."""
    contents = []
    for _ in range(2):
        rows = [{f"column_{n}": i for n in range(20)} | {"index": i} for i in range(3)]
        write_parquet(tmp_path / "out.parquet", encode(rows))
        contents.append((tmp_path / "out.parquet").read_bytes())
    assert contents[0] == contents[1]
    assert pq.read_table(tmp_path / "out.parquet").column_names[:20] == [f"column_{n}" for n in range(20)]


@pytest.mark.parametrize("kind", [pa.int64(), pa.float16(), pa.decimal256(40, 2), pa.date32(), pa.binary(8)], ids=str)
def test_no_file_holds_what_was_in_memory(tmp_path, encode, kind):
    """Bytes under nulls of run-end-encoded columns were those that memory had before: other in each run."""
    pool = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        schema = pa.schema([("kept", pa.run_end_encoded(pa.int32(), kind))])
        carried = Carried(schema, lambda: iter([({"kept": None}, 0)]))
        # What is freed has no zero.
        _ = [pa.array([-1] * size) for size in (1, 8, 16) for _ in range(99)]
        del _
        write_parquet(tmp_path / "out.arrow", encode([{"index": 0}]), carried, writer=pa.ipc.new_file)
    finally:
        pa.set_memory_pool(pool)
    column = pa.ipc.open_file(tmp_path / "out.arrow").read_all()["kept"]
    assert column.to_pylist() == [None]
    assert not any(column.chunk(0).values.buffers()[1])


def test_a_run_of_texts_in_objects(tmp_path, encode):
    """PyArrow makes no other array of them: nothing is to be cleaned there."""
    kind = pa.run_end_encoded(pa.int32(), pa.struct([("text", pa.string_view())]))
    values = [{"text": "a"}, None]
    carried = Carried(pa.schema([("kept", kind)]), lambda: (({"kept": value}, 0) for value in values))
    write_parquet(tmp_path / "out.arrow", encode([{"index": 0}, {"index": 1}]), carried, writer=pa.ipc.new_file)
    assert pa.ipc.open_file(tmp_path / "out.arrow").read_all()["kept"].to_pylist() == values


WORDS = pa.dictionary(pa.int32(), pa.string())


@pytest.mark.parametrize(
    ("kind", "plain", "wrap"),
    [
        (WORDS, pa.string(), lambda value: value),
        (pa.list_(WORDS), pa.list_(pa.string()), lambda value: [value, None]),
        (pa.list_(pa.struct([("a", WORDS)]), 1), pa.list_(pa.struct([("a", pa.string())]), 1), lambda v: [{"a": v}]),
        (pa.map_(pa.string(), WORDS), pa.map_(pa.string(), pa.string()), lambda value: [("k", value)]),
        (pa.list_view(pa.dictionary(pa.int8(), pa.int64())), pa.list_view(pa.int64()), lambda value: [len(value)]),
    ],
    ids=lambda value: str(value) if isinstance(value, pa.DataType) else "",
)
def test_dictionaries_of_many_rows(tmp_path, encode, kind, plain, wrap):
    """Each batch of an Arrow file came with a dictionary of its own: the job ended behind its last row."""
    values = [wrap("x" * (number // 700)) for number in range(1500)]
    carried = Carried(pa.schema([("kept", kind)]), lambda: (({"kept": value}, 0) for value in values))
    write_parquet(tmp_path / "out.arrow", encode([{"index": i} for i in range(1500)]), carried, writer=pa.ipc.new_file)
    column = pa.ipc.open_file(tmp_path / "out.arrow").read_all()["kept"]
    assert (column.type, column.to_pylist()) == (plain, values)


def test_all_parts_have_one_schema(tmp_path, encode):
    """Readers take the first part's schema: a column that is null there needs its final type at once."""
    carried = [{"late": None, "mean": 1}, {"mean": 2}, {"late": [{"x": "s"}], "mean": 0.5}, {"more": True}]
    results = [{}, {"text": "t"}, {"error": {"code": "c", "message": "m"}}, {"logprobs": OPTIONAL["logprobs"]}]
    rows = [{**each, "index": i, **result} for i, (each, result) in enumerate(zip(carried, results, strict=True))]
    write_parquet_parts(tmp_path / "out", encode(rows), 1)
    write_parquet(tmp_path / "out.parquet", encode(rows))
    parts = sorted((tmp_path / "out").iterdir())
    assert [part.name for part in parts] == [f"part-0000{number}.parquet" for number in range(4)]
    expected = pq.read_table(tmp_path / "out.parquet")
    for number, part in enumerate(parts):
        assert pq.read_table(part).equals(expected.slice(number, 1))
    assert dataset.dataset(tmp_path / "out").to_table().equals(expected)


@pytest.mark.parametrize(
    ("num_rows", "rows_per_file", "sizes"),
    [(0, 3, [0]), (1, 3, [1]), (3, 3, [3]), (4, 3, [3, 1]), (2050, 1025, [1025, 1025]), (2, 10**6, [2])],
)
def test_parts_hold_the_rows_in_order(tmp_path, encode, num_rows, rows_per_file, sizes):
    """No row is lost, doubled or misplaced where parts meet; only an output without rows has an empty part."""
    write_parquet_parts(tmp_path / "out", encode([{"index": index} for index in range(num_rows)]), rows_per_file)
    tables = [pq.read_table(path) for path in sorted((tmp_path / "out").iterdir())]
    assert [table.num_rows for table in tables] == sizes
    assert [index for table in tables for index in table.column("index").to_pylist()] == list(range(num_rows))
    assert columns(tables[0]) == RESULTS


def test_names_of_many_parts_have_their_order(tmp_path, encode, monkeypatch):
    """A number with one more digit would sort before those of earlier rows."""
    monkeypatch.setattr("rosebatch.io.parquet._DIGITS", 1)
    write_parquet_parts(tmp_path / "out", encode([{"index": index} for index in range(11)]), 1)
    paths = sorted((tmp_path / "out").iterdir())
    assert [pq.read_table(path).column("index").to_pylist() for path in paths] == [[index] for index in range(11)]


def test_parts_of_a_parquet_input(tmp_path, encode):
    """Carried values stay beside their own results in every part, with the input's types."""
    values = [{"price": Decimal(f"{index}.50"), "text": "replaced"} for index in range(5)]
    schema = pa.schema([("price", pa.decimal128(5, 2)), ("text", pa.string())])
    results = encode([{"index": index, "text": str(index)} for index in range(5)])
    write_parquet_parts(tmp_path / "out", results, 2, Carried(schema, lambda: zip(values, repeat(0))))
    table = dataset.dataset(tmp_path / "out").to_table()
    assert columns(table) == [("price", pa.decimal128(5, 2)), *RESULTS]
    assert table.column("price").to_pylist() == [value["price"] for value in values]
    assert table.column("text").to_pylist() == [str(index) for index in range(5)]


def test_the_first_pass_does_not_read_a_parquet_input(tmp_path, encode):
    """The input may be remote, and checking its rows takes longer than looking at results."""
    read = []
    carried = Carried(pa.schema([("a", pa.int64())]), lambda: read.append(1) or iter([({"a": 1}, 0)]))
    write_parquet(tmp_path / "out.parquet", encode([{"index": 0}]), carried)
    assert read == [1]


def test_large_carried_values_wait_for_few_others(tmp_path, encode):
    """Those of 1,024 rows were in memory at once, whatever their bytes: 40 rows of 8 MB took 2 GB."""
    carried = Carried(pa.schema([("a", pa.int64())]), lambda: zip([{"a": 1}] * 5, repeat(8 << 20)))
    write_parquet(tmp_path / "out.parquet", encode([{"index": index} for index in range(5)]), carried)
    groups = pq.read_metadata(tmp_path / "out.parquet")
    assert [groups.row_group(number).num_rows for number in range(groups.num_row_groups)] == [2, 2, 1]


def test_flags_and_floats_apart(write_table):
    """Each keeps its type where they do not meet."""
    table = write_table([{"a": {"flag": True, "x": 1.5}, "b": [False]}, {"a": {"flag": False, "x": 2}, "b": []}])
    assert table.schema.field("a").type == pa.struct([("flag", pa.bool_()), ("x", pa.float64())])
    assert table.column("b").to_pylist() == [[False], []]
