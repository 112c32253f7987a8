"""``python -m benchmarks.adapters``: what it times, on a CPU."""

import json
import sys

import pytest

from benchmarks import adapters
from rosebatch.bench.scenario import configs_dir
from rosebatch.model.random_weights import RandomWeights
from rosebatch.ops.adapters import AdaptedLinear


@pytest.fixture
def lines(monkeypatch, capsys):
    """What it prints for a tiny model, and the adapters that rows of each step had."""
    numbers = {"rows": 4, "prompt": 5, "length": 3, "adapters": 3, "several": 2, "rank": 4, "repeats": 1}
    flags = {
        "model": configs_dir() / "models" / "tiny-llama.toml",
        "device": "cpu",
        "kv-cache-memory": "16MiB",
        **numbers,
    }
    command = ["adapters", *(str(part) for name, value in flags.items() for part in (f"--{name}", value))]
    monkeypatch.setattr(sys, "argv", command)
    used, add = [], AdaptedLinear._added

    def noted(self, out, x):
        used.append({slot for slot, _ in self.added.rows.of_slots})
        return add(self, out, x)

    monkeypatch.setattr(AdaptedLinear, "_added", noted)
    adapters.main()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()], used


def test_each_case_is_timed(lines):
    """Rows that were to choose among adapters had none, or all had one that was merged."""
    found, used = lines
    assert [line["loaded"] for line in found if "loaded" in line] == ["base", "merged", "3 adapters"]
    cases = [line["adapters"] for line in found if "adapters" in line]
    assert cases == [*found[-1]] == ["base", "merged", "none used", "1", "2", "3"]
    assert found[-1]["base"] == 1.0
    assert all(slots in used for slots in (set(), {1}, {1, 2}))
    assert any(3 in slots and len(slots) > 1 for slots in used)
    assert RandomWeights.added.__qualname__ == "RandomWeights.added", "weights are as they were"
