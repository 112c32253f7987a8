"""Creates the GPU's context while PyTorch is still being imported. That hides a third of a second.

PyTorch works in each device's primary context, which the driver gives to every caller.
ctypes releases Python's lock during the driver's calls, so the import continues meanwhile.
"""

import ctypes
from threading import Thread


def create_in_background(device: str) -> None:
    """Prepare the first GPU for ``--device auto`` or ``cuda``, on a thread.

    Without a GPU nothing happens: PyTorch reports that later.
    """
    if device != "cpu":
        Thread(target=create, daemon=True).start()


def create() -> None:
    """Create the first GPU's primary context and keep it until the process ends."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    context = ctypes.c_void_p()
    if driver.cuInit(0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
