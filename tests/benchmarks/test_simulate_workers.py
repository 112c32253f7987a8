"""Simulated jobs of many workers: each figure against what arithmetic says, and small jobs exactly."""

import sys
from dataclasses import replace

import pytest

from benchmarks import simulate_workers
from benchmarks.simulate_workers import Job, simulate

# All answers have 32 tokens: two windows of 16 steps.
EVEN = Job(workers=4, rows=4 * 16 * 10, slots=16, mean_tokens=32.0, sigma=0.0)
LONG_TAIL = replace(EVEN, rows=4 * 16 * 60, mean_tokens=256.0, sigma=1.0, seed=3)


def test_answers_of_one_length():
    """Ten rows for each seat, one after the other: what is more than that is the simulation's own mistake."""
    found = simulate(EVEN)
    assert found.ideal_seconds == pytest.approx(10 * 32 * EVEN.step_seconds(16))
    # Two messages to and fro.
    assert found.ideal_seconds < found.seconds < found.ideal_seconds + 0.01
    assert found.idle < 0.01
    assert (found.deaths, found.again) == (0, 0)
    # A message of each worker each time that its rows are done.
    assert found.seconds * found.parent_busy * 1e6 == pytest.approx(
        640 * EVEN.parent_row_us + 4 * 10 * EVEN.parent_message_us
    )


def test_the_same_job_has_the_same_outcome():
    """A figure that changes from run to run cannot be compared."""
    assert simulate(LONG_TAIL) == simulate(LONG_TAIL)
    assert simulate(LONG_TAIL) != simulate(replace(LONG_TAIL, seed=4))


def test_long_answers():
    """The wait for the longest answer at the end is a small share of a long job only."""
    short, found = simulate(LONG_TAIL), simulate(replace(LONG_TAIL, rows=4 * 16 * 200))
    assert found.idle < 0.03 < short.idle
    assert short.ideal_seconds / short.seconds < 0.9 < found.ideal_seconds / found.seconds < 1


def test_known_lengths():
    """The longest begin first then: no worker waits for a long answer that was begun last."""
    unknown, known = simulate(LONG_TAIL), simulate(replace(LONG_TAIL, known=True))
    assert known.ideal_seconds == unknown.ideal_seconds
    assert known.seconds < 0.95 * unknown.seconds
    assert known.idle < 0.02 < unknown.idle


def test_deaths():
    """Rows that a dead process had begun are begun again, and every row is answered."""
    found = simulate(replace(LONG_TAIL, life_s=40.0, load_s=2.0))
    assert found.deaths > 3
    # A process has at most its seats of them, and what waits to be sent.
    assert 0 < found.again * LONG_TAIL.rows <= found.deaths * 2 * LONG_TAIL.slots
    assert found.seconds > simulate(LONG_TAIL).seconds


def test_a_parent_that_is_too_slow():
    """The workers wait for it: then it is busy all of the time, and the job takes its time."""
    found = simulate(replace(EVEN, parent_row_us=10_000.0))
    assert found.parent_busy > 0.9
    assert found.seconds > 640 * 0.01


def test_the_table(monkeypatch, capsys):
    """A line for each job, after the names of its columns."""
    arguments = ["--workers", "2", "4", "--rows-per-seat", "2", "--seats", "4", "--mean-tokens", "32"]
    monkeypatch.setattr(sys, "argv", ["simulate_workers", *arguments])
    simulate_workers.main()
    head, *lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [["2", "16"], ["4", "32"]]
    assert all(len(line) == len(head) for line in lines)
