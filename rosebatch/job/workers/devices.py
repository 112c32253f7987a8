"""The devices of a machine, without PyTorch: what each worker gets of them."""

import ctypes
import os
from collections.abc import Mapping
from typing import Literal

from rosebatch.config import Device
from rosebatch.errors import FlagError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Read when the libraries of a process are imported.
THREADS = ("OMP_NUMTHREADS", "MKL_NUMTHREADS", "RAYON_NUMTHREADS")


def environments(size: int | Literal["auto"], device: Device) -> list[tuple[str, Mapping[str, str]]]:
    """A name and the environment variables of each worker.

    On a CPU the workers share the cores evenly.

    Args:
        size: number of workers; ``auto``: one for each GPU, and one on a CPU.
        device: of the run.

    Raises:
        FlagError: there are fewer GPUs than workers.
    """
    gpus = [] if device == "cpu" else visible_gpus()
    if not gpus:
        count = 1 if size == "auto" else size
        cores = max(1, len(os.sched_getaffinity(0)) // count)
        return [(f"CPU {number}", dict.fromkeys(THREADS, str(cores))) for number in range(count)]
    count = len(gpus) if size == "auto" else size
    if count > len(gpus):
        raise FlagError(f"--data-parallel-size {count}: this machine has {len(gpus)} GPUs")
    return [(f"GPU {gpu}", {_VISIBLE: gpu}) for gpu in gpus[:count]]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    given = os.environ.get(_VISIBLE)
    count = _count_gpus()
    if not count:
        return []
    if given is None:
        return [str(number) for number in range(count)]
    # CUDA ignores what stands behind the first one that it does not know, so its count is the right one.
    return [name.strip() for name in given.split(",")][:count]


def _count_gpus() -> int:
    """GPUs that CUDA's driver counts; it creates no context for that."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
