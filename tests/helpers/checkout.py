"""The checkout of the tests, for processes that they start."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_path(*folders: object) -> str:
    """``PYTHONPATH`` of the checkout's packages, behind other folders."""
    return os.pathsep.join(map(str, (*folders, ROOT, ROOT / "kernels")))


def environment(**variables: str) -> dict[str, str]:
    """Of a process that imports the checkout's packages and computes in one thread."""
    return os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"} | variables
