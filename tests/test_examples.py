"""The example inputs of the README and of ``make demo``."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import PromptRow
from rosebatch.model.source import DEMO_INSTALL, DEMO_PACKAGE

FOLDER = Path(__file__).resolve().parents[1] / "examples"
EXAMPLES = FOLDER / "prompts.jsonl"


@pytest.mark.parametrize(
    ("name", "is_batch"), [("prompts.jsonl", False), ("openai_batch.jsonl", True), ("regression.jsonl", False)]
)
def test_every_example_is_a_good_row(name, is_batch):
    """The first thing that anyone tries must not fail."""
    reader = PromptReader(str(FOLDER / name), {})
    assert reader.is_batch is is_batch
    rows = list(reader)
    assert len(rows) >= 3
    assert [row for row in rows if not isinstance(row, PromptRow)] == []


def test_the_examples_show_each_kind_of_row():
    """A chat, a plain prompt, a stop string, sampling of its own, and a field that is carried."""
    rows = list(PromptReader(str(EXAMPLES), {}))
    assert any(row.messages for row in rows)
    assert any(row.prompt for row in rows)
    assert any(row.sampling.stop for row in rows)
    assert any(row.has_seed and not row.sampling.greedy for row in rows)
    assert any(set(row.metadata) - {"id"} for row in rows)
    assert len({row.metadata["id"] for row in rows}) == len(rows)


@pytest.mark.skipif(
    importlib.util.find_spec(DEMO_PACKAGE) is None, reason=f"the demo model is not installed: {DEMO_INSTALL}"
)
def test_the_pipeline(tmp_path):
    """Exit code 0 where all answers are as expected, 1 where one is not, and what it was."""
    (tmp_path / "rosebatch").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rosebatch "$@"\n')
    (tmp_path / "rosebatch").chmod(0o755)
    for name in ("pipeline.sh", "regression.jsonl"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    environment = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(str(FOLDER.parent / part) for part in (".", "kernels")),
        "OUT": str(tmp_path / "out"),
        "FLAGS": "--device cpu",
    }

    def run():
        command = ["bash", str(tmp_path / "pipeline.sh")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("3 of 3 answers are as expected\n")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"answers.jsonl", "report.json", "report.html"}
    rows = [json.loads(line) for line in (tmp_path / "regression.jsonl").read_text().splitlines()]
    rows[1]["expected"] = "Osaka"
    (tmp_path / "regression.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run()
    assert done.returncode == 1
    assert "japan: expected 'Osaka', got " in done.stdout
