"""``python -m benchmarks.same_bytes``: its rows, its kills, and what it finds."""

import json
import sys

import pytest

from benchmarks import same_bytes
from benchmarks.same_bytes_vllm import compare

# Each process waits to be killed some rows later than the last, if it is told to. Answers are others with -dp.
_COMMAND = """
import json, sys, time
from pathlib import Path
given = sys.argv[2:]
rows, target, report = (Path(given[n]) for n in (0, 2, 4))
part, starts = Path(f"{target}.part"), target.parent / "starts"
starts.write_text("x" + (starts.read_text() if starts.exists() else ""))
stop = "--stop" in given and int(given[given.index("--stop") + 1]) * len(starts.read_text())
with part.open("w") as file:
    for n, row in enumerate(map(json.loads, rows.read_text().splitlines())):
        if stop and n == stop:
            time.sleep(600)
        line = {"id": row["id"], "index": n, "text": "x" * 50, "other": "-dp" in given}
        file.write(json.dumps(line, separators=(",", ":")) + "\\n")
        file.flush()
part.rename(target)
report.write_text(json.dumps({"elapsed_s": 2.0, "preemptions": 3 * ("--kv-cache-memory" in given)}))
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """``python -m rosebatch`` is another program here."""
    package = tmp_path / "rosebatch"
    package.mkdir()
    package.joinpath("__init__.py").touch()
    package.joinpath("__main__.py").write_text(_COMMAND)
    monkeypatch.chdir(tmp_path)


def test_rows_that_differ_are_found(command, monkeypatch, capsys):
    """Each way is compared with the first job, by the rows' ids: a reversed file has its lines in another order."""
    ways = ["reversed", "alone", "preempting", "two workers"]
    monkeypatch.setattr(sys, "argv", ["same_bytes", "--model", "m", "--rows", "20", "--ways", *ways])
    same_bytes.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["ways"]
    assert {name: (way["rows"], way["differ"], way["preemptions"]) for name, way in found.items()} == {
        "reversed": (20, 0, 0),
        "alone": (3, 0, 0),
        "preempting": (20, 0, 3),
        "two workers": (20, 20, 0),
    }


def test_kills_come_midway(command, tmp_path):
    """Killed after its last row, or before its first one, a job would show nothing."""
    folder = tmp_path / "job"
    folder.mkdir()
    rows = [{"id": str(number)} for number in range(10, 70)]
    outcome = same_bytes.run(same_bytes.Way(), rows, folder, [])
    size = sum(map(len, outcome.lines.values()))
    assert same_bytes.run(same_bytes.Way(kills=3), rows, folder, ["--stop", "15"], size).kills == 3


def test_a_command_that_fails_is_told(command, tmp_path, monkeypatch, capsys):
    """One way that a device does not serve ended all others."""
    main = tmp_path / "rosebatch" / "__main__.py"
    main.write_text(_COMMAND.replace("given = ", "if '--swap' in sys.argv: sys.exit(2)\ngiven = "))
    monkeypatch.setattr(sys, "argv", ["same_bytes", "--model", "m", "--rows", "5", "--ways", "swapping", "again"])
    same_bytes.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["ways"]
    assert found["swapping"] == {"failed": 2}
    assert found["again"]["differ"] == 0


def test_rows_cross_tiles_and_begin_alike():
    """Rows of one length, or without a common beginning, would meet few of the causes."""
    rows = same_bytes.make_rows(200, longest=300, vocab=100, max_tokens=16)
    prompts = [row["prompt_token_ids"] for row in rows]
    assert {1, 63, 64, 65, 255, 256, 257} <= set(map(len, prompts))
    begins = [tuple(prompt[:64]) for prompt in prompts if len(prompt) > 64]
    assert max(map(begins.count, begins)) > len(begins) / 3


def test_shares_of_another_engine_s_rows():
    """Reversed outputs compared in the wrong order would all differ, and an engine by the batch must be seen."""
    rows = same_bytes.make_rows(32, longest=20, vocab=50, max_tokens=8)

    def by_batch(batch):
        return [(row["id"], len(batch) == 1) for row in batch]

    assert compare(lambda batch: [row["id"] for row in batch], rows)["differ"] == {
        "again": 0,
        "reversed": 0,
        "alone": 0,
    }
    assert compare(by_batch, rows)["differ"] == {"again": 0, "reversed": 0, "alone": 1}
