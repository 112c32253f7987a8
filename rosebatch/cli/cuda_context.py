"""The GPU's context, created while PyTorch is still being imported: a third of a second that nobody waits for then.

PyTorch works in each device's primary context, which is shared by all that ask the driver for it. The driver is called
without Python's lock, so importing goes on meanwhile.
"""

import ctypes
from threading import Thread


def create_in_background(device: str) -> None:
    """Have the first GPU ready for ``--device auto`` or ``cuda``.

    Where there is none nothing happens: PyTorch will say so.
    """
    if device != "cpu":
        Thread(target=create, daemon=True).start()


def create() -> None:
    """Create the first GPU's primary context, and keep it until the process ends."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    context = ctypes.c_void_p()
    if driver.cuInit(0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
