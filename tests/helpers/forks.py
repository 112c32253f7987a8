"""Forks of one process that has imported everything: they start at once, where an interpreter takes seconds."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
# Behind the job are what its parts import at their first use.
_JOBS = (
    "rosebatch.cli.app", "rosebatch.cli.jobs", "rosebatch.job.local", "rosebatch.job.workers.first_compile",
    "rosebatch.job.workers.reading", "rosebatch.job.workers.service", "rosebatch.launch.driver",
    "rosebatch.launch.group", "rosebatch.model.families.llama", "rosebatch.model.fallback.config",
)  # fmt: skip
_LAZILY = (
    "llguidance.numpy", "pyarrow.dataset", "transformers.models.auto.image_processing_auto",
    "transformers.models.llama.modeling_llama", "transformers.utils.chat_template_utils", "typer._adapters",
)  # fmt: skip
_OURS = ("tests.helpers.faults", "tests.io.test_faults", "tests.job.killable_job", "rosebatch.job.merge")
FORKS.set_forkserver_preload([*_OURS, *_JOBS, *_LAZILY])


def share_server() -> None:
    """Start the process that forks now: forks of this one will ask it, too, in place of starting their own."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server.ensure_running()
    # It would look for a child of the calling process.
    server.ensure_running = lambda: None


def in_fork(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a function returns or raises in a process of its own."""
    with ProcessPoolExecutor(1, FORKS) as pool:
        return pool.submit(function, *args, **options).result()
