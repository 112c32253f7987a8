"""Runs a job over the fake model as a process: ``INPUT OUTPUT``. It resumes if there is a part file."""

import os
import resource
import sys
import time
from multiprocessing.connection import Connection
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


def with_full_disk(source: str, target: str, max_bytes: int, errors: Connection) -> None:
    """Run the job while no file can be larger than this; send the error message, or None."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    try:
        main(source, target)
        errors.send(None)
    except UserError as error:
        errors.send(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
