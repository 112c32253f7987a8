"""The examples of the README and of ``make demo``."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import PromptRow
from rosebatch.model.source import DEMO_INSTALL, DEMO_PACKAGE

FOLDER = Path(__file__).resolve().parents[1] / "examples"
EXAMPLES = FOLDER / "prompts.jsonl"
needs_demo_model = pytest.mark.skipif(
    importlib.util.find_spec(DEMO_PACKAGE) is None, reason=f"the demo model is not installed: {DEMO_INSTALL}"
)
# The checkout's own modules, for commands that are run elsewhere.
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(str(FOLDER.parent / part) for part in (".", "kernels"))}


@pytest.mark.parametrize(
    ("name", "is_batch"),
    [
        ("prompts.jsonl", False),
        ("openai_batch.jsonl", True),
        ("regression.jsonl", False),
        ("structured_output.jsonl", False),
    ],
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
    assert any(row.sampling.seed is not None and not row.sampling.greedy for row in rows)
    assert any(set(row.metadata) - {"id"} for row in rows)
    assert len({row.metadata["id"] for row in rows}) == len(rows)


@needs_demo_model
def test_the_pipeline(tmp_path):
    """Exit code 0 where all answers are as expected, 1 where one is not, and what it was."""
    (tmp_path / "rosebatch").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rosebatch "$@"\n')
    (tmp_path / "rosebatch").chmod(0o755)
    for name in ("pipeline.sh", "regression.jsonl"):
        (tmp_path / name).write_text((FOLDER / name).read_text())
    environment = ENVIRONMENT | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
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
    # What it makes of another answer, and of rosebatch's exit code, takes no model.
    answers = tmp_path / "out" / "answers.jsonl"
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    rows[1]["expected"] = "Osaka"
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rosebatch").write_text("#!/bin/sh\n")
    done = run()
    assert done.returncode == 1
    assert "japan: expected 'Osaka', got " in done.stdout
    (tmp_path / "rosebatch").write_text("#!/bin/sh\nexit 3\n")
    done = run()
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.thorough
@needs_demo_model
def test_structured_output():
    """Every answer has the form that its row asks for."""
    source = FOLDER / "structured_output.jsonl"
    command = [sys.executable, "-m", "rosebatch", "generate", str(source), "--device", "cpu", "--quiet"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["id"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert list(rows) == ["person", "review", "cities", "date", "sky"]
    assert {row["finish_reason"] for row in rows.values()} == {"stop"}
    assert set(json.loads(rows["person"]["text"])) == {"name", "born", "city"}
    assert json.loads(rows["review"]["text"])["mood"] in ("positive", "neutral", "negative")
    assert len(json.loads(rows["cities"]["text"])["cities"]) == 3
    assert re.fullmatch("1945-[0-9]{2}-[0-9]{2}", rows["date"]["text"])
    assert rows["sky"]["text"] in ("red", "green", "blue")


@pytest.mark.thorough
@needs_demo_model
def test_parquet(tmp_path):
    """The folder of parts is read back as one table, with the column that was carried through."""
    command = [sys.executable, str(FOLDER / "parquet.py"), "--device", "cpu", "--quiet"]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"3 files, 10 answers of \d+ tokens in all, 10 right\n", done.stdout)
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.parquet", "answers"}
    assert len(list((tmp_path / "answers").iterdir())) == 3
