"""Runs a job of rows with pages over the fake model, in a process of its own: what it takes of the host at most.

Beside what rows take in the process that serves them, that is what decodes: processes, and the memory that they share
with it.
"""

import ctypes
import gc
import json
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from benchmarks.image_preparation import PLACEHOLDER, PROCESSOR, TEMPLATE, picture
from rosebatch.job import images
from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file
from rosebatch.model.vision.qwen_vl import QwenProcessor
from rosebatch.model.vision.vision import Vision
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.forks import in_fork
from tests.helpers.json_lines import write_lines
from tests.job.fake_model import FakeModel, launch_fake, make_engine
from tests.job.job_memory import MMAP_THRESHOLD, kib

# Files, which rows take in turn.
_FILES = 40
_SECONDS = 0.02


class Taken(NamedTuple):
    """Bytes at most: of the process that serves, and of what decodes."""

    serving: int
    decoding: int


def peak_of_pages(folder: Path, rows: int, pages: int, size: tuple[int, int], bound: int, threads: int) -> Taken:
    """What rows take.

    Args:
        folder: for all files.
        rows: of the job.
        pages: of a row.
        size: width and height of a page in pixels, multiples of 32.
        bound: ``max_inflight_bytes``.
        threads: that load images, at most.
    """
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    for number in range(_FILES):
        (folder / f"{number}.jpg").write_bytes(picture(*size, number))
    numbers = range(rows * pages)
    parts = [{"type": "image", "image": f"{number % _FILES}.jpg"} for number in numbers]
    lines = [
        {"messages": [{"role": "user", "content": parts[first : first + pages]}], "max_tokens": 2}
        for first in range(0, rows * pages, pages)
    ]
    source = write_lines(folder / "in.jsonl", lines)
    few = write_lines(folder / "few.jsonl", lines[:1])
    # A token of Qwen3-VL is of 1,024 pixels.
    tokens = pages * (size[0] * size[1] // 1024) + 8
    return Taken(*in_fork(_measure, folder, source, few, tokens, bound, rows, threads))


def _measure(folder: Path, source: Path, few: Path, tokens: int, bound: int, rows: int, threads: int) -> Taken:
    images._MOST_THREADS = min(images._MOST_THREADS, threads)
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 20)
    # What is imported and set up once does not count.
    _run(folder, few, tokens, bound)
    gc.collect()
    gc.freeze()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, done, found = kib("VmRSS"), Event(), [0]

    def watch() -> None:
        while not done.wait(_SECONDS):
            found.append(_decoding())

    watcher = Thread(target=watch)
    watcher.start()
    try:
        report = _run(folder, source, tokens, bound)
    finally:
        done.set()
        watcher.join()
    assert report["completed"] == rows, report["errors"]
    return Taken((kib("VmHWM") - before) * 1024, max(found))


def _run(folder: Path, source: Path, tokens: int, bound: int) -> Any:
    backend = byte_backend()
    backend.add_special_tokens(["<image>"])
    sizes = {"seqs": 64, "blocks": tokens, "block_size": 64, "budget": 1 << 20, "max_model_len": tokens + 64}
    engine = make_engine(FakeModel(), vocab_size=PLACEHOLDER + 1, **sizes)
    launched = launch_fake(engine, Tokenizer(backend, TEMPLATE), max_inflight_bytes=bound)
    vision = Vision(
        PLACEHOLDER,
        ("visual",),
        lambda most, encode: QwenProcessor(folder, PLACEHOLDER, most),
        lambda weights: None,  # type: ignore[arg-type, return-value]
    )
    launched.plan.source.__dict__["sight"] = vision
    return run_file(source, source.with_suffix(".out.jsonl"), model=LLM.of(launched), media_root=folder).report


def _decoding() -> int:
    """Bytes of all processes that decode, and of the memory that they share with this one."""
    own = Path("/proc/self")
    children = {pid for task in (own / "task").iterdir() for pid in (task / "children").read_text().split()}
    taken = 0
    for pid in children:
        try:
            taken += kib("VmRSS", pid) << 10
        except (OSError, StopIteration):
            # It has ended.
            continue
    for link in (own / "fd").iterdir():
        try:
            if "rosebatch-pixels" in str(link.readlink()):
                taken += link.stat().st_blocks * 512
        except OSError:
            continue
    return taken
