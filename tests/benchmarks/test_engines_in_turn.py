"""Engines are loaded in turn, so that none sees another's memory grow, and measured in turn."""

import os
import sys
from pathlib import Path

from benchmarks.engines_in_turn import measure_in_turn

ENGINE = """
import sys
from benchmarks.engines_in_turn import Turn
name, path = sys.argv[1:]
turn = Turn()
print("what an engine says")
def note(what):
    with open(path, "a") as notes:
        notes.write(f"{what} {name}\\n")
note("loaded")
turn.wait()
note("measured")
turn.answer({"name": name})
"""


def test_no_engine_loads_or_measures_beside_another(tmp_path):
    """Two of vLLM, loaded together, failed: the memory that one looked at was taken by the other."""
    notes = tmp_path / "notes"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    engines = {name: ([sys.executable, "-c", ENGINE, name, str(notes)], environment) for name in "ab"}
    assert list(measure_in_turn(engines)) == [("a", {"name": "a"}), ("b", {"name": "b"})]
    assert notes.read_text().splitlines() == ["loaded a", "loaded b", "measured a", "measured b"]


def test_an_engine_that_does_not_start():
    """The others are measured all the same."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    engines = {"a": ([sys.executable, "-c", "raise SystemExit(3)"], environment)}
    engines["b"] = ([sys.executable, "-c", ENGINE, "b", os.devnull], environment)
    assert list(measure_in_turn(engines)) == [("a", {"failed": 3}), ("b", {"name": "b"})]
