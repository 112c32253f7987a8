"""``rosebatch embed``, once its flags are parsed."""

from typing import Any

from rosebatch.cli.common import run_config, serve_file
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.io.tasks.embed import Embed
from rosebatch.job.config import JobConfig


def embed(source: str, job: dict[str, Any], run: dict[str, Any], embedding: dict[str, Any], started: float) -> int:
    """Run the job; returns the number of rows that failed."""
    encoding_format = embedding.pop("encoding_format")
    config = JobConfig(input=source, task=Embed(PoolingParams(**embedding), encoding_format), **job)
    return serve_file(config, run_config(run), started)
