"""Runs a job over the fake model in a process of its own: what its rows take at most."""

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rosebatch.io.openai.lines import OUR_ERRORS
from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.helpers.forks import in_fork
from tests.helpers.json_lines import write_lines
from tests.job.fake_model import FakeModel, launch_fake, make_engine
from tests.job.fuzz_lines import CHATTY

# Of malloc.h.
MMAP_THRESHOLD = -3


def peak(folder: Path, lines: Sequence[str], name: str, settings: dict[str, Any]) -> int:
    """Bytes that the rows of a file take at most, in a process of their own.

    Args:
        folder: of the input and the output.
        lines: of the input.
        name: of the output.
        settings: ``limits`` of the engine, ``launch`` settings and ``options`` of the run.
    """
    source = folder / "in.jsonl"
    source.write_text("\n".join(lines), encoding="utf-8")
    told = in_fork(_measure, source, str(folder / name), settings)
    assert told["completed"] + sum(told["errors"].values()) == len(lines)
    assert not OUR_ERRORS & told["errors"].keys()
    return int(told["peak"])


def _measure(source: Path, target: str, given: dict[str, Any]) -> dict[str, Any]:
    """Run a small job first, so that what is imported and set up once does not count."""
    # The C library gives large blocks back at once. By itself it keeps more and more of them, as their order has it.
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1 << 20)
    _run(_small(source, given), f"{target}.small{Path(target).suffix}", given)
    # As in a process of its own: the more objects there are, the rarer are the collector's full rounds.
    gc.collect()
    gc.freeze()
    gc.collect()
    # The peak counts from here on.
    Path("/proc/self/clear_refs").write_text("5")
    before = kib("VmRSS")
    report = _run(source, target, given).report
    peak = (kib("VmHWM") - before) * 1024
    return {"peak": peak, "errors": report["errors"], "completed": report["completed"]}


def _run(source: Path, target: str, given: dict[str, Any]) -> Any:
    engine = make_engine(FakeModel(), **given.get("limits", {}))
    tokenizer = Tokenizer(byte_backend(), CHATTY, {"eos_token": "<eos>"})
    launched = launch_fake(engine, tokenizer, **given.get("launch", {}))
    return run_file(source, target, model=LLM.of(launched), **given.get("options", {}))


def _small(source: Path, given: dict[str, Any]) -> Path:
    if given.get("options", {}).get("input_format") == "openai":
        rows = [{"custom_id": "a", "body": {"prompt": "x", "max_tokens": 2, "logprobs": 1}}, {"custom_id": "b"}]
    else:
        rows = [{"prompt": "x", "max_tokens": 2, "doc": [1], "logprobs": 1}, {}]
    return write_lines(source.with_name(f"small-{source.name}"), rows)


def kib(name: str, process: str = "self") -> int:
    """A number of a process, as the system tells it in KiB."""
    status = Path(f"/proc/{process}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:"))
