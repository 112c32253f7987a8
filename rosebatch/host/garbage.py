"""Python's search for cycles of objects that nobody needs."""

import gc

# New objects before a search. Imports make 300,000 objects, nearly all to stay, and Python's default searches them 450
# times, which takes an eighth of the import. One search of all takes longer than a decode step of a GPU.
_SELDOM = 100_000


def search_seldom() -> None:
    """For processes that are our own, before they import anything large."""
    gc.set_threshold(_SELDOM, *gc.get_threshold()[1:])
