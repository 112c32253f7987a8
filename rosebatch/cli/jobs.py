"""The commands over files, once their flags are parsed."""

import sys
from pathlib import Path
from typing import Any

import typer

from rosebatch.cli import cuda_context
from rosebatch.config.run import RunConfig
from rosebatch.core.errors import FlagError
from rosebatch.core.words import counted
from rosebatch.job.config import JobConfig

EXIT_ROWS_FAILED = 3


def generate(source: str, job: dict[str, Any], run: dict[str, Any], sampling: dict[str, Any], started: float) -> None:
    """Complete the rows of a file; see ``serve_file``."""
    schema = sampling.get("json_schema")
    settings = () if schema is None or _is_json(schema) else (Path(schema),)
    serve_file(JobConfig(input=source, sampling=_defaults(sampling), settings=settings, **job), run, started)


def serve_file(job: JobConfig, run: dict[str, Any], started: float) -> None:
    """Run a job, which signals may end.

    Raises:
        typer.Exit: rows have failed.
    """
    from rosebatch.cli.interrupts import Interrupts
    from rosebatch.job.run import run_job

    _warn_of_escapes(job)
    interrupts, config = Interrupts(), _run_config(run)
    with interrupts.watch():
        failed = run_job(job, config, listen=interrupts.listen, started=started).num_failed
    if failed and job.quiet:
        sys.stderr.write(f"rosebatch: {counted(failed, 'row')} failed: an error is in place of the result\n")
    exit_if(failed)


def check(job: dict[str, Any], run: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Print the rows of a file that cannot be served, and what it would take.

    Raises:
        typer.Exit: there are such rows.
    """
    from rosebatch.cli.interrupts import Interrupts
    from rosebatch.job.check import check_job

    checked = JobConfig(**job, sampling=_defaults(sampling))
    _warn_of_escapes(checked)
    with Interrupts().watch():
        bad = check_job(checked, _run_config(run), sys.stdout)
    exit_if(bad)


def _warn_of_escapes(job: JobConfig) -> None:
    """Say on stderr which texts have a backslash and an n, where a line break was probably meant."""
    texts = {
        "--prompt": [job.prompt],
        "--prompt-template": [job.prompt_template],
        "--system-prompt": [job.system_prompt],
    }
    for flag, given in {"--stop": job.sampling.get("stop", ()), **texts}.items():
        if any("\\n" in (text or "") for text in given):
            told = f"{flag}: has a backslash and an n; a shell writes a line break as $'\\n'"
            sys.stderr.write(f"rosebatch: warning: {told}\n")


def exit_if(failed: int) -> None:
    """End with an exit code of its own if rows have failed.

    Raises:
        typer.Exit: some have.
    """
    if failed:
        raise typer.Exit(EXIT_ROWS_FAILED)


def prepare_device(run: dict[str, Any]) -> None:
    """Begin to use the GPU, if this process will."""
    if run.get("data_parallel_size", 1) == 1 and run.get("ray") is None:
        cuda_context.create_in_background(run.get("device", "auto"))


def _run_config(flags: dict[str, Any]) -> RunConfig:
    """How to load the model.

    Raises:
        FlagError: a value is impossible.
    """
    try:
        return RunConfig(**flags)
    except ValueError as error:
        raise FlagError(str(error)) from None


def _defaults(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given, as fields of a row.

    Raises:
        FlagError: the file of a schema is unreadable, or there are two forms.
    """
    for name in ("regex", "json_schema"):
        if flags.get(name) == "":
            # A variable of the shell that is not set.
            raise FlagError(f"--{name.replace('_', '-')} is empty")
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    if "regex" in given and "json_schema" in given:
        raise FlagError("--regex and --json-schema exclude each other: an answer has one form")
    structured = {"regex": given.pop("regex")} if "regex" in given else {}
    if "json_schema" in given:
        schema = given.pop("json_schema")
        structured["json"] = schema if _is_json(schema) else _read(Path(schema))
    if structured:
        given["structured_outputs"] = structured
    return given


def _is_json(schema: str) -> bool:
    """Whether the flag has the schema itself, and not the name of its file."""
    return schema.lstrip().startswith("{")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        what = getattr(error, "strerror", None) or error
        raise FlagError(f"--json-schema {path}: {what}; give a file, or the schema itself in quotes: '{{…}}'") from None
