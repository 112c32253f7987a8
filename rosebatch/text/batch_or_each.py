"""Work on many items in one call, so that an item that fails costs only itself."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from rosebatch.core.errors import is_failure

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def batch_or_each(
    work: Callable[[Sequence[ItemT]], list[ResultT]], items: Sequence[ItemT], failed: Callable[[BaseException], ResultT]
) -> list[ResultT]:
    """The result of each item. If the call for all of them raises, each item gets a call of its own.

    Args:
        work: gives one result for each item.
        items: any number.
        failed: the result of an item whose own call raises.
    """
    try:
        return work(items)
    except BaseException as error:
        if not is_failure(error):
            raise
        if len(items) == 1:
            return [failed(error)]
    return [result for item in items for result in batch_or_each(work, [item], failed)]
