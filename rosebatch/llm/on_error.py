"""What becomes of a prompt that cannot be served."""

from typing import Any, Literal

from rosebatch.core.errors import FlagError
from rosebatch.core.words import quoted

OnError = Literal["raise", "return"]


def check_on_error(on_error: OnError) -> None:
    """Check a parameter.

    Raises:
        ValueError: it is neither.
    """
    if on_error not in ("raise", "return"):
        raise ValueError(f"on_error must be raise or return, got {quoted(on_error)}")


def checked(output: Any, on_error: OnError, place: int) -> Any:
    """The output of a prompt at a place of its call.

    Raises:
        ValueError: it has an error, which is to be raised.
    """
    if output.error is not None and on_error == "raise":
        raise FlagError(f"prompt {place}: {output.error}")
    return output
