"""Runs a job over the fake model in a process of its own. It resumes if there is a part file."""

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rosebatch.core.errors import UserError
from rosebatch.io.tasks.registry import TASKS
from rosebatch.job.config import JobConfig
from rosebatch.job.run import run_job
from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.fake_model import TEMPLATE, FakeModel, launch_fake, make_engine
from tests.job.tool_templates import chat_tokenizer


def main(
    source: str,
    target: str,
    kill: tuple[float, float] | None = None,
    form: str | None = None,
    *,
    task: str = "generate",
    seqs: int = 8,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> float:
    """Run the job at a time that is always the same; returns the processor time that it took.

    Args:
        source: the input.
        target: the output.
        kill: SIGPROF ends the process once the part file has grown by so many bytes, and so many seconds of processor
            time have passed since. No bytes are the start.
        form: the tokenizer and the template are those of ``tests.job.tool_templates``.
        task: its name.
        seqs: rows that are computed at once.
        settings: of ``RunConfig``.
        options: of the run.
    """
    os.environ["SOURCE_DATE_EPOCH"] = "1700000000"
    look = _killer(Path(f"{target.rstrip('/')}.part"), *kill) if kill else lambda: None
    look()
    model = FakeModel(before_step=lambda plan: look())
    tokenizer = chat_tokenizer(form) if form else Tokenizer(byte_backend(), TEMPLATE, {"eos_token": "<eos>"})
    engine = make_engine(model, seqs=seqs, blocks=400 if form else 200, vocab_size=tokenizer.backend.get_vocab_size())
    launched = launch_fake(engine, tokenizer, **settings)
    if task != "generate":
        (own,) = (each for each in TASKS if each.name == task)
        run_job(JobConfig(input=source, output=target, resume=True, quiet=True, task=own, **options), LLM.of(launched))
    else:
        run_file(source, target, model=LLM.of(launched), resume=True, **options)
    return time.process_time()


def _killer(part: Path, growth: float, seconds: float) -> Callable[[], None]:
    before, is_set = size(part), False

    def look() -> None:
        nonlocal is_set
        if not is_set and size(part) >= before + growth:
            is_set = True
            signal.setitimer(signal.ITIMER_PROF, max(seconds, 1e-6))

    return look


def size(part: Path) -> int:
    """0 where no part file is: the job may rename it at any moment, so nothing asks before it looks."""
    try:
        return part.stat().st_size
    except FileNotFoundError:
        return 0


def with_full_disk(source: str, target: str, max_bytes: int) -> str | None:
    """Run the job while the system refuses to let any file grow further than this; returns the error message."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    try:
        main(source, target)
    except UserError as error:
        return str(error)
    return None


def peak(source: str) -> int:
    """Run a job that holds some thousand rows at once; the most memory in KiB that the process has taken."""
    main(source, f"{source}.jsonl", seqs=64, settings={"max_inflight_bytes": "2MiB"})
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
