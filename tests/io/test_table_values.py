"""Values of tables come through to the last digit, in whatever they lie: PyArrow cuts or changes some."""

import json
import pickle
from datetime import time, timedelta
from decimal import Decimal
from io import BytesIO
from itertools import product, repeat

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import UserError
from rosebatch.io import table_values
from rosebatch.io.columns import written
from rosebatch.io.parquet import Carried, write_parquet
from rosebatch.io.parquet_types import columns_without_a_type
from rosebatch.io.reader import PromptReader
from tests.helpers.nested_arrays import NESTINGS

# Three values, as Arrow has them and as JSON has them.
MOMENT = 1_700_000_000_123_456_789
INTEGERS = {
    "time": (pa.time64("ns"), [86_399_999_999_999, None, 1]),
    "moment": (pa.timestamp("ns"), [MOMENT, None, -1]),
    "moment of a zone": (pa.timestamp("ns", "Asia/Kolkata"), [MOMENT, None, -(2**63)]),
    "duration": (pa.duration("ns"), [2**63 - 1, None, -999]),
}
VALUES = {
    **{name: (pa.array(values, kind), values) for name, (kind, values) in INTEGERS.items()},
    "interval": (
        pa.array([(1, -2, 3), None, (2**31 - 1, 0, 2**63 - 1)], pa.month_day_nano_interval()),
        [[1, -2, 3], None, [2**31 - 1, 0, 2**63 - 1]],
    ),
    "seconds": (pa.array([86_399, None, 0], pa.time32("s")), ["23:59:59", None, "00:00:00"]),
    "microseconds": (
        pa.array([86_399_999_999, None, 1], pa.time64("us")),
        ["23:59:59.999999", None, "00:00:00.000001"],
    ),
    "day": (pa.array([86_400_000, None, -86_400_000], pa.date64()), ["1970-01-02", None, "1969-12-31"]),
    "old zone": (
        pa.array([-3_000_000_000, None, 1_729_992_600], pa.timestamp("s", "Europe/Paris")),
        ["1874-12-07T18:40:00Z", None, "2024-10-27T02:30:00+01:00"],
    ),
    "span": (pa.array([timedelta(days=1, microseconds=1), None, timedelta(0)]), ["P1DT0.000001S", None, "P0D"]),
    "small decimal": (
        pa.array([Decimal("-9999.999"), None, Decimal(0)], pa.decimal32(7, 3)),
        ["-9999.999", None, "0.000"],
    ),
    "decimal": (pa.array([Decimal("9" * 38), None, Decimal(1)], pa.decimal128(38, 0)), ["9" * 38, None, "1"]),
    "decimal of hundreds": (
        pa.array([Decimal("9" * 70 + "E2"), None, Decimal("1E2")], pa.decimal256(70, -2)),
        ["9." + "9" * 69 + "E+71", None, "1E+2"],
    ),
    "half": (pa.array(np.array([65504, 0.0999755859375, -(2**-24)], np.float16)), [65504, 0.0999755859375, -(2**-24)]),
    "bytes": (pa.array([b"\xff", None, b"y" * 20], pa.binary_view()), ["/w==", None, "eXl5eXl5eXl5eXl5eXl5eXl5eXk="]),
    "view": (pa.array(["a", None, "é" * 20], pa.string_view()), ["a", None, "é" * 20]),
    "unsigned": (pa.array([2**64 - 1, None, 0], pa.uint64()), [2**64 - 1, None, 0]),
}


SUFFIXES = {"parquet": "parquet", "file": "arrow", "stream": "arrow"}
WRITERS = {"parquet": pq.ParquetWriter, "file": pa.ipc.new_file, "stream": pa.ipc.new_stream}
# PyArrow's files hold none of them, or its arrays no integers in place of nanoseconds.
UNHELD = {("dictionary", "dictionary"), ("runs", "runs"), ("extension", "extension")}


def in_everything(inner):
    """All values in one nesting, by itself and in each other one, by names."""
    found = {name: VALUES[name] if inner is None else NESTINGS[inner](*VALUES[name]) for name in VALUES}
    outers = [outer for outer in NESTINGS if (inner, outer) not in UNHELD]
    return found | {f"{name} in {outer}": NESTINGS[outer](*found[name]) for name in VALUES for outer in outers}


def is_held(array, kind):
    try:
        write(BytesIO(), pa.table({"a": [1, 2, 3], "b": array, "c": [1, 2, 3]}), kind)
    except (pa.ArrowException, OSError):
        return False
    return True


def write(path, table, kind):
    with WRITERS[kind](path, table.schema) as writer:
        writer.write_table(table)


