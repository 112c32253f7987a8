"""Errors of the command line."""

from types import SimpleNamespace


def require_error(result: SimpleNamespace, code: int, *parts: str) -> None:
    """The command ended with one line that has all of these parts, and printed nothing else."""
    assert (result.code, result.out) == (code, ""), result.err
    assert len(result.err.splitlines()) == 1, result.err
    assert result.err.startswith("rosebatch: error: ") and result.err.endswith("\n")
    for part in parts:
        assert part in result.err


def failed_rows(count: int = 1) -> str:
    """What ``--quiet`` leaves on stderr if so many rows failed."""
    rows = "1 row" if count == 1 else f"{count} rows"
    return f"rosebatch: {rows} failed: an error is in place of the result\n" if count else ""
