"""A job over the fake model in a process of its own: ``INPUT OUTPUT SECONDS``, seconds of every step.

It continues an earlier one that was killed.
"""

import sys
import time

from rosebatch.job.run import run_file
from rosebatch.llm import LLM
from rosebatch.text.tokenizer import Tokenizer
from tests.job.fake_model import FakeModel, byte_backend, launch_fake, make_engine


def main(source: str, target: str, seconds: float) -> None:
    """Run it to its end."""
    model = FakeModel(before_step=lambda plan: time.sleep(seconds))
    launched = launch_fake(make_engine(model, seqs=8, blocks=200), Tokenizer(byte_backend()))
    run_file(source, target, model=LLM.of(launched), resume=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
