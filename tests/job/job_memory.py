"""Runs a job over the fake model as a process, and prints what its rows took at most: ``SOURCE TARGET SETTINGS``."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rosebatch.llm.llm import LLM
from rosebatch.llm.run_file import run_file
from rosebatch.text.tokenizer import Tokenizer
from tests.helpers.byte_tokenizer import byte_backend
from tests.job.fake_model import FakeModel, launch_fake, make_engine
from tests.job.fuzz_lines import CHATTY

ROOT = Path(__file__).resolve().parents[2]


def peak(folder: Path, lines: Sequence[str], name: str, settings: dict[str, Any]) -> int:
    """Bytes that the rows of a file take at most, in a process of their own.

    Args:
        folder: of the input and the output.
        lines: of the input.
        name: of the output.
        settings: see ``main``.
    """
    source = folder / "in.jsonl"
    source.write_text("\n".join(lines), encoding="utf-8")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.job.job_memory", source, folder / name, json.dumps(settings)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["completed"] + sum(told["errors"].values()) == len(lines)
    return int(told["peak"])


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
