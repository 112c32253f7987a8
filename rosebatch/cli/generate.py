"""``rosebatch generate``, once its flags are parsed."""

from typing import Any

from rosebatch.cli.common import run_config, sampling_defaults, serve_file
from rosebatch.job.config import JobConfig


def generate(source: str, job: dict[str, Any], run: dict[str, Any], sampling: dict[str, Any], started: float) -> int:
    """Run the job; returns the number of rows that failed."""
    schema = sampling.get("json_schema")
    settings = () if schema is None else (schema,)
    config = JobConfig(input=source, sampling=sampling_defaults(sampling), settings=settings, **job)
    return serve_file(config, run_config(run), started)
