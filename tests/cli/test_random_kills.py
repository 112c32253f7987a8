"""Whole jobs that are killed at random moments end like jobs that were never killed."""

import sys

import pytest

from tests.cli.random_kills import KINDS, kill_jobs

# Kills of each kind. ``python -m tests.cli.random_kills --kills 100`` makes more, of all kinds.
KILLS = 1
# Those of single processes are killed in test_signals_at_any_moment.py and tests/job, workers of one process each in
# test_workers.py, those of one worker's ranks in test_ranks.py, those of Ray in tests/ray.
ELSEWHERE = ("generate", "parquet", "dp", "tp", "ray")
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc"),
]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.removesuffix("_parquet") not in ELSEWHERE])
def test_random_kills(kind):
    """Results were lost or others, and temporary files and processes stayed."""
    assert sum(kill_jobs(kind, KILLS, seed=0).values()) == KILLS
