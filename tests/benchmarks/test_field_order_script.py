"""The figures of a template's order: exact, as the rows are drawn with one seed."""

import json
import sys

from benchmarks import field_order


def test_columns_of_few_values_are_computed_once(monkeypatch, capsys):
    """The notebook's figures are of this script."""
    monkeypatch.setattr(sys, "argv", ["field_order", "--rows", "200", "--length", "32"])
    field_order.main()
    found = json.loads(capsys.readouterr().out)
    # Of 140 tokens of a prompt, the front has 25 and each line of a column 39.
    assert 0 < found["as_given"] < 30 / 140
    assert (25 + 32) / 140 < found["reordered"] < (25 + 2 * 39) / 140
