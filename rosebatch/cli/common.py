"""What commands share once their flags are parsed."""

from pathlib import Path
from typing import Any

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import FlagError
from rosebatch.job.config import JobConfig


def run_config(flags: dict[str, Any]) -> RunConfig:
    """How to load the model.

    Raises:
        FlagError: a value is impossible.
    """
    try:
        return RunConfig(**flags)
    except ValueError as error:
        raise FlagError(str(error)) from None


def serve_file(job: JobConfig, run: RunConfig, started: float) -> int:
    """Run a job, which signals may end; returns the number of rows that failed."""
    from rosebatch.cli.interrupts import Interrupts
    from rosebatch.job.run import run_job

    interrupts = Interrupts()
    with interrupts.watch():
        return run_job(job, run, listen=interrupts.listen, started=started).num_failed


def sampling_defaults(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given, as fields of a row.

    Raises:
        FlagError: the file of a schema is unreadable.
    """
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    structured = {"regex": given.pop("regex")} if "regex" in given else {}
    if "json_schema" in given:
        structured["json"] = _read(given.pop("json_schema"))
    if structured:
        given["structured_outputs"] = structured
    return given


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise FlagError(f"--json-schema {path}: unreadable ({error})") from None
