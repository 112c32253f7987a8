"""Fixtures that check one line, read a file of lines, or write rows and read them back."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rosebatch.io.output import FileOutput
from rosebatch.io.parquet import Carried, write_parquet, write_parquet_parts
from rosebatch.io.part_file import PartFile
from rosebatch.io.placement import Placement, replace_folder, write_jsonl
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow, Row, parse_row


@pytest.fixture
def parse() -> Callable[..., Row | FailedRow]:
    """Checks one decoded line. Keywords are the run's sampling defaults."""

    def check(values: Any, **defaults: Any) -> Row | FailedRow:
        return parse_row(values, index=0, where="line 1", defaults=defaults)

    return check


def rows_of(path: Path, **defaults: Any) -> list[Row | FailedRow]:
    """All rows of a file."""
    reader = PromptReader(str(path), defaults)
    rows = list(reader)
    assert reader.count() == len(rows), "count() and the rows themselves must agree"
    return rows


@pytest.fixture
def read_bytes(tmp_path: Path) -> Callable[..., list[Row | FailedRow]]:
    """Writes bytes to a JSONL file and reads its rows."""

    def read(content: bytes, **defaults: Any) -> list[Row | FailedRow]:
        path = tmp_path / "in.jsonl"
        path.write_bytes(content)
        return rows_of(path, **defaults)

    return read


@pytest.fixture
def read_table(tmp_path: Path) -> Callable[[pa.Table], list[Row | FailedRow]]:
    """Writes a table to a Parquet file and reads its rows."""

    def read(table: pa.Table) -> list[Row | FailedRow]:
        path = tmp_path / "in.parquet"
        pq.write_table(table, path)
        return rows_of(path)

    return read


def open_part_file(path: Path, *, resume: bool) -> PartFile:
    """A part file, new or resumed."""
    part = PartFile.reopen(path) if resume else PartFile.create(path, lambda: {"made by": "a test"})
    assert part is not None
    return part


@pytest.fixture
def open_jsonl(tmp_path: Path) -> Callable[..., FileOutput]:
    """Opens a JSONL output file, new or resumed."""

    def open_output(name: str = "out.jsonl", *, resume: bool = False) -> FileOutput:
        return FileOutput(
            open_part_file(tmp_path / f"{name}.part", resume=resume), Placement(tmp_path / name, write_jsonl)
        )

    return open_output


@pytest.fixture
def open_parts(tmp_path: Path) -> Callable[..., FileOutput]:
    """Opens an output folder of Parquet files with two rows each, new or resumed."""

    def open_output(*, resume: bool = False) -> FileOutput:
        part = open_part_file(tmp_path / "answers.part", resume=resume)
        write = partial(write_parquet_parts, rows_per_file=2)
        return FileOutput(part, Placement(tmp_path / "answers", write, place=replace_folder))

    return open_output


@pytest.fixture
def write_jsonl_rows(tmp_path: Path, open_jsonl: Callable[..., FileOutput]) -> Callable[..., list[dict[str, Any]]]:
    """Writes rows to a JSONL file and reads them back with Python's own JSON."""

    def write(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        output = open_jsonl()
        for index, row in enumerate(rows):
            output.add(index, row, failed=False)
        output.finish()
        return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]

    return write


@pytest.fixture
def encode() -> Callable[..., Callable[[], Iterator[bytes]]]:
    """Makes a function that gives the rows as a part file does, as often as it is called."""

    def rows(values: list[dict[str, Any]]) -> Callable[[], Iterator[bytes]]:
        lines = [msgspec.json.encode(value) for value in values]
        return lambda: iter(lines)

    return rows


@pytest.fixture
def write_table(tmp_path: Path, encode: Callable[..., Any]) -> Callable[..., pa.Table]:
    """Writes results with these carried fields to a Parquet file and reads it.

    With ``columns`` the carried fields are those of a Parquet input. ``extra`` adds fields to the results of some rows.
    """

    def write(
        carried: list[dict[str, Any]],
        *,
        columns: pa.Schema | None = None,
        extra: dict[int, dict[str, Any]] | None = None,
        errors: tuple[int, ...] = (),
    ) -> pa.Table:
        path = tmp_path / "out.parquet"
        results = []
        for index in range(len(carried)):
            if index in errors:
                result: dict[str, Any] = {"error": {"code": "some_code", "message": "line 1: no"}}
            else:
                result = {"text": "t", "finish_reason": "stop", "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
            results.append({"index": index, **result, **(extra or {}).get(index, {})})
        if columns is None:
            write_parquet(path, encode([{**each, **result} for each, result in zip(carried, results, strict=True)]))
        else:
            write_parquet(path, encode(results), Carried(columns, lambda: zip(carried, repeat(0))))
        return pq.read_table(path)

    return write


@pytest.fixture
def json_text() -> Callable[[Any], str]:
    """JSON as the writer spells it."""
    return lambda value: msgspec.json.encode(value).decode()
