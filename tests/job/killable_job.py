"""Runs a job over the fake model in a process of its own. It resumes if there is a part file."""

import os
import resource
import time
from typing import Any

from rosebatch.core.errors import UserError
from rosebatch.io.tasks.embed import Embed
from rosebatch.job.config import JobConfig
from rosebatch.job.run import run_job
from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.fake_model import TEMPLATE, FakeModel, launch_fake, make_engine
from tests.job.tool_templates import chat_tokenizer


def main(
    source: str, target: str, seconds: float = 0.0, form: str | None = None, *, embeds: bool = False, **options: Any
) -> None:
    """Run the job to its end, at a time that is always the same; each step takes at least so many seconds.

    With a form, the tokenizer and the template are those of ``tests.job.tool_templates``.
    """
    os.environ["SOURCE_DATE_EPOCH"] = "1700000000"
    model = FakeModel(before_step=lambda plan: time.sleep(seconds))
    tokenizer = chat_tokenizer(form) if form else Tokenizer(byte_backend(), TEMPLATE, {"eos_token": "<eos>"})
    engine = make_engine(model, seqs=8, blocks=400 if form else 200, vocab_size=tokenizer.backend.get_vocab_size())
    launched = launch_fake(engine, tokenizer)
    if embeds:
        job = JobConfig(input=source, output=target, resume=True, quiet=True, task=Embed(), **options)
        run_job(job, LLM.of(launched))
    else:
        run_file(source, target, model=LLM.of(launched), resume=True, **options)


def with_full_disk(source: str, target: str, max_bytes: int) -> str | None:
    """Run the job while the system refuses to let any file grow further than this; returns the error message."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    try:
        main(source, target)
    except UserError as error:
        return str(error)
    return None


def peak(source: str) -> int:
    """Run a job; the most memory in KiB that the process has taken."""
    main(source, f"{source}.jsonl")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
