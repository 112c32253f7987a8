"""Errors of the command line."""

from types import SimpleNamespace


def require_error(result: SimpleNamespace, code: int, *parts: str) -> None:
    """The command ended with one line that has all of these parts, and printed nothing else."""
    assert (result.code, result.out) == (code, ""), result.err
    assert len(result.err.splitlines()) == 1, result.err
    assert result.err.startswith("rosebatch: error: ") and result.err.endswith("\n")
    for part in parts:
        assert part in result.err
