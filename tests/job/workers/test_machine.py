"""What each worker gets of a machine."""

import os

from rosebatch.job.workers import machine


def test_workers_on_a_cpu_share_the_cores(monkeypatch):
    """By other names, the libraries never heard of it: each worker took all cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    each = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "RAYON_NUM_THREADS": "2"}
    assert machine.environments(4, "cpu") == [(f"CPU {number}", each) for number in range(4)]
    assert machine.environments("auto", "cpu")[0][1]["OMP_NUM_THREADS"] == "8"
