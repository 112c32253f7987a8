"""The GPUs of a machine, without PyTorch."""

import ctypes
import os

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    given = os.environ.get(VISIBLE)
    count = _count_gpus()
    if not count:
        return []
    if given is None:
        return [str(number) for number in range(count)]
    # CUDA ignores what follows the first unknown one, so its count is the right one.
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
