"""``rosebatch classify``: what it runs. It has the flags of a job, and none of its own."""

import time
from typing import Any

from rosebatch.cli.embed import OF_COMPLETIONS
from rosebatch.cli.jobs import prepare_device, serve_file
from rosebatch.cli.options import Source, takes
from rosebatch.config.run import RunConfig
from rosebatch.job.config import JobConfig


@takes(job=JobConfig, run=RunConfig, without=OF_COMPLETIONS)
def classify(source: Source, *, job: dict[str, Any], run: dict[str, Any]) -> None:
    """Classify every prompt of a file by the model's own head: a label for each row.

    Exit code: as of generate.
    """
    started = time.perf_counter()
    prepare_device(run)
    from rosebatch.io.tasks.classify import Classify

    serve_file(JobConfig(input=source, task=Classify(), **job), run, started)
