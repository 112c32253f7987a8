"""Measuring the parent: all rows pass through it. No test measures time."""

import json
import sys

import pytest

from benchmarks import parent_load


def test_all_parts_are_counted(monkeypatch, capsys):
    """A part that is renamed would count as ``other``, and bytes that go another way not at all."""
    arguments = ["--workers", "2", "--rows", "1000", "--line-bytes", "300", "--result-bytes", "500", "--batch", "50"]
    monkeypatch.setattr(sys, "argv", ["parent_load", *arguments])
    parent_load.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["rows"], found["workers"]) == (1000, 2)
    parts = {"before", "read", "hand out", "send", "receive", "wait", "write", "flush", "finish", "other"}
    assert found["us_per_row"].keys() == parts
    assert all(found["us_per_row"][part] > 0 for part in parts - {"other"})
    assert sum(found["us_per_row"].values()) == pytest.approx(
        found["us_per_row"]["before"] + found["us_per_row"]["finish"] + found["us_per_row_while_workers_run"], abs=0.1
    )
    assert 300 < found["bytes_per_row"]["sent"] < 380
    assert 500 < found["bytes_per_row"]["received"] < 620
