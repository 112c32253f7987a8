"""The simulation of documents that are far apart: figures that arithmetic gives."""

import json
import sys

import pytest

from benchmarks import whole_order


@pytest.mark.parametrize("order", ["shuffled", "by-question"])
def test_each_document_is_computed_once(monkeypatch, capsys, order):
    """The notebook's figures are of this script."""
    flags = ["--documents", "60", "--questions", "6", "--length", "64", "--seqs", "2", "--order", order]
    monkeypatch.setattr(sys, "argv", ["whole_order", *flags])
    whole_order.main()
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == 360
    assert found["least"] == pytest.approx((64 / 6 + 16) / 80, abs=1e-4)
    assert found["whole_file"]["computed"] == pytest.approx(found["least"], abs=0.02)
    assert found["windows"]["computed"] > 0.7
