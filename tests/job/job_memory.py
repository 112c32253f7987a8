"""Runs a job over the fake model as a process, and prints what its rows took at most: ``SOURCE TARGET SETTINGS``."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

from rosebatch.job.run import run_file
from rosebatch.llm import LLM
from rosebatch.text.tokenizer import Tokenizer
from tests.job.fake_model import FakeModel, byte_backend, launch_fake, make_engine
from tests.job.fuzz_lines import CHATTY


def main(source: str, target: str, settings: str) -> None:
    """Run a small job first, so that what is imported and set up once does not count.

    Args:
        source: of the rows.
        target: of the results.
        settings: JSON with ``limits`` of the engine, ``launch`` settings and ``options`` of the run.
    """
    given: dict[str, Any] = json.loads(settings)
    _run(str(_small(Path(source), given)), f"{target}.small{Path(target).suffix}", given)
    gc.collect()
    # The peak counts from here on.
    Path("/proc/self/clear_refs").write_text("5")
    before = _kib("VmRSS")
    result = _run(source, target, given)
    peak = (_kib("VmHWM") - before) * 1024
    print(json.dumps({"peak": peak, "errors": result.report["errors"], "completed": result.report["completed"]}))  # noqa: T201


def _run(source: str, target: str, given: dict[str, Any]) -> Any:
    engine = make_engine(FakeModel(), **given.get("limits", {}))
    tokenizer = Tokenizer(byte_backend(), CHATTY, {"eos_token": "<eos>"})
    launched = launch_fake(engine, tokenizer, **given.get("launch", {}))
    return run_file(source, target, model=LLM.of(launched), **given.get("options", {}))


def _small(source: Path, given: dict[str, Any]) -> Path:
    if given.get("options", {}).get("input_format") == "openai":
        rows = [{"custom_id": "a", "body": {"prompt": "x", "max_tokens": 2, "logprobs": 1}}, {"custom_id": "b"}]
    else:
        rows = [{"prompt": "x", "max_tokens": 2, "doc": [1], "logprobs": 1}, {}]
    path = source.with_name(f"small-{source.name}")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _kib(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main(*sys.argv[1:])
