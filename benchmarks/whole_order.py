"""How many prompt tokens a job computes where rows share documents that are far apart in the file.

``python -m benchmarks.whole_order [--documents 2000] [--questions 50] [--order shuffled]`` runs whole jobs over the
engine and a fake model that takes no time: one that sorts the whole file, one that sorts windows of rows alone. A token
is a byte. The KV cache has room for less than a quarter of the documents.

The last line is JSON: shares of the prompt tokens that were computed, and CPU seconds.
"""

import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.options import options
from rosebatch.job.service import Work
from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.fake_model import TEMPLATE, FakeModel, launch_fake, make_engine

_BLOCK = 16
_SHORT = 16
_OUTPUT = 8


def run(texts: Sequence[str], seqs: int, blocks: int) -> dict[str, Any]:
    """Run a job on these prompts."""
    length = len(texts[0])
    limits = {"seqs": seqs, "budget": 8192, "blocks": blocks, "block_size": _BLOCK, "max_model_len": length + _OUTPUT}
    engine = make_engine(FakeModel(), **limits)
    llm = LLM.of(launch_fake(engine, Tokenizer(byte_backend(), TEMPLATE, {"eos_token": "<eos>"})))
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "prompts.jsonl", Path(folder) / "answers.jsonl"
        source.write_text("".join(json.dumps({"prompt": text, "max_tokens": _OUTPUT}) + "\n" for text in texts))
        began = time.process_time()
        run_file(source, target, model=llm, quiet=True)
    # A last token is never computed.
    computed = engine.stats.computed_tokens - (_OUTPUT - 1) * len(texts)
    return {"computed": round(computed / length / len(texts), 4), "cpu_s": round(time.process_time() - began, 1)}


def main() -> None:
    """Run both jobs."""
    sizes = {"documents": 2000, "questions": 50, "length": 256, "seqs": 256}
    given = options(__doc__, order=("shuffled", "by-question"), **sizes)
    numbers = random.Random(0)

    def text(length: int) -> str:
        return "".join(numbers.choices("abcdefghijklmnop", k=length))

    documents = [text(given.length) for _ in range(given.documents)]
    texts = [
        document + question for question in [text(_SHORT) for _ in range(given.questions)] for document in documents
    ]
    if given.order == "shuffled":
        numbers.shuffle(texts)
    # As an 8B model on a GPU of 80 GB has, for documents of a thousand tokens.
    blocks = max(given.documents * given.length // _BLOCK * 9 // 40, 2 * given.seqs)
    whole = run(texts, given.seqs, blocks)
    with mock.patch.object(Work, "sort_rows", lambda work, max_inflight_bytes: None):
        windows = run(texts, given.seqs, blocks)
    least = (given.length / given.questions + _SHORT) / (given.length + _SHORT)
    result = {"rows": len(texts), "least": round(least, 4), "whole_file": whole, "windows": windows}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
