"""``rosebatch score``: what it runs. It has the flags of a job, and none of its own."""

import time
from typing import Any

from rosebatch.cli.embed import OF_COMPLETIONS, OF_IMAGES
from rosebatch.cli.jobs import prepare_device, serve_file
from rosebatch.cli.options import Source, takes
from rosebatch.config.run import RunConfig
from rosebatch.job.config import JobConfig


@takes(job=JobConfig, run=RunConfig, without=OF_COMPLETIONS + OF_IMAGES)
def score(source: Source, *, job: dict[str, Any], run: dict[str, Any]) -> None:
    """Score pairs of texts, continuations of every prompt of a file, or the prompts.

    Exit code: as of generate.
    """
    started = time.perf_counter()
    prepare_device(run)
    from rosebatch.io.tasks.score import Score

    serve_file(JobConfig(input=source, task=Score(), **job), run, started)
