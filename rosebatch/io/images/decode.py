"""Files of images become pixels, in another process: the libraries that decode them read other people's bytes."""

import os
import tempfile
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.util import find_spec
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from rosebatch.core.errors import RowError, UserError, printable
from rosebatch.host.limited_process import IdleProcesses, LimitedProcess


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What decoding one image may take.

    Attributes:
        pixels: width x height. The default is Pillow's: a gigabyte of them in 32 bits and 3 channels.
        seconds: of processor time.
        memory: bytes. macOS limits the time alone.
    """

    pixels: int = 89_478_485
    seconds: float = 20.0
    memory: int = 2 << 30


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """A decoded image.

    Attributes:
        rgb: uint8 [height, width, 3].
        digest: of shape and pixels, 32 bytes: the same for two files with the same pixels.
    """

    rgb: NDArray[np.uint8]
    digest: bytes

    @classmethod
    def of(cls, rgb: NDArray[np.uint8]) -> "Pixels":
        """With its digest."""
        digest = sha256(b"%d %d " % rgb.shape[:2])
        digest.update(rgb.data)
        return cls(rgb, digest.digest())


def require_pillow() -> None:
    """Check that images can be decoded.

    Raises:
        UserError: Pillow is not installed.
    """
    if find_spec("PIL") is None:
        raise UserError("images need Pillow, which is not installed; pip install 'rosebatch[images]'")


def decode(content: bytes, limits: DecodeLimits | None = None, page: int | None = None) -> Pixels:
    """The first picture of a file as transformers' image processors have it: upright, in RGB, on white.

    Any thread may call this; each call has a process of its own meanwhile.

    Args:
        content: a JPEG, PNG, WebP, GIF, BMP or TIFF file. Only its first picture is decoded, whatever the number; a
            TIFF file with several pages is an error.
        limits: the defaults if None.
        page: of a PDF, counted from 1, where the content is one.

    Raises:
        RowError: ``invalid_image``: it is another file, or broken; ``image_too_large``: it exceeds the limits.
        UserError: Pillow is not installed.
    """
    limits = limits or DecodeLimits()
    process = _process()
    answer = process.ask({**asdict(limits), "what": "pixels", "page": page}, content)
    rgb = process.read(answer["height"], answer["width"]) if "height" in answer else None
    processes.put(process)
    if rgb is None:
        raise _error(answer, limits)
    return Pixels.of(rgb)


def count_pages(content: bytes, limits: DecodeLimits | None = None) -> int:
    """The pages of a PDF, within the limits of an image; errors as of ``decode``."""
    limits = limits or DecodeLimits()
    process = _process()
    answer = process.ask({**asdict(limits), "what": "pages"}, content)
    processes.put(process)
    if "pages" not in answer:
        raise _error(answer, limits)
    return int(answer["pages"])


def _process() -> "_Process":
    try:
        return processes.take()
    except OSError as error:
        raise RowError("image_not_read", f"no process can be started that decodes it ({error})") from None


def _error(answer: dict[str, Any], limits: DecodeLimits) -> RowError:
    match answer:
        case {"exceeds": "pixels"}:
            return RowError("image_too_large", f"it has more than {limits.pixels} pixels")
        case {"exceeds": "seconds"}:
            return RowError("image_too_large", f"decoding it takes more than {limits.seconds:g} s")
        case {"exceeds": "memory"}:
            return RowError("image_too_large", f"decoding it takes more than {limits.memory / 2**30:.3g} GiB")
        case {"died": status}:
            return RowError("invalid_image", f"what decodes it failed (exit status {status})")
    return RowError("invalid_image", printable(answer["error"]))


class _Process(LimitedProcess):
    """One that decodes images. Pixels come through memory that both processes have as a file."""

    def __init__(self) -> None:
        require_pillow()
        self._shared = _shared_file()
        try:
            super().__init__("rosebatch.io.images.worker", self._shared.fileno())
        except OSError:
            self._shared.close()
            raise

    def read(self, height: int, width: int) -> NDArray[np.uint8]:
        """The pixels that the process has written. They are copied: what it does later changes nothing."""
        rgb = np.empty((height, width, 3), np.uint8)
        self._shared.seek(0)
        count = self._shared.readinto(rgb.data.cast("B"))  # type: ignore[attr-defined]
        self._shared.truncate(0)
        assert count == rgb.nbytes
        return rgb

    def end(self) -> int:
        """End it, and free the memory."""
        self._shared.close()
        return super().end()


def _shared_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("rosebatch-pixels"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


# Those that wait for an image.
processes = IdleProcesses(_Process)
