"""Prompts that are made of columns, system messages for all rows, and prompts in results."""

import datetime
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.core.errors import FlagError, RowError
from rosebatch.io.columns import Columns
from rosebatch.io.prompt_template import fill, names
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow

SYSTEM = {"role": "system", "content": "Be brief."}


def read(path, **options):
    return PromptReader(
        str(path), {}, columns=Columns.of(options.pop("prompt", None), None, options.pop("columns", None), **options)
    )


@pytest.fixture(params=["jsonl", "json", "parquet", "csv"])
def write(request, tmp_path):
    def write(rows):
        path = tmp_path / f"in.{request.param}"
        if request.param == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif request.param == "csv":
            lines = [list(rows[0]), *(["" if each is None else str(each) for each in row.values()] for row in rows)]
            path.write_text("".join(",".join(line) + "\n" for line in lines))
        else:
            texts = list(map(json.dumps, rows))
            path.write_text("[" + ",\n".join(texts) + "]" if request.param == "json" else "\n".join(texts))
        return path

    return write


def test_a_template_over_columns(write):
    """Braces that are doubled are text; a prompt column counts only where the template names it."""
    path = write([{"body": "é{x}", "prompt": "p", "n": 5}, {"body": "b", "prompt": "q", "n": 6}])
    reader = read(path, template="{{{n}}} {prompt}: {body}")
    assert [row.prompt for row in reader] == ["{5} p: é{x}", "{6} q: b"]
    assert all(row.messages is None for row in reader)


def test_values_that_are_no_texts():
    """They stand there as JSON has them, whatever file they come from."""
    values = {"list": [1, "é"], "object": {"a": None}, "flag": True, "float": 1.5, "day": datetime.date(2024, 1, 2)}
    values |= {"decimal": Decimal("1.50"), "bytes": b"ab", "a.b c": "name"}
    texts = {"list": '[1,"é"]', "object": '{"a":null}', "flag": "true", "float": "1.5", "day": "2024-01-02"}
    texts |= {"decimal": "1.50", "bytes": "YWI=", "a.b c": "name"}
    assert {name: fill(f"{{{name}}}", values) for name in values} == texts


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_missing(value):
    """pandas has NaN there: the prompt had the word null."""
    with pytest.raises(RowError, match=f"score, which --prompt-template names, is {value}"):
        fill("{score}", {"score": value})


@pytest.mark.parametrize("template", ["{", "a } b", "{body!r}", "{body:>5}", "{}", "no column", "", "{body:{width}}"])
def test_what_is_no_template(template):
    """str.format would print a repr, pad, or count columns. Without a column, all prompts would be one."""
    with pytest.raises(FlagError, match=r"^--prompt-template: "):
        Columns.of(None, None, None, template)


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_a_column_that_a_table_lacks(tmp_path, ending):
    """The model was loaded for rows that all fail."""
    if ending == "parquet":
        pq.write_table(pa.table({"a": ["x"], "b": ["y"]}), tmp_path / "in.parquet")
    else:
        (tmp_path / "in.csv").write_text("a,b\nx,y\n")
    with pytest.raises(FlagError, match=rf"^--prompt-template: .*in\.{ending} has no column body, but a, b$"):
        read(tmp_path / f"in.{ending}", template="{a} {body}")


def test_a_field_that_a_row_lacks(tmp_path):
    """It fails alone, and the message has its fields."""
    (tmp_path / "in.jsonl").write_text('{"body": "a"}\n{"id": 2, "test": "a"}\n{"body": null}\n{"body": ""}\n')
    first, *failed, empty = read(tmp_path / "in.jsonl", template="{body}")
    assert first.prompt == "a"
    assert [(row.error.code, row.error.message) for row in failed] == [
        ("missing_prompt", "body, which --prompt-template names, is missing; the row has id, test"),
        ("missing_prompt", "body, which --prompt-template names, is null"),
    ]
    assert (failed[0].metadata, empty.error.code) == ({"id": 2, "test": "a"}, "empty_prompt")


def test_a_template_and_a_prompt_column():
    """One of them would count for nothing."""
    with pytest.raises(FlagError, match="exclude each other"):
        Columns.of("a", None, None, "{b}")


def test_a_system_prompt(write):
    """A text becomes a chat."""
    for options in ({}, {"prompt": "body"}, {"template": "{prompt}"}):
        (row,) = read(write([{"prompt": "hi", "body": "hi"}]), system="Be brief.", **options)
        assert (row.messages, row.prompt) == ([SYSTEM, {"role": "user", "content": "hi"}], None)


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, ["system", "user"]),
        ({"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]}, ["system", "user"]),
        ({"messages": [{"role": "developer", "content": "own"}]}, ["developer"]),
    ],
)
def test_a_system_prompt_of_a_chat(tmp_path, row, roles):
    """The row's own wins. A table's column is carried as it is."""
    (tmp_path / "in.jsonl").write_text(json.dumps(row))
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "in.parquet")
    for name in ("in.jsonl", "in.parquet"):
        (found,) = read(tmp_path / name, system="Be brief.")
        assert [message["role"] for message in found.messages] == roles
        assert found.messages[0]["content"] == ("own" if len(row["messages"]) == len(roles) else "Be brief.")
    assert found.metadata == row


