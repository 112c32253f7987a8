"""What rows take stays within ``--max-inflight-bytes``, whatever they hold. A row that is larger runs alone."""

import json
import sys

import pytest

from tests.job.fuzz_lines import LIMIT, limit_lines, long_values
from tests.job.image_memory import peak_of_pages
from tests.job.job_memory import peak

# Lines that are read ahead, lines that are written, and what the C library keeps of memory that is free again.
REST = 64 << 20
MEGABYTE = "x" * 1_000_000
SHORT = {"seqs": 64, "blocks": 1000, "block_size": 16, "budget": 4096, "max_model_len": LIMIT}
LONG = {"seqs": 64, "blocks": 8000, "block_size": 16, "budget": 1 << 20, "max_model_len": 101_000}
MANY = {"seqs": 128, "blocks": 8000, "block_size": 16, "budget": 1 << 14, "max_model_len": 300}
SCORED = {"n": 16, "max_tokens": 30, "logprobs": 20, "prompt_logprobs": 20, "echo": True, "temperature": 1}
NESTS = "[" + ",".join(["[" * 500 + "]" * 500] * 900) + "]"

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")]


def plain(count, values):
    return [json.dumps({"max_tokens": 2, **values, "id": i}) for i in range(count)]


# Lines, the engine's limits, and a line that takes as much as any.
FILES = {
    "10 MB everywhere": (lambda: limit_lines("jsonl", long_values(), 30), SHORT, {"seed": "é" * 10_000_000}),
    "failed": (lambda: plain(300, {"prompt": "", "doc": MEGABYTE}), SHORT, None),
    "carried": (lambda: plain(300, {"prompt": "a", "doc": MEGABYTE}), SHORT, None),
    "too long": (lambda: plain(12, {"prompt": MEGABYTE}), SHORT, None),
    "cut": (lambda: plain(12, {"prompt": MEGABYTE, "truncate_prompt_tokens": 9, "echo": True}), SHORT, None),
    "chats": (lambda: plain(12, {"messages": [{"role": "user", "content": MEGABYTE}]}), SHORT, None),
    "long": (lambda: plain(30, {"prompt": MEGABYTE[:100_000], "echo": True}), LONG, None),
    "deep": (lambda: [f'{{"prompt": "a", "doc": {NESTS}}}'] * 12, SHORT, None),
    "lists": (lambda: [f'{{"prompt": "a", "doc": [{"[]," * 300_000}1]}}'] * 16, SHORT, None),
    "ids": (lambda: plain(20, {"prompt_token_ids": [7] * 500_000}), SHORT, None),
    "logprobs": (lambda: plain(24, {"prompt": "y" * 100, **SCORED}), MANY, None),
}
# OpenAI batches have no carried fields.
BATCHES = {
    "10 MB everywhere": (lambda: limit_lines("openai", long_values(), 30), SHORT, {"custom_id": "é" * 10_000_000}),
    "cut": (lambda: requests(12, {"prompt": MEGABYTE, "truncate_prompt_tokens": 9, "echo": True}), SHORT, None),
    "logprobs": (lambda: requests(24, {"prompt": "y" * 100, **SCORED}), MANY, None),
}


def requests(count, body):
    return [json.dumps({"custom_id": str(i), "body": {"max_tokens": 2, **body}}) for i in range(count)]


def require_bounded(folder, content, name, kind, bound=128 << 20):
    make_lines, limits, largest = content
    lines, column = make_lines(), "out" if kind == "jsonl" else None
    options = {"input_format": kind, "sampling": {"max_tokens": 3}, "result_column": column}
    settings = {"limits": limits, "launch": {"max_inflight_bytes": bound}, "options": options}
    alone = peak(folder, lines[:1] if largest is None else [json.dumps(largest)], name, settings)
    taken = peak(folder, lines, name, settings)
    # One row is prepared while another, which may be as large, is served.
    print(f"bound {bound >> 20} MiB, one row {alone >> 20} MiB, all rows {taken >> 20} MiB")  # noqa: T201
    assert taken <= bound + 2 * alone + REST


@pytest.mark.parametrize("content", FILES)
def test_memory_of_rows(tmp_path, content):
    """A file of 10 MB rows took 809 MiB where 128 MiB were allowed: errors held their lines, many prompts waited.

    Whatever is so long, a prompt, a stop string, a role or a carried field, may not end the job.
    """
    require_bounded(tmp_path, FILES[content], "out.jsonl", "jsonl")


@pytest.mark.parametrize("content", ["10 MB everywhere", "carried", "lists", "logprobs"])
def test_memory_of_rows_in_parquet(tmp_path, content):
    """The table is written in pieces of bounded size."""
    require_bounded(tmp_path, FILES[content], "out.parquet", "jsonl")


@pytest.mark.parametrize("content", BATCHES)
def test_memory_of_a_batch(tmp_path, content):
    """Requests of the API have no other path."""
    require_bounded(tmp_path, BATCHES[content], "out.jsonl", "openai")


def test_memory_of_pages(tmp_path):
    """What is loaded ahead counts, and so does what the engine has: 24 rows of 20 pages would take 196 MiB."""
    bound, row = 32 << 20, 20 * 320 * 448 * 3
    taken = peak_of_pages(tmp_path, 24, 20, (320, 448), bound, threads=2)
    print(f"serving {taken.serving >> 20} MiB, decoding {taken.decoding >> 20} MiB")  # noqa: T201
    assert taken.serving <= bound + 2 * row
    # Two processes with nothing but their libraries and an image.
    assert taken.decoding <= 2 * (40 << 20)
