"""From rows to the outputs of an ``LLM``."""

import pickle
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from typing import Any

from rosebatch.io.output import Sink
from rosebatch.io.results import Shape
from rosebatch.job.serving import Serving
from rosebatch.llm.backend import Outputs


def serving(shape: Shape, seed: int | None = None, *, in_order: bool = False) -> Serving:
    """How the rows of an ``LLM`` are served.

    Scripts for other engines' libraries look for all of a chat's answer in its text. The messages have its parts.
    """
    return Serving(shape, seed, in_order, return_token_ids=True, whole_texts=True)


class Collected(Sink):
    """Keeps results until they are taken."""

    def __init__(self) -> None:
        self._found: list[Any] = []

    def add(self, index: int, row: Any, *, failed: bool) -> None:
        """See ``Sink``."""
        self._found.append(row)

    def add_lines(self, indices: Sequence[int], lines: Sequence[bytes], failed: Collection[int]) -> None:
        """See ``Sink``."""
        self._found += map(pickle.loads, lines)

    def after(self, steps: Generator[None, None, None]) -> Outputs:
        """The results, as a loop that fills this sink brings them."""
        with closing(steps):
            for _ in steps:
                yield from self._take()
            yield from self._take()

    def _take(self) -> list[Any]:
        found, self._found = self._found, []
        return found


def pickled(index: int, row: Any, *, failed: bool) -> bytes:
    """An ``Encode`` of ``rosebatch.io.output`` for plain objects."""
    return pickle.dumps(row)
