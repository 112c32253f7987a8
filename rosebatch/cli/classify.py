"""``rosebatch classify``: its flag, and what it runs."""

import time
from dataclasses import dataclass
from typing import Annotated, Any

from rosebatch.cli.embed import OF_COMPLETIONS, OF_IMAGES
from rosebatch.cli.jobs import prepare_device, serve_file
from rosebatch.cli.options import Source, takes
from rosebatch.config.run import Flag, RunConfig
from rosebatch.job.config import JobConfig

CLASSES = "Classes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFlags:
    """What results have; fields as in ``rosebatch.io.tasks.classify.Classify``."""

    token_probs: Annotated[bool, Flag("Tokens that are classified have the numbers of all labels.", CLASSES)] = False


@takes(job=JobConfig, run=RunConfig, classes=ClassFlags, without=OF_COMPLETIONS + OF_IMAGES)
def classify(source: Source, *, job: dict[str, Any], run: dict[str, Any], classes: dict[str, Any]) -> None:
    """Classify every prompt of a file, or its tokens, by the model's own head.

    Exit code: as of generate.
    """
    started = time.perf_counter()
    prepare_device(run)
    from rosebatch.io.tasks.classify import Classify

    serve_file(JobConfig(input=source, task=Classify(**classes), **job), run, started)
