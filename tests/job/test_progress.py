"""Progress where stderr is not a terminal: few plain lines."""

import sys
import time

import pytest

from rosebatch.job.report.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move by hand."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def forward(seconds):
        now[0] += seconds

    return forward


def test_line(clock):
    """Rows, rate, failures and, with a known total, the remaining time."""
    progress = Progress(20)
    for _ in range(3):
        progress.advance(tokens=50)
    clock(10)
    progress.advance(failed=True)
    assert progress.line() == "4/20 rows, 15 output tokens/s, 1 failed, ETA 40 s"


def test_line_without_a_total(clock):
    """Rows from stdin have no total and no remaining time."""
    progress = Progress(None)
    progress.advance(tokens=30)
    clock(3)
    assert progress.line() == "1 rows, 10 output tokens/s"


def test_line_before_the_first_row(clock):
    """Guards against a division by zero rows."""
    progress = Progress(20)
    clock(1)
    assert progress.line() == "0/20 rows, 0 output tokens/s"


@pytest.mark.parametrize("enabled", [True, False], ids=["usual", "quiet"])
def test_a_plain_line_every_ten_seconds(clock, capsys, enabled):
    """Logs must not fill with one line for each row; --quiet prints nothing at all."""
    with Progress(100, enabled=enabled) as progress:
        for _ in range(25):
            clock(1)
            progress.advance(tokens=4)
    told = "10/100 rows, 4 output tokens/s, ETA 90 s\n20/100 rows, 4 output tokens/s, ETA 80 s\n"
    assert capsys.readouterr() == ("", told if enabled else "")


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    """It must work without a total and print nothing to stdout."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(None) as progress:
        progress.advance(tokens=4)
        progress.advance(failed=True)
    assert capsys.readouterr().out == ""


def test_a_line_of_several_devices(clock):
    """A GPU that does less than the others must show."""
    progress = Progress(20, places=["GPU 0", "GPU 1"])
    clock(2)
    progress.advance(3, tokens=30, place=0)
    progress.advance(1, tokens=10, failed=1, place=1)
    assert progress.line() == "4/20 rows, 20 output tokens/s, 1 failed, ETA 8 s, GPU 0 15 + GPU 1 5"


def test_a_bar_for_each_device(monkeypatch, capsys):
    """Rows count once for all and once for their device."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(20, places=["GPU 0", "GPU 1"]) as progress:
        progress.advance(3, tokens=4, place=1)
        assert [task.completed for task in progress._bar.tasks] == [3, 0, 3]
    assert capsys.readouterr().out == ""
