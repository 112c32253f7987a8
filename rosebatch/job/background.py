"""A function on a thread of its own."""

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

_T = TypeVar("_T")


def in_background(function: Callable[[], _T]) -> Callable[[], _T]:
    """Run a function on a thread. The returned function waits for it, then returns or raises what it did.

    The end of the process does not wait for the thread.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=work, daemon=True)
    thread.start()

    def wait() -> _T:
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    return wait
