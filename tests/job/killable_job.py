"""Runs a job over the fake model as a process: ``INPUT OUTPUT SECONDS``, where SECONDS is the time of every step.

It resumes if there is a part file.
"""

import sys
import time

from rosebatch.job.run import run_file
from rosebatch.llm import LLM
from rosebatch.text.tokenizer import Tokenizer
from tests.job.fake_model import FakeModel, byte_backend, launch_fake, make_engine


def main(source: str, target: str, seconds: float) -> None:
    """Run the job to its end."""
    model = FakeModel(before_step=lambda plan: time.sleep(seconds))
    launched = launch_fake(make_engine(model, seqs=8, blocks=200), Tokenizer(byte_backend()))
    run_file(source, target, model=LLM.of(launched), resume=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
