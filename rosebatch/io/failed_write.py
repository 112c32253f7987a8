"""What ends a run that cannot write, such as on a full disk: the error names the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rosebatch.core.errors import FailedRunError


def failed_write(file: Path | IO[bytes], error: OSError, way_out: str = "") -> FailedRunError:
    """The error of a file or stream.

    Args:
        file: that cannot be written.
        error: of the system.
        way_out: for people, the end of the message.
    """
    name = file if isinstance(file, Path) else getattr(file, "name", "the output")
    # A closed stream is opened again by its number.
    name = "stdout" if name == 1 else str(name).strip("<>")
    return FailedRunError(f"{name}: {error.strerror or error}{way_out}")


@contextmanager
def writing(file: Path | IO[bytes], way_out: str = "") -> Iterator[None]:
    """Raises ``failed_write`` in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise failed_write(file, error, way_out) from None
