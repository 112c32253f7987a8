"""The threads of OpenMP, with which PyTorch computes on a CPU."""

import os


def wait_passively() -> None:
    """Keep them from spinning while they wait: beside another busy process, that makes a CPU up to 15 times slower.

    Has no effect once PyTorch is imported, or where ``OMP_WAIT_POLICY`` is set (benchmarks/NOTEBOOK/2026-11.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
