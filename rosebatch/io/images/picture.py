"""Pictures that a caller of the library hands over decoded. They are the caller's own: no process guards them."""

import sys
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rosebatch.core.errors import RowError

# Pillow reads a file when its pixels are asked for. Two rows may have the same picture, and two threads ask for it.
_reads = Lock()


class Picture:
    """One picture.

    Args:
        given: see ``is_picture``. Its pixels are read when they are needed: do not change it meanwhile.

    Attributes:
        size: bytes of its pixels.

    Raises:
        RowError: ``invalid_image``: it is an array of another shape or dtype, or has no pixels.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        if isinstance(given, np.ndarray):
            if given.dtype != np.uint8 or given.ndim != 3 or given.shape[2] != 3:
                shape = ", ".join(map(str, given.shape))
                raise RowError(
                    "invalid_image", f"an array must be uint8 [height, width, 3], got {given.dtype} [{shape}]"
                )
            self.size: int = given.size
        else:
            self.size = 3 * given.width * given.height
        if not self.size:
            raise RowError("invalid_image", "the picture has no pixels")

    def rgb(self) -> NDArray[np.uint8]:
        """uint8 [height, width, 3]; of Pillow's pictures upright, on white."""
        if isinstance(self._given, np.ndarray):
            # PyTorch warns of others.
            return np.require(self._given, requirements=("C", "W"))
        # Only now: arrays need no Pillow.
        from rosebatch.io.images.upright import upright_rgb

        with _reads:
            return np.array(upright_rgb(self._given))

    def __reduce__(self) -> tuple[type, tuple[NDArray[np.uint8]]]:
        # Pillow's own pickle loses how a picture is turned.
        return Picture, (self.rgb(),)


def is_picture(value: object) -> bool:
    """Whether it is an array of NumPy or a picture of Pillow, which is imported if there is one."""
    pillow = sys.modules.get("PIL.Image")
    return isinstance(value, np.ndarray) or (pillow is not None and isinstance(value, pillow.Image))
