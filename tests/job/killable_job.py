"""Runs a job over the fake model as a process: ``INPUT OUTPUT SECONDS``, where SECONDS is the time of every step.

It resumes if there is a part file.
"""

import sys
import time
from pathlib import Path

from rosebatch.io.output import FileOutput, write_jsonl
from rosebatch.io.part_file import PartFile
from rosebatch.io.reader import PromptReader
from rosebatch.io.results import PlainShape
from rosebatch.job.run import run_job
from rosebatch.report.progress import Progress
from rosebatch.text.tokenizer import Tokenizer
from tests.job.fake_model import FakeModel, byte_backend, make_engine


def main(source: str, target: str, seconds: float) -> None:
    """Run the job to its end."""
    path = Path(target)
    part_path = path.with_name(path.name + ".part")
    part = PartFile.reopen(part_path) or PartFile.create(part_path, {})
    run_job(
        make_engine(FakeModel(before_step=lambda plan: time.sleep(seconds)), seqs=8, blocks=200),
        Tokenizer(byte_backend()),
        PromptReader(source, {}).rows(lambda: None),
        FileOutput(part, path, write_jsonl),
        progress=Progress(None, enabled=False),
        shape=PlainShape(),
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
