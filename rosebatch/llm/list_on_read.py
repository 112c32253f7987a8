"""Attributes of outputs that become lists when they are read."""

from typing import Any


class ListOnRead:
    """An attribute that becomes a list when it is read.

    A list of 1,300 token ids takes as long to make as all else of an output. Each search for garbage looks at all of
    them, and few scripts read those of the prompt.
    """

    def __init__(self, slot: Any) -> None:
        self._slot = slot

    def __get__(self, owner: Any, kind: type) -> Any:
        if owner is None:
            return self
        value = self._slot.__get__(owner, kind)
        if not isinstance(value, list):
            value = list(value)
            self._slot.__set__(owner, value)
        return value

    def __set__(self, owner: Any, value: Any) -> None:
        self._slot.__set__(owner, value)
