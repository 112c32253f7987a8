"""Results of rows that were never served, and rows that failed."""

from collections.abc import Mapping, Sequence
from typing import Any

from rosebatch.core.sampling_params import GREEDY
from rosebatch.io.results import Choice, Result
from rosebatch.io.rows import FailedRow, Row


def make_result(index: int, metadata: Mapping[str, Any], choices: Sequence[Choice] = (), **fields: Any) -> Result:
    """A result with these choices; ``fields`` are its others."""
    row = Row(index=index, where=f"line {index + 1}", metadata=metadata, sampling=GREEDY)
    return Result(row=row, choices=list(choices), **fields)


def assert_failed(row: Row | FailedRow, code: str, text: str = "") -> None:
    """It failed with this code, and its message has this text."""
    assert isinstance(row, FailedRow)
    assert row.error.code == code
    assert text in row.error.message
