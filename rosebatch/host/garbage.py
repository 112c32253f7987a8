"""Python's search for cycles of objects that nobody needs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

# New objects before a search. Imports make 300,000 objects, nearly all to stay, and Python's default searches them 450
# times, which takes an eighth of the import. One search of all takes longer than a decode step of a GPU.
_SELDOM = 100_000
# Rows make few cycles. Python's default took 7 % of the host's time for them. A search looks at each token id: prompts
# of 1,300 took 15 %.
_RARELY = 50_000


def search_seldom() -> None:
    """For processes that are our own, before they import anything large."""
    gc.set_threshold(_SELDOM, *gc.get_threshold()[1:])


class _Rarely:
    """Who wants rare searches at the moment, of any thread; the last one brings back what was before."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._holders = 0
        self._before = gc.get_threshold()

    def change(self, holders: int) -> None:
        """Count so many more holders, or fewer."""
        with self._lock:
            if not self._holders:
                self._before = gc.get_threshold()
                # 0 is for no search at all.
                gc.set_threshold(self._before[0] and max(self._before[0], _RARELY), *self._before[1:])
            self._holders += holders
            if not self._holders:
                gc.set_threshold(*self._before)


_rarely = _Rarely()


@contextmanager
def searched_rarely() -> Iterator[None]:
    """While rows are under way: searches take longer the more rows there are, and find next to nothing."""
    _rarely.change(1)
    try:
        yield
    finally:
        _rarely.change(-1)