@pytest.mark.parametrize(
    ("row", "code", "message"),
    [
        ({"prompt_token_ids": [1]}, "invalid_field", "--system-prompt needs a prompt given as text or messages"),
        ({"prompt": ""}, "empty_prompt", "prompt is empty"),
        ({"prompt": "a", "messages": [SYSTEM]}, "missing_prompt", "got prompt and messages"),
        ({"prompt": "a", "echo": True}, "invalid_field", "echo cannot be used with messages"),
        ({"messages": []}, "empty_prompt", "messages is empty"),
    ],
)
def test_rows_that_can_have_no_system_prompt(tmp_path, row, code, message):
    """None is served without it."""
    (tmp_path / "in.jsonl").write_text(json.dumps(row))
    (found,) = read(tmp_path / "in.jsonl", system="Be brief.")
    assert isinstance(found, FailedRow) and found.error.code == code and message in found.error.message


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {"prompt": "p"}),
        ({"columns": "x"}, {"prompt": "p"}),
        ({"prompt": "body"}, {"body": "t"}),
        ({"template": "<{body}>"}, {"prompt": "<t>", "body": "t"}),
        ({"template": "<{body}>", "columns": "x"}, {"prompt": "<t>"}),
        ({"system": "Be brief."}, {"prompt": "p"}),
    ],
)
def test_kept_prompts(tmp_path, options, kept):
    """JSONL results had no prompt, though those of tables have."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "p", "x": 1, "body": "t", "max_tokens": 3}')
    (row,) = read(tmp_path / "in.jsonl", keeps_prompt=True, **options)
    assert {name: row.metadata[name] for name in kept} == kept
    rest = {name for name in row.metadata if name not in ("x", "body")}
    assert rest - set(kept) == set() and row.metadata["x"] == 1 and row.sampling.max_tokens == 3
    (plain,) = read(tmp_path / "in.jsonl", **options)
    assert "prompt" not in plain.metadata


def test_kept_prompts_of_a_table(tmp_path):
    """A made prompt is a column more; one that is there already is not lost to it."""
    pq.write_table(pa.table({"body": ["t"], "day": [datetime.date(2024, 1, 2)]}), tmp_path / "in.parquet")
    reader = read(tmp_path / "in.parquet", template="<{body}>", keeps_prompt=True)
    assert reader.schema.names == ["body", "day", "prompt"]
    ((carried, _),) = reader.carried()
    assert carried == {"body": "t", "day": datetime.date(2024, 1, 2), "prompt": "<t>"}
    pq.write_table(pa.table({"prompt": ["t"]}), tmp_path / "in.parquet")
    with pytest.raises(FlagError, match=r"^--keep-prompt: .* has a column prompt"):
        read(tmp_path / "in.parquet", template="<{prompt}>", keeps_prompt=True)


def test_only_columns_of_the_template_are_read(tmp_path):
    """They are read though results do not keep them."""
    pq.write_table(pa.table({"body": ["t"], "x": [1], "index": [5]}), tmp_path / "in.parquet")
    (row,) = read(tmp_path / "in.parquet", template="<{body}>", columns="x")
    assert (row.prompt, row.metadata) == ("<t>", {"x": 1})


@pytest.mark.parametrize("name", ["in.jsonl", "in.parquet"])
def test_a_column_with_the_name_of_a_result(tmp_path, name):
    """The commonest name of all: results have a text too, so the user says which is kept."""
    (tmp_path / "in.jsonl").write_text('{"text": "t", "x": 1}')
    pq.write_table(pa.table({"text": ["t"], "x": [1]}), tmp_path / "in.parquet")
    with pytest.raises(FlagError, match=r"results have fields of these names too: text. .*--columns to name"):
        read(tmp_path / name, template="<{text}>").require_free_names()
    reader = read(tmp_path / name, template="<{text}>", columns="x")
    reader.require_free_names()
    (row,) = reader
    assert (row.prompt, row.metadata) == ("<t>", {"x": 1})


def test_names_of_a_template():
    """Columns that a template reads."""
    assert names("{a}{b}{{c}}") == ("a", "b")


@pytest.mark.parametrize("names", [{"template": "{input} {stream}"}, {"prompt": "input", "id": "stream"}])
def test_columns_that_a_flag_names_are_understood(tmp_path, names):
    """``input`` and ``stream`` look as if they should change something, and here they do."""
    (tmp_path / "in.jsonl").write_text('{"input": "a", "stream": "b", "context": "c"}')
    pq.write_table(pa.table({"input": ["a"], "stream": ["b"], "context": ["c"]}), tmp_path / "in.parquet")
    for name in ("in.jsonl", "in.parquet"):
        columns = Columns.of(names.get("prompt"), names.get("id"), None, names.get("template"))
        (row,) = PromptReader(str(tmp_path / name), {}, columns=columns)
        assert row.unclear == ("context",)
