"""Opens the input of a job."""

import sys

from rosebatch.config.byte_sizes import in_bytes
from rosebatch.core.errors import FlagError, printable
from rosebatch.io.columns import Columns
from rosebatch.io.images.policy import MediaPolicy
from rosebatch.io.reader import PromptReader
from rosebatch.job.config import JobConfig


def open_input(job: JobConfig) -> PromptReader:
    """The rows of a job.

    Raises:
        UserError: the input is missing or unreadable, or a flag about it is impossible.
    """
    columns = Columns.of(
        job.prompt_column, job.id_column, job.columns, job.prompt_template, job.system_prompt, job.keep_prompt
    )
    if job.result_column == "":
        raise FlagError("--result-column needs a name")
    if job.keep_prompt and job.result_column == "prompt":
        raise FlagError("--result-column prompt: --keep-prompt needs this name; choose another")
    limit = in_bytes(job.max_row_bytes)
    media = MediaPolicy.of(job.media_root, job.media_domains)
    reader = PromptReader(job.input, job.sampling, job.input_format, job.result_column, columns, job.task, limit, media)
    if job.reorder_fields:
        reader.reorder_fields()
    return reader


def require_free_names(reader: PromptReader) -> None:
    """Check that results overwrite no field of the input. Warn of columns that were named, and no row has.

    Raises:
        FlagError: they would.
    """
    for name in reader.require_free_names():
        flag = "--id-column" if name == reader.columns.id else "--columns"
        sys.stderr.write(f"rosebatch: warning: {flag} {printable(name)}: no row of {printable(reader.source)} has it\n")
