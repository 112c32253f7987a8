"""Lines of a template in the order in which rows share the longest beginnings."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import FlagError
from rosebatch.io import reader as reader_module
from rosebatch.io.columns import Columns
from rosebatch.io.field_order import reordered
from rosebatch.io.reader import PromptReader

# Columns a, b, c and d have 6, 3, 2 and 2 values.
ROWS = [{"a": f"a{i}", "b": f"b{i % 3}", "c": f"c{i % 2}", "d": f"d{i % 2}"} for i in range(6)]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("A: {a}\nB: {b}\nC: {c}", "C: {c}\nB: {b}\nA: {a}"),
        # What has as many values keeps its order.
        ("D: {d}\nA: {a}\nC: {c}", "D: {d}\nC: {c}\nA: {a}"),
        # A line of several fields has the values of all of them together.
        ("BC: {b}, {c}\nB: {b}\nA: {a}", "B: {b}\nBC: {b}, {c}\nA: {a}"),
        # No line moves past one without a field or a label: "Text" would be the label of another field.
        ("A: {a}\nB: {b}\n\nText:\n{a}\nA: {a}\nC: {c}\n", "B: {b}\nA: {a}\n\nText:\n{a}\nC: {c}\nA: {a}\n"),
        ("A: {a}\n {b} {c}\nC: {c}\nA: {a}\nB: {b}", "A: {a}\n {b} {c}\nC: {c}\nB: {b}\nA: {a}"),
        ("{{A}} {a}\n- {c}", "- {c}\n{{A}} {a}"),
    ],
)  # fmt: skip
def test_the_fewest_values_come_first(template, expected):
    """Rows shared no more than what stands before the column that differs in all of them."""
    assert reordered(template, ROWS) == expected


@pytest.mark.parametrize(
    "template", ["A: {a}", "A: {a}, B: {b}", "Text:\n{a}\nTitle:\n{b}", "A: {a}\n\nB: {b}", "A: {a}\nB: {b\nc}"]
)
def test_a_template_without_lines_that_can_move(template):
    """The flag would do nothing, and fields without labels would be taken for each other."""
    with pytest.raises(FlagError, match=r"^--reorder-fields: .* text before their field"):
        reordered(template, ROWS)


def test_rows_that_lack_a_field():
    """A line that no prompt can be made of is no value."""
    rows = [{"a": None, "b": 1}, {"a": 1, "b": 2}, {"b": 3}]
    assert reordered("B: {b}\nA: {a}", rows) == "A: {a}\nB: {b}"
    assert reordered("B: {b}\nA: {a}", []) == "B: {b}\nA: {a}"


@pytest.fixture(params=["in.jsonl", "in.csv", "in.parquet"])
def path(request, tmp_path):
    """The rows, in files of all kinds; of JSONL, with a line that is no JSON."""
    path = tmp_path / request.param
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            rows = csv.DictWriter(file, list(ROWS[0]))
            rows.writeheader()
            rows.writerows(ROWS)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "{broken\n")
    return path


def prompts(reader):
    return [row.prompt for row in reader if hasattr(row, "prompt")]


def test_the_rows_of_a_file(path):
    """They are the rows of a template in this order, and are served sorted by it."""
    reader = PromptReader(str(path), {}, columns=Columns.of(None, None, None, "A: {a}\nB: {b}\nC: {c}"))
    reader.reorder_fields()
    assert prompts(reader) == [f"C: {row['c']}\nB: {row['b']}\nA: {row['a']}" for row in ROWS]


def test_the_first_rows_decide(path, monkeypatch):
    """A large file would be read twice."""
    columns = Columns.of(None, None, None, "A: {a}\nB: {b}")
    for name, most, expected in (
        ("_FIRST_ROWS", 3, "A: {a}\nB: {b}"),
        ("_FIRST_ROWS", 4, "B: {b}\nA: {a}"),
        ("_FIRST_BYTES", 1, "A: {a}\nB: {b}"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(reader_module, name, most)
            reader = PromptReader(str(path), {}, columns=columns)
            reader.reorder_fields()
            assert reader.columns.template == expected


@pytest.mark.parametrize(("source", "template"), [("-", "A: {a}\nB: {b}"), ("in.jsonl", None)])
def test_where_there_is_nothing_to_reorder(tmp_path, monkeypatch, source, template):
    """Rows of stdin would have to be read twice."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(json.dumps(ROWS[0]))
    reader = PromptReader(source, {}, columns=Columns.of(None, None, None, template))
    with pytest.raises(FlagError, match=r"^--reorder-fields .*(needs a --prompt-template|needs a file)"):
        reader.reorder_fields()