def as_json(rows, names):
    return [json.loads(msgspec.json.encode(written({name: row.get(name) for name in names}))) for row in rows]


def tiered(kind, inner):
    """The fast tier has all nestings in files of Arrow, which hold most of them, and one of each other kind."""
    return pytest.param(kind, inner, marks=() if kind == "file" or inner is None else pytest.mark.thorough)


@pytest.mark.parametrize(("kind", "inner"), [tiered(*each) for each in product(WRITERS, [None, *NESTINGS])])
def test_all_values_in_everything(tmp_path, kind, inner):
    """Nanoseconds were cut in dictionaries, runs, list views, unions and extensions; maps in unions were pairs.

    Results have the same values, or no type for their column.
    """
    columns = {name: each for name, each in in_everything(inner).items() if is_held(each[0], kind)}
    table = pa.table({"prompt": ["p"] * 3, **{name: array for name, (array, _) in columns.items()}})
    write(tmp_path / f"in.{SUFFIXES[kind]}", table, kind)
    reader = PromptReader(str(tmp_path / f"in.{SUFFIXES[kind]}"), {})
    rows = [row.metadata for row in reader]
    expected = [{name: values[number] for name, (_, values) in columns.items()} for number in range(3)]
    assert as_json(rows, columns) == expected
    if kind == "stream":
        return
    results = [msgspec.json.encode({"index": index}) for index in range(3)]
    names = columns.keys() - columns_without_a_type(reader.schema, WRITERS[kind])
    carried = Carried(pa.schema([reader.schema.field(name) for name in names]), lambda: zip(rows, repeat(0)))
    write_parquet(tmp_path / "out", lambda: iter(results), carried, writer=WRITERS[kind])
    out = pq.read_table(tmp_path / "out") if kind == "parquet" else pa.ipc.open_file(tmp_path / "out").read_all()
    again = [row for batch in out.to_batches() for row in table_values.rows_of(batch)]
    assert as_json(again, names) == [{name: row[name] for name in names} for row in expected]


# With what 1 is.
OUT_OF_RANGE = {
    "hour 24": (pa.time32("ms"), pa.int32(), 86_400_000, time(microsecond=1000)),
    "before 0": (pa.time64("us"), pa.int64(), -1, time(microsecond=1)),
    "hour 24 in nanoseconds": (pa.time64("ns"), pa.int64(), 86_400 * 10**9, 1),
    "a digit too many": (pa.decimal32(5, 2), pa.int32(), 100_000, Decimal("0.01")),
}


@pytest.mark.parametrize("nests", [False, True])
@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_values_that_a_type_has_not(tmp_path, name, nests):
    """Hour 24 of a Parquet file was hour 0 of results. A decimal of too many digits ended the job behind its last row.

    It fails its own row, and no other. PyArrow looks at whole Arrow files.
    """
    kind, storage, value, one = OUT_OF_RANGE[name]
    array = pa.array([1, value, 1], storage).view(kind)
    if nests:
        array = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), array)
    table = pa.table({"prompt": ["p"] * 3, "a": array})
    write(tmp_path / "in.parquet", table, "parquet")
    first, bad, last = PromptReader(str(tmp_path / "in.parquet"), {})
    assert first.metadata["a"] == last.metadata["a"] == ([one] if nests else one)
    assert bad.error.code == "invalid_value"
    assert "column a has a value that cannot be read" in bad.error.message
    write(tmp_path / "in.arrow", table, "file")
    with pytest.raises(UserError, match=r"in\.arrow: unreadable Arrow file \(column 'a': [^\n]*\)$"):
        list(PromptReader(str(tmp_path / "in.arrow"), {}))


def test_intervals_as_keys():
    """They could not be pickled: the job ended where rows wait in a file."""
    keys = pa.array([(1, 2, 3)], pa.month_day_nano_interval())
    batch = pa.record_batch({"a": pa.MapArray.from_arrays(pa.array([0, 1], pa.int32()), keys, pa.array([5]))})
    assert pickle.loads(pickle.dumps(table_values.rows_of(batch))) == [{"a": {(1, 2, 3): 5}}]


def test_an_object_of_a_union_with_one_key_twice():
    """Its second value would hide the first."""
    twice = pa.StructArray.from_arrays([pa.array([1, 3]), pa.array([2, 4])], ["x", "x"])
    union = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [twice, pa.array(["a", "b"])])
    bad, good = table_values.rows_of(pa.record_batch({"a": union}))
    assert (bad.error.code, good) == ("invalid_value", {"a": "b"})
