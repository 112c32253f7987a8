"""Progress where stderr is not a terminal: few plain lines."""

import os
import sys
import time
from collections import Counter

import pytest

from rosebatch.engine.metrics.outlook import Outlook, bin_of
from rosebatch.host.paths import may_reach_terminal
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
    assert progress.line() == "4/20 rows, 150 output tokens, 15/s, 1 failed, 0:00:40 left"


def test_line_without_a_total(clock):
    """Rows from stdin have no total and no remaining time."""
    progress = Progress(None)
    progress.advance(tokens=30)
    clock(3)
    assert progress.line() == "1 row, 30 output tokens, 10/s"


def test_line_before_the_first_row(clock):
    """Guards against a division by zero rows."""
    progress = Progress(20)
    clock(1)
    assert progress.line() == "0/20 rows, 0 output tokens, 0/s"


@pytest.mark.parametrize("enabled", [True, False], ids=["usual", "quiet"])
def test_a_plain_line_every_ten_seconds(clock, capsys, enabled):
    """Logs must not fill with one line for each row; --quiet prints nothing at all."""
    with Progress(100, enabled=enabled) as progress:
        for _ in range(25):
            clock(1)
            progress.advance(tokens=4)
            progress.tick()
    told = "10/100 rows, 40 output tokens, 4/s, 0:01:30 left\n20/100 rows, 80 output tokens, 4/s, 0:01:20 left\n"
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
    assert progress.line() == "4/20 rows, 40 output tokens, 20/s, 1 failed, 0:00:08 left, GPU 0 15 + GPU 1 5"


def test_a_bar_for_each_device(monkeypatch, capsys, clock):
    """Rows count once for all and once for their device."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(20, places=["GPU 0", "GPU 1"]) as progress:
        clock(1)
        progress.advance(3, tokens=4, place=1)
        progress.tick()
        assert [task.completed for task in progress._bar.tasks] == pytest.approx([3 / 20, 0, 3])
        assert progress._bar.tasks[0].fields["told"] == "3/20 rows, 4 output tokens, 4/s, 0:00:06 left"
    assert capsys.readouterr().out == ""


def test_tokens_count_as_they_come(clock):
    """Where all rows finish together it said 0/400 and no rate for as long as they ran."""
    progress = Progress(400)
    done = Outlook(finished=Counter({9: 7}), output_tokens=900, prompt_tokens=500, prefill_seconds=3, decode_seconds=5)
    progress.watch(lambda: done)
    clock(11)
    # Of 512 tokens each, 52 are there; prompts took a second and a token 20 ms.
    running = Outlook(
        *(1, 400, 400, Counter({bin_of(52): 400}), 0, Counter({bin_of(52): 400 * 52}), 400 * 460, Counter(), Counter()),
        *(8000, 400 * 52, 1.0, 10.2, 51, 51 * 400, 51 * 400**2, 400 * 10.2, 11.0),
    )
    progress.watch(lambda: done)
    progress._look = lambda: done.plus(running)
    assert progress.line() == "0/400 rows, 20800 output tokens, 1891/s, 0:01:30 left"


def test_no_bar_where_results_are_printed(monkeypatch, capsys, clock):
    """Without an output file, a result began in the middle of the bar's line."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(4, bar=False) as progress:
        clock(10)
        progress.advance(tokens=20)
        progress.tick()
    assert capsys.readouterr().err == "1/4 rows, 20 output tokens, 2/s, 0:00:30 left\n"


def test_where_results_may_be_printed(tmp_path):
    """Beside ``| jq`` or ``-o -``, a bar and a result met on one line."""
    ends = [*os.pipe(), *os.openpty()]
    try:
        assert all(may_reach_terminal(f"/dev/fd/{end}") for end in ends)
    finally:
        for end in ends:
            os.close(end)
    (tmp_path / "answers.jsonl").touch()
    for path in (tmp_path / "answers.jsonl", tmp_path / "none", tmp_path, os.devnull, "s3://bucket/answers.jsonl"):
        assert not may_reach_terminal(path)
